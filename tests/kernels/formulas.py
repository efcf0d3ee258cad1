"""Formulas in float64 that several operators are compared with; nothing here is shared with the package."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = torch.finfo(torch.float32).eps
"""Of float32: the distance from 1 to the next number."""


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary rotation as complex numbers: the halves of a head are real and imaginary parts.

    x: [N, H, D] floating. positions: [N] int64. Returns [N, H, D] float64.
    """
    first, second = x.double().chunk(2, dim=-1)
    frequencies = theta ** -(torch.arange(first.shape[-1], dtype=torch.float64) / first.shape[-1])
    angles = (positions[:, None] * frequencies)[:, None]
    out = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([out.real, out.imag], dim=-1)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / sqrt(mean(x²) + eps) over the last dimension, float64."""
    wide = x.double()
    return weight.double() * wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)
