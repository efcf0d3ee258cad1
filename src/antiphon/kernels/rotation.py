"""Rotary position angles. Computed from integer positions in float64, so a session may run for months.

Not an operator: a table that operators share, and its definition. Convention: half rotation, (x1, x2) →
(x1 cos − x2 sin, x2 cos + x1 sin) with x1, x2 the two halves of a head (REFERENCE 5.1); frequencies are exact, never
rounded to the model's dtype (5.4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos, sin: [N, head_dim / 2] float32, one row per token."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, head_dim: int, theta: float) -> Rotation:
    """The rotation of each position.

    positions: [N] int64, any size and sign.
    theta: base of the frequencies, theta^(-2i / head_dim).
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angles = positions.double()[:, None] * theta**-exponents
    return Rotation(angles.cos().float(), angles.sin().float())


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate heads in float32 and round once.

    x: [N, H, D] floating. Returns the same shape and dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = by.cos[:, None], by.sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
