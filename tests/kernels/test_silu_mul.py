"""The gated activation against its formula in float64, in every place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.silu_mul import reference
from antiphon.kernels.silu_mul.op import silu_mul
from kernels.formulas import EPS
from kernels.places import Place, Run, half_dtypes


def run(place: Place, gate_up: Tensor) -> Tensor:
    if place is Place.INTERPRETED:
        from antiphon.kernels.silu_mul import kernel

        return kernel.silu_mul(gate_up)
    return silu_mul(gate_up.to(place.device)).cpu()


def random(*shape: int) -> Tensor:
    return 5 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def check_formula(place: Place, num_rows: int, num_columns: int) -> None:
    gate_up = random(num_rows, 2 * num_columns)
    gate, up = gate_up.double().chunk(2, dim=1)
    want = gate / (1 + torch.exp(-gate)) * up
    # A GPU's exp is that of a product with log2(e), which rounds with its size; the rest are some single roundings.
    tolerance = (8 + 1.5 * gate.abs()) * EPS * want.abs()
    assert ((run(place, gate_up).double() - want).abs() <= tolerance).all()


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 7), (2, 129), (2, 3072)])
def test_silu_mul_is_its_formula(at: Run, shape: tuple[int, int]) -> None:
    at(check_formula, *shape)


def compare_rounding(place: Place, dtype: torch.dtype) -> None:
    """How exp is computed may move the gate's part across a rounding's edge, and nothing else may differ.

    That is one unit in the last place of the gate's part, at most eps of it; the product with it may then be rounded to
    the other side, which is as much again.
    """
    gate_up = random(9, 1000).to(dtype)
    got, want = run(place, gate_up), reference.silu_mul(gate_up)
    assert (got == want).double().mean() > 0.99
    torch.testing.assert_close(got, want, rtol=2.01 * torch.finfo(dtype).eps, atol=1e-7)


def check_rounding(place: Place) -> None:
    for dtype in half_dtypes(place):
        compare_rounding(place, dtype)


def test_it_rounds_where_the_reference_rounds(at: Run) -> None:
    at(check_rounding)


def check_strides(place: Place) -> None:
    whole = random(5, 40)
    assert torch.equal(run(place, whole[::2, 4:20]), run(place, whole[::2, 4:20].contiguous()))


def test_rows_that_lie_apart_give_what_their_copies_give(at: Run) -> None:
    at(check_strides)


def check_range(place: Place) -> None:
    gate = torch.tensor([-1e30, -200.0, 200.0, 1e30])
    got = run(place, torch.cat([gate, torch.ones(4)])[None])[0]
    torch.testing.assert_close(got, torch.tensor([0, 0, 200, 1e30]), rtol=4 * EPS, atol=0)


@pytest.mark.filterwarnings("ignore:overflow")
def test_very_large_gates_do_not_overflow(at: Run) -> None:
    at(check_range)


def test_operands_of_another_shape_are_refused() -> None:
    for refused in (torch.zeros(2, 3), torch.zeros(4), torch.zeros(4, 4).T[:, :2]):
        with pytest.raises(ShapeError, match="silu_mul wants"):
            silu_mul(refused)
