"""Norm of q and k, their rotations, and the write into the cache, one after the other."""

from __future__ import annotations

from torch import Tensor

from antiphon.kernels.rms_norm.reference import rms_norm
from antiphon.kernels.rotary_store.contract import HeadNorm, StepRotations
from antiphon.kernels.rotation import rotate


def rotary_store(
    q: Tensor, k: Tensor, v: Tensor, norm: HeadNorm | None, rotations: StepRotations, cache: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Shapes and meaning as in `op.rotary_store`."""
    if norm is not None:
        q, k = rms_norm(q, norm.q_weight, norm.eps), rms_norm(k, norm.k_weight, norm.eps)
    keys, values = (tensor.flatten(0, 1) for tensor in cache)
    is_real = rotations.slots >= 0
    slots = rotations.slots[is_real]
    keys[slots] = rotate(k, rotations.key)[is_real]
    values[slots] = v[is_real]
    return rotate(q, rotations.anchor), rotate(q, rotations.ring)
