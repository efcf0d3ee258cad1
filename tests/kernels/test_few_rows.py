"""Products of few rows against formulas in float64, in every place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.few_rows import op, reference
from kernels.formulas import EPS, normed
from kernels.places import Place, Run, half_dtypes

NORM_EPS = 1e-6


def operands(num_rows: int, K: int, M: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, the norm's weight, the matrix, a residual of half its columns; results are about 1 in size."""
    generator = torch.Generator().manual_seed(num_rows + K)
    x, weight, matrix, residual = (
        torch.randn(shape, generator=generator) for shape in ((num_rows, K), (K,), (M, K), (num_rows, M))
    )
    return x, weight, matrix / K**0.5, residual


def all_at(place: Place, x: Tensor, weight: Tensor, matrix: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """norm_linear, norm_gated and linear_add."""
    x, weight, matrix, residual = (tensor.to(place.device) for tensor in (x, weight, matrix, residual))
    if place is Place.INTERPRETED:
        from antiphon.kernels.few_rows import kernel

        return (
            kernel.norm_linear(x, weight, NORM_EPS, matrix),
            kernel.norm_gated(x, weight, NORM_EPS, matrix),
            kernel.linear_add(x, matrix, residual),
        )
    return (
        op.norm_linear(x, weight, NORM_EPS, matrix).cpu(),
        op.norm_gated(x, weight, NORM_EPS, matrix).cpu(),
        op.linear_add(x, matrix, residual).cpu(),
    )


def check_formula(place: Place, num_rows: int, K: int, M: int) -> None:
    x, weight, matrix, residual = operands(num_rows, K, M)
    linear, gated, added = all_at(place, x, weight, matrix, residual)
    product = normed(x, weight, NORM_EPS) @ matrix.double().T
    # Sums of K products of numbers of size 1 and 1 / sqrt(K), the norm's own sum of K squares.
    atol = 2 * K**0.5 * EPS * 8 + K * EPS
    torch.testing.assert_close(linear.double(), product, rtol=0, atol=atol)
    gate, up = product.chunk(2, dim=1)
    largest = max(1.0, product.abs().max().item()) if product.numel() else 1.0
    torch.testing.assert_close(gated.double(), gate / (1 + torch.exp(-gate)) * up, rtol=0, atol=3 * largest * atol)
    torch.testing.assert_close(added.double(), residual.double() + x.double() @ matrix.double().T, rtol=0, atol=atol)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 8])
@pytest.mark.parametrize(("K", "M"), [(1, 2), (300, 50), (768, 32)])
def test_each_product_is_its_formula(at: Run, num_rows: int, K: int, M: int) -> None:
    at(check_formula, num_rows, K, M)


def compare_rounding(place: Place, dtype: torch.dtype) -> None:
    """How products are summed may move a number across a rounding's edge, and nothing else may differ."""
    x, weight, matrix, residual = (tensor.to(dtype) for tensor in operands(5, 768, 96))
    eps = torch.finfo(dtype).eps
    got = all_at(place, x, weight, matrix, residual)
    want = (
        reference.norm_linear(x, weight, NORM_EPS, matrix),
        reference.norm_gated(x, weight, NORM_EPS, matrix),
        reference.linear_add(x, matrix, residual),
    )
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype
        assert (one == other).double().mean() > 0.9
        torch.testing.assert_close(one, other, rtol=4 * eps, atol=4 * eps)


def check_rounding(place: Place) -> None:
    for dtype in half_dtypes(place):
        compare_rounding(place, dtype)


def test_they_round_where_the_reference_rounds(at: Run) -> None:
    at(check_rounding)


def check_neighbours(place: Place) -> None:
    x, weight, matrix, residual = operands(5, 300, 20)
    together = all_at(place, x, weight, matrix, residual)
    for row in (0, 2, 4):
        one = slice(row, row + 1)
        alone = all_at(place, x[one], weight, matrix, residual[one])
        for got, want in zip(alone, together, strict=True):
            if place is Place.REFERENCE:
                # The library sums a product of another height in another order.
                torch.testing.assert_close(got, want[one], rtol=0, atol=300 * EPS)
            else:
                assert torch.equal(got, want[one])


def test_a_row_comes_to_the_same_beside_others(at: Run) -> None:
    at(check_neighbours)


def test_operands_that_do_not_fit_are_refused() -> None:
    x, weight, matrix, residual = operands(3, 8, 4)
    with pytest.raises(ShapeError, match="at most 8"):
        op.norm_linear(torch.zeros(9, 8), weight, NORM_EPS, matrix)
    with pytest.raises(ShapeError, match="matrix"):
        op.linear_add(x[:, :7].contiguous(), matrix, residual)
    with pytest.raises(ShapeError, match="residual"):
        op.linear_add(x, matrix, residual[:, :3])
    with pytest.raises(ShapeError, match="two halves"):
        op.norm_gated(x, weight, NORM_EPS, matrix[:3])
    with pytest.raises(ShapeError, match="contiguous"):
        op.norm_linear(x, weight, NORM_EPS, matrix.T.contiguous().T)
