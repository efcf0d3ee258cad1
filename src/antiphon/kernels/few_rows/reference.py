"""Products of few rows with what stands before and behind them, one after the other."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.rms_norm.reference import rms_norm
from antiphon.kernels.silu_mul.reference import silu_mul


def norm_linear(x: Tensor, weight: Tensor, eps: float, matrix: Tensor) -> Tensor:
    """Shapes and meaning as in `op.norm_linear`."""
    return F.linear(rms_norm(x, weight, eps), matrix)


def norm_gated(x: Tensor, weight: Tensor, eps: float, matrix: Tensor) -> Tensor:
    """Shapes and meaning as in `op.norm_gated`."""
    return silu_mul(F.linear(rms_norm(x, weight, eps), matrix))


def linear_add(x: Tensor, matrix: Tensor, residual: Tensor) -> Tensor:
    """Shapes and meaning as in `op.linear_add`."""
    return residual + F.linear(x, matrix)
