"""`rotary_store` in Triton: one program for some heads of one token, which are all queries, all keys or all values.

Shown, interpreted on the CPU, by tests/kernels/test_rotary_store.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.dependent_launch import await_previous, dependent
from antiphon.kernels.kv_cache import LayerCache
from antiphon.kernels.rotary_store.contract import LARGEST, SMALLEST_SCALE, HeadNorm, StepRotations

_PAIRS = 256
"""Of a program, which is one warp: 8 pairs a thread, 16 bytes of each half in bfloat16. A token of the thinker is 12
programs, so that one token is spread over 12 SMs and 512 tokens fill all SMs with 46 warps each."""


@triton.jit
def _normed(first, second, weight, eps, i, is_i, D: tl.constexpr):
    """RMS norm of heads [BH, D / 2] twice, rounded where the reference rounds; float32 again at last."""
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D
    scale = tl.rsqrt(mean + eps)[:, None]
    by_first = tl.load(weight + i, mask=is_i, other=0.0).to(tl.float32)[None, :]
    by_second = tl.load(weight + D // 2 + i, mask=is_i, other=0.0).to(tl.float32)[None, :]
    first = (first * scale).to(dtype).to(tl.float32) * by_first
    second = (second * scale).to(dtype).to(tl.float32) * by_second
    return first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)


@triton.jit
def _turned(first, second, cos, sin, token, i, is_i, HALF: tl.constexpr):  # noqa: PLR0913 - as above
    c = tl.load(cos + token * HALF + i, mask=is_i, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + i, mask=is_i, other=0.0)[None, :]
    return first * c - second * s, second * c + first * s


@triton.jit
def _in_eighths(x):
    """The nearest number that float8e4nv has, in float32: eighths of a power of two, of 2^-6 where it is below.

    Triton's interpreter does not round such a cast as the GPU does; of a number that is there it has nothing to round.
    """
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # What is added has eighths for its last place.
    large = tl.maximum(power, 0.015625) * 1572864.0
    return (x + large) - large


@triton.jit
def _write(  # noqa: PLR0913 - as above
    numbers, scales, first, second, slot, head, i, is_there,
    HKV: tl.constexpr, D: tl.constexpr,
    HAS_SCALES: tl.constexpr, BLOCK_SIZE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Halves of heads [BH, D / 2] into a slot; they are zeros where nothing is."""
    if HAS_SCALES:
        first, second = first.to(tl.float32), second.to(tl.float32)
        most = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        scale = tl.maximum(most * (1.0 / LARGEST), SMALLEST)
        tl.store(scales + (slot // BLOCK_SIZE * HKV + head) * BLOCK_SIZE + slot % BLOCK_SIZE, scale, mask=head < HKV)
        by = tl.div_rn(1.0, scale)[:, None]
        first, second = _in_eighths(first * by), _in_eighths(second * by)
    out = (slot * HKV + head)[:, None] * D + i[None, :]
    tl.store(numbers + out, first.to(numbers.dtype.element_ty), mask=is_there)
    tl.store(numbers + out + D // 2, second.to(numbers.dtype.element_ty), mask=is_there)


# The slots of a step are a row of one uploaded tensor: their alignment changes with the number of tokens, and must not
# compile anew.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store(  # noqa: PLR0913, PLR0915 - as above, and one algorithm
    q, k, v, q_weight, k_weight, anchor_cos, anchor_sin, ring_cos, ring_sin, key_cos, key_sin, slots,
    keys, values, key_scales, value_scales, q_anchor, q_ring,
    q_token, q_head, k_token, k_head, v_token, v_head, eps,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    HAS_SCALES: tl.constexpr, BLOCK_SIZE: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    HALF: tl.constexpr = D // 2
    NUM_Q: tl.constexpr = (H + BLOCK_HEADS - 1) // BLOCK_HEADS
    NUM_KV: tl.constexpr = (HKV + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    i = tl.arange(0, BLOCK_HALF)
    is_i = i < HALF
    if part < NUM_Q:
        head = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        is_there = (head < H)[:, None] & is_i[None, :]
        place = q + token * q_token + (head * q_head)[:, None] + i[None, :]
        first = tl.load(place, mask=is_there, other=0.0)
        second = tl.load(place + HALF, mask=is_there, other=0.0)
        if HAS_NORM:
            first, second = _normed(first, second, q_weight, eps, i, is_i, D)
        else:
            first, second = first.to(tl.float32), second.to(tl.float32)
        out = (token * H + head)[:, None] * D + i[None, :]
        one, other = _turned(first, second, anchor_cos, anchor_sin, token, i, is_i, HALF)
        tl.store(q_anchor + out, one.to(q_anchor.dtype.element_ty), mask=is_there)
        tl.store(q_anchor + out + HALF, other.to(q_anchor.dtype.element_ty), mask=is_there)
        one, other = _turned(first, second, ring_cos, ring_sin, token, i, is_i, HALF)
        tl.store(q_ring + out, one.to(q_ring.dtype.element_ty), mask=is_there)
        tl.store(q_ring + out + HALF, other.to(q_ring.dtype.element_ty), mask=is_there)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            if part < NUM_Q + NUM_KV:
                head = (part - NUM_Q) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
                is_there = (head < HKV)[:, None] & is_i[None, :]
                place = k + token * k_token + (head * k_head)[:, None] + i[None, :]
                first = tl.load(place, mask=is_there, other=0.0)
                second = tl.load(place + HALF, mask=is_there, other=0.0)
                if HAS_NORM:
                    first, second = _normed(first, second, k_weight, eps, i, is_i, D)
                else:
                    first, second = first.to(tl.float32), second.to(tl.float32)
                first, second = _turned(first, second, key_cos, key_sin, token, i, is_i, HALF)
                _write(
                    keys, key_scales, first, second, slot, head, i, is_there, HKV, D,
                    HAS_SCALES, BLOCK_SIZE, LARGEST, SMALLEST,
                )  # fmt: skip
            else:
                head = (part - NUM_Q - NUM_KV) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
                is_there = (head < HKV)[:, None] & is_i[None, :]
                place = v + token * v_token + (head * v_head)[:, None] + i[None, :]
                low = tl.load(place, mask=is_there, other=0.0)
                high = tl.load(place + HALF, mask=is_there, other=0.0)
                _write(
                    values, value_scales, low, high, slot, head, i, is_there, HKV, D,
                    HAS_SCALES, BLOCK_SIZE, LARGEST, SMALLEST,
                )  # fmt: skip


def rotary_store(
    q: Tensor, k: Tensor, v: Tensor, norm: HeadNorm | None, rotations: StepRotations, cache: LayerCache
) -> tuple[Tensor, Tensor]:
    """Tensors as in `op.py`."""
    num_tokens, H, D = q.shape
    HKV = k.shape[1]
    q_anchor, q_ring = (torch.empty((num_tokens, H, D), dtype=q.dtype, device=q.device) for _ in range(2))
    if not num_tokens:
        return q_anchor, q_ring
    block_half = triton.next_power_of_2(D // 2)
    block_heads = max(1, _PAIRS // block_half)
    scales = (q, q) if cache.scales is None else (cache.scales.keys, cache.scales.values)
    anchor, ring, key = rotations.anchor, rotations.ring, rotations.key
    _store[(num_tokens, triton.cdiv(H, block_heads) + 2 * triton.cdiv(HKV, block_heads))](
        q, k, v, norm.q_weight if norm else q, norm.k_weight if norm else q,
        anchor.cos, anchor.sin, ring.cos, ring.sin, key.cos, key.sin, rotations.slots,
        cache.keys, cache.values, *scales, q_anchor, q_ring,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), norm.eps if norm else 0.0,
        H=H, HKV=HKV, D=D, HAS_NORM=norm is not None,
        BLOCK_HEADS=block_heads, BLOCK_HALF=block_half,
        HAS_SCALES=cache.scales is not None, BLOCK_SIZE=cache.keys.shape[1], LARGEST=LARGEST, SMALLEST=SMALLEST_SCALE,
        num_warps=1, **dependent(q),
    )  # fmt: skip
    return q_anchor, q_ring
