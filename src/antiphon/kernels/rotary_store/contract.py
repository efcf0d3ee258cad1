"""Operands of `rotary_store` that belong together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from antiphon.kernels.rotation import Rotation

LARGEST = 448.0
"""Of float8_e4m3fn."""
SMALLEST_SCALE = 2.0**-126
"""So that a head of zeros has one to be divided by: the smallest number of float32 with all its bits."""


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm over each head before the rotation. q_weight, k_weight: [D]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class StepRotations:
    """Computed once per step and used by all layers.

    anchor, ring: rotations of the queries for anchor and for ring keys.
    key: rotation of the keys that are written.
    slots: [N] int64, where they are written; -1 for a padding token, of which nothing is written.
    """

    anchor: Rotation
    ring: Rotation
    key: Rotation
    slots: Tensor
