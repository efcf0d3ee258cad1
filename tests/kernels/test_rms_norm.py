"""RMS norm against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.rms_norm.op import rms_norm
from kernels.formulas import EPS, normed

SIZES = [(0, 8), (1, 1), (3, 7), (2, 5, 33), (4, 4096)]


def operands(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * 3, torch.randn(shape[-1], generator=generator)


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm_is_its_formula(shape: tuple[int, ...], eps: float) -> None:
    x, weight = operands(*shape)
    # The mean sums D squares, and its root halves their relative error; the rest are single roundings.
    rtol = (shape[-1] / 2 + 4) * EPS
    torch.testing.assert_close(rms_norm(x, weight, eps).double(), normed(x, weight, eps), rtol=rtol, atol=0)


def test_rms_norm_in_bfloat16_keeps_the_sum_wide_and_rounds_twice() -> None:
    x, weight = (tensor.bfloat16() for tensor in operands(5, 4096))
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == torch.bfloat16
    # Half a unit for the quotient and half for the product; a sum in bfloat16 would be off by far more.
    rtol = 1.01 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(got.double(), normed(x, weight, 1e-6), rtol=rtol, atol=0)


def test_a_strided_tensor_is_normed_like_its_copy() -> None:
    x, weight = operands(6, 5, 8)
    assert torch.equal(rms_norm(x.transpose(0, 1), weight, 1e-6), rms_norm(x, weight, 1e-6).transpose(0, 1))


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"weight of shape \(8,\), got \(7,\)"):
        rms_norm(torch.zeros(2, 8), torch.ones(7), 1e-6)
