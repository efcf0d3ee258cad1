"""Rotation of stored keys in place, layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels.rotation import rotate, rotation


def rotate_keys(keys: Tensor, slots: Tensor, by_positions: int, theta: float) -> None:
    """Shapes and meaning as in `op.rotate_keys`."""
    by = rotation(torch.full((1,), by_positions, device=keys.device), keys.shape[-1], theta)
    for layer in keys.flatten(1, 2):
        layer[slots] = rotate(layer[slots], by)
