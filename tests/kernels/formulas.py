"""Formulas in float64 that several operators are compared with; nothing here is shared with the package."""

from __future__ import annotations

from decimal import Decimal, localcontext

import torch
from torch import Tensor

EPS = torch.finfo(torch.float32).eps
"""Of float32: the distance from 1 to the next number."""
TWO_PI = Decimal("6.283185307179586476925286766559005768394338798750211641949889")


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


def exact_angle(position: int, pair: int, head_dim: int, theta: float) -> float:
    """position · theta^(-2 pair / head_dim) modulo 2 pi, with 60 decimal digits."""
    with localcontext(prec=60):
        frequency = Decimal(theta) ** (Decimal(-2 * pair) / head_dim)
        return float(position * frequency % TWO_PI)
