"""Norm of q and k, their rotations, and the write into the cache, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels.kv_cache import LayerCache
from antiphon.kernels.rms_norm.reference import rms_norm
from antiphon.kernels.rotary_store.contract import LARGEST, SMALLEST_SCALE, HeadNorm, StepRotations
from antiphon.kernels.rotation import rotate


def rotary_store(
    q: Tensor, k: Tensor, v: Tensor, norm: HeadNorm | None, rotations: StepRotations, cache: LayerCache
) -> tuple[Tensor, Tensor]:
    """Shapes and meaning as in `op.rotary_store`."""
    if norm is not None:
        q, k = rms_norm(q, norm.q_weight, norm.eps), rms_norm(k, norm.k_weight, norm.eps)
    keys, values = cache.keys.flatten(0, 1), cache.values.flatten(0, 1)
    is_real = rotations.slots >= 0
    slots = rotations.slots[is_real]
    if cache.scales is None:
        keys[slots] = rotate(k, rotations.key)[is_real]
        values[slots] = v[is_real]
    else:
        # Not rounded to the model's dtype in between.
        k = rotate(k.float(), rotations.key)
        block_size = cache.keys.shape[1]
        for x, stored, scales in ((k, keys, cache.scales.keys), (v, values, cache.scales.values)):
            numbers, scale = quantised(x[is_real])
            stored[slots] = numbers
            scales[slots // block_size, :, slots % block_size] = scale
    return rotate(q, rotations.anchor), rotate(q, rotations.ring)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [N, H, D] floating. Returns numbers, the same shape in float8_e4m3fn, and scales [N, H] float32."""
    x = x.float()
    scales = (x.abs().amax(dim=-1) * (1 / LARGEST)).clamp(min=SMALLEST_SCALE)
    return (x * (1 / scales)[..., None]).to(torch.float8_e4m3fn), scales
