"""`rotate_keys` in Triton: a table of angles, then one launch over the slots of all layers.

Shown, interpreted on the CPU, by tests/kernels/test_rotate_keys.py.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_PAIRS = 2048
"""Of a program of four warps: 16 pairs a thread, so that four loads of 16 bytes are in flight in bfloat16. Four slots
of the thinker, 8 KB read and written; 16 programs on an SM keep 128 KB in flight, and 4.3 TB/s for 0.7 us need 23."""


@triton.jit(do_not_specialize=["by_positions"])
def _angles(table, by_positions, LOG2_THETA: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    pair = tl.arange(0, BLOCK_HALF)
    frequency = tl.exp2(pair.to(tl.float64) * tl.full((), -LOG2_THETA / HALF, tl.float64))
    angle = by_positions.to(tl.float64) * frequency
    tl.store(table + pair, tl.cos(angle).to(tl.float32), mask=pair < HALF)
    tl.store(table + HALF + pair, tl.sin(angle).to(tl.float32), mask=pair < HALF)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slots"])
def _rotate(  # noqa: PLR0913 - as above
    keys, slots, table, num_slots, layer_stride,
    HKV: tl.constexpr, D: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    layer = keys + tl.program_id(1).to(tl.int64) * layer_stride
    # Heads of all slots, one after the other.
    head = tl.program_id(0).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = head < num_slots.to(tl.int64) * HKV
    slot = tl.load(slots + head // HKV, mask=is_head, other=0)
    i = tl.arange(0, BLOCK_HALF)
    is_there = is_head[:, None] & (i < HALF)[None, :]
    place = layer + (slot * HKV + head % HKV)[:, None] * D + i[None, :]
    cos = tl.load(table + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(table + HALF + i, mask=i < HALF, other=0.0)[None, :]
    first = tl.load(place, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=is_there, other=0.0).to(tl.float32)
    tl.store(place, (first * cos - second * sin).to(keys.dtype.element_ty), mask=is_there)
    tl.store(place + HALF, (second * cos + first * sin).to(keys.dtype.element_ty), mask=is_there)


def rotate_keys(keys: Tensor, slots: Tensor, by_positions: int, theta: float) -> None:
    """Tensors as in `op.py`."""
    num_layers, _, _, HKV, D = keys.shape
    num_slots = slots.shape[0]
    if not num_slots:
        return
    half = D // 2
    block_half = triton.next_power_of_2(half)
    block_heads = max(1, _PAIRS // block_half)
    table = torch.empty((2, half), dtype=torch.float32, device=keys.device)
    _angles[(1,)](table, by_positions, LOG2_THETA=math.log2(theta), HALF=half, BLOCK_HALF=block_half, num_warps=1)
    _rotate[(triton.cdiv(num_slots * HKV, block_heads), num_layers)](
        keys, slots, table, num_slots, keys.stride(0),
        HKV=HKV, D=D, BLOCK_HEADS=block_heads, BLOCK_HALF=block_half, num_warps=4,
    )  # fmt: skip
