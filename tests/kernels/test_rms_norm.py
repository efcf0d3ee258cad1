"""RMS norm against its formula in float64, in every place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.rms_norm import reference
from antiphon.kernels.rms_norm.op import add_rms_norm, rms_norm
from kernels.formulas import EPS, normed
from kernels.places import Place, Run, half_dtypes

SIZES = [(0, 8), (1, 1), (3, 7), (2, 5, 33), (3, 768), (4, 4096)]


def operands(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, what is added to it, and the weight."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=generator) * 3, torch.randn(shape[-1], generator=generator)
    return x, torch.randn(shape, generator=generator), weight


def norm_at(place: Place, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if place is Place.INTERPRETED:
        from antiphon.kernels.rms_norm import kernel

        return kernel.rms_norm(x, weight, eps)
    return rms_norm(x.to(place.device), weight.to(place.device), eps).cpu()


def add_at(place: Place, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if place is Place.INTERPRETED:
        from antiphon.kernels.rms_norm import kernel

        return kernel.add_rms_norm(x, added, weight, eps)
    total, out = add_rms_norm(x.to(place.device), added.to(place.device), weight.to(place.device), eps)
    return total.cpu(), out.cpu()


def check_formula(place: Place, shape: tuple[int, ...], eps: float) -> None:
    x, added, weight = operands(*shape)
    # The mean sums D squares, and its root halves their relative error; the rest are single roundings.
    rtol = (shape[-1] / 2 + 4) * EPS
    torch.testing.assert_close(norm_at(place, x, weight, eps).double(), normed(x, weight, eps), rtol=rtol, atol=0)
    total, out = add_at(place, x, added, weight, eps)
    assert torch.equal(total, x + added)
    torch.testing.assert_close(out.double(), normed(x + added, weight, eps), rtol=rtol, atol=0)


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_is_its_formula_with_and_without_a_residual(at: Run, shape: tuple[int, ...], eps: float) -> None:
    at(check_formula, shape, eps)


def test_rms_norm_in_bfloat16_keeps_the_sum_wide_and_rounds_twice() -> None:
    x, _, weight = (tensor.bfloat16() for tensor in operands(5, 4096))
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == torch.bfloat16
    # Half a unit for the quotient and half for the product; a sum in bfloat16 would be off by far more.
    rtol = 1.01 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(got.double(), normed(x, weight, 1e-6), rtol=rtol, atol=0)


def compare_rounding(place: Place, dtype: torch.dtype) -> None:
    """How the kernel sums may move a quotient across a rounding's edge, and nothing else may differ."""
    x, added, weight = (tensor.to(dtype) for tensor in operands(33, 4096))
    (total, out), (wanted_total, wanted) = (
        add_at(place, x, added, weight, 1e-6),
        reference.add_rms_norm(x, added, weight, 1e-6),
    )
    assert torch.equal(total, wanted_total)
    assert (out == wanted).double().mean() > 0.99
    torch.testing.assert_close(out, wanted, rtol=1.01 * torch.finfo(dtype).eps, atol=1e-7)


def check_rounding(place: Place) -> None:
    for dtype in half_dtypes(place):
        compare_rounding(place, dtype)


def test_it_rounds_where_the_reference_rounds(at: Run) -> None:
    at(check_rounding)


def check_neighbours(place: Place) -> None:
    x, added, weight = operands(9, 768)
    total, out = add_at(place, x, added, weight, 1e-6)
    for row in range(len(x)):
        alone = add_at(place, x[row : row + 1], added[row : row + 1], weight, 1e-6)
        assert torch.equal(alone[0], total[row : row + 1])
        assert torch.equal(alone[1], out[row : row + 1])


def test_a_row_comes_to_the_same_bits_beside_others(at: Run) -> None:
    at(check_neighbours)


def check_strides(place: Place) -> None:
    x, _, weight = operands(6, 5, 8)
    want = norm_at(place, x, weight, 1e-6)
    assert torch.equal(norm_at(place, x.transpose(0, 1), weight, 1e-6), want.transpose(0, 1))
    # The reference sums columns that lie apart in another order.
    torch.testing.assert_close(norm_at(place, x.mT.contiguous().mT, weight, 1e-6), want, rtol=8 * EPS, atol=0)
    total, out = add_at(place, x[:, 1], x[:, 3], weight, 1e-6)
    assert torch.equal(total, x[:, 1] + x[:, 3])
    assert torch.equal(out, norm_at(place, total, weight, 1e-6))


def test_strided_tensors_are_normed_like_their_copies(at: Run) -> None:
    at(check_strides)


def test_operands_of_another_size_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"weight of shape \(8,\), got \(7,\)"):
        rms_norm(torch.zeros(2, 8), torch.ones(7), 1e-6)
    with pytest.raises(ShapeError, match="of one shape"):
        add_rms_norm(torch.zeros(2, 8), torch.zeros(8), torch.ones(8), 1e-6)
