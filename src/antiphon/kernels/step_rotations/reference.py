"""The three rotations of a step, one after the other."""

from __future__ import annotations

from torch import Tensor

from antiphon.kernels.rotation import Rotation, rotation


def step_rotations(
    anchor: Tensor, ring: Tensor, key: Tensor, head_dim: int, theta: float
) -> tuple[Rotation, Rotation, Rotation]:
    """Shapes and meaning as in `op.step_rotations`."""
    first, second, third = (rotation(positions, head_dim, theta) for positions in (anchor, ring, key))
    return first, second, third
