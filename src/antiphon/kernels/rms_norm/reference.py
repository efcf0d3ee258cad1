"""Root-mean-square norm, spelled out."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / sqrt(mean(x²) + eps), the quotient in float32 and rounded before the product."""
    wide = x.float()
    return weight * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, rounded, and its norm."""
    total = x + added
    return total, rms_norm(total, weight, eps)
