"""Products of some hundred rows against formulas in float64, in every place."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.linear import op, reference
from antiphon.kernels.linear.contract import Activation
from kernels.formulas import EPS
from kernels.places import Place, Run, half_dtypes


def operands(shape: tuple[int, ...], N: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, the matrix and the bias; results are about 1 in size."""
    K, generator = shape[-1], torch.Generator().manual_seed(N)
    x, weight, bias = (torch.randn(one, generator=generator) for one in (shape, (N, K), (N,)))
    return x, weight / K**0.5, bias


def run(place: Place, x: Tensor, weight: Tensor, bias: Tensor, activation: Activation) -> Tensor:
    if place is Place.REFERENCE:
        return op.linear(x, weight, bias, activation)
    # Not by the operator, which has the library compute in float32 and whatever is large.
    from antiphon.kernels.linear import kernel

    x, weight, bias = (tensor.to(place.device) for tensor in (x, weight, bias))
    return kernel.linear(x, weight, bias, activation).cpu()


def check_formula(place: Place, shape: tuple[int, ...], N: int) -> None:
    x, weight, bias = operands(shape, N)
    exact = x.double() @ weight.double().T + bias.double()
    bent = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    atol = 16 * shape[-1] ** 0.5 * EPS
    got = run(place, x, weight, bias, Activation.NONE)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=atol)
    got = run(place, x, weight, bias, Activation.GELU)
    torch.testing.assert_close(got.double(), exact * (1 + torch.tanh(bent)) / 2, rtol=0, atol=4 * atol)


@pytest.mark.parametrize(
    ("shape", "N"), [((0, 8), 4), ((1, 1), 1), ((2, 3, 40), 70), ((130, 512), 96), ((2, 56, 96), 33)]
)
def test_each_product_is_its_formula(at: Run, shape: tuple[int, ...], N: int) -> None:
    at(check_formula, shape, N)


def check_rounding(place: Place) -> None:
    """How products are summed may move a number across a rounding's edge, and nothing else may differ."""
    for dtype in half_dtypes(place):
        eps = torch.finfo(dtype).eps
        for num_rows, activation in product((70, 150), Activation):
            x, weight, bias = (tensor.to(dtype) for tensor in operands((num_rows, 512), 96))
            got, want = run(place, x, weight, bias, activation), reference.linear(x, weight, bias, activation)
            assert got.dtype == dtype
            assert (got == want).double().mean() > 0.9
            torch.testing.assert_close(got, want, rtol=4 * eps, atol=4 * eps)


def test_it_rounds_where_the_reference_rounds(at: Run) -> None:
    at(check_rounding)


def check_range(place: Place) -> None:
    x = torch.tensor([[-1e20], [-30.0], [30.0], [1e20]])
    got = run(place, x, torch.ones(1, 1), torch.zeros(1), Activation.GELU)
    torch.testing.assert_close(got, torch.tensor([[0.0], [0.0], [30.0], [1e20]]), rtol=4 * EPS, atol=0)


@pytest.mark.filterwarnings("ignore:overflow")
def test_very_large_products_do_not_overflow(at: Run) -> None:
    at(check_range)


def test_operands_that_do_not_fit_are_refused() -> None:
    x, weight, bias = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4)
    for wrong in ((x[:, :2], weight, bias), (x, weight, bias[:3]), (x, torch.zeros(3, 4).T, bias)):
        with pytest.raises(ShapeError, match="linear wants"):
            op.linear(*wrong)
