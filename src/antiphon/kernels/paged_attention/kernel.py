"""`paged_attention` in Triton: a part of a row's keys per program, anchor keys first, then the ring's; then the sum.

A program serves some tokens of one row (a tile) with all query heads of one key head, so that a key is read once for
them. Where the tiles are fewer than the GPU has room for, several programs share a tile's keys and a last launch adds
up what they found. How many do is read from the device, so that a recorded step is cut by who is in it. Shown,
interpreted on the CPU, by tests/kernels/test_paged_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.kv_cache import LayerCache, StepLayout
from antiphon.kernels.paged_attention.tiles import (
    MAX_PARTS,
    PART_NUMBERS,
    QUERIES_PER_TILE,
    TOKEN_NUMBERS,
    TileKind,
    Tiles,
    padded_group,
)

_LOG2_E = 1.4426950408889634
_MIN_DOT = 16
"""Smallest side of a product."""


@triton.jit(do_not_specialize=["max_keys", "first_place", "num_places"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915 - Triton knows no dataclasses; one algorithm
    q_anchor, q_ring, keys, values, key_scales, value_scales, key_slots, parts, out, sums, tops,
    max_keys, slot_stride, head_stride, scale, first_place, num_places,
    H: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    PART_NUMBERS: tl.constexpr, HAS_SCALES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    own, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(parts + PART_NUMBERS * own)
    if row < 0:
        return
    token_end = tl.load(parts + PART_NUMBERS * own + 2)
    num_keys = tl.load(parts + PART_NUMBERS * own + 3)
    num_anchor = tl.load(parts + PART_NUMBERS * own + 4)
    part = tl.load(parts + PART_NUMBERS * own + 5)
    num_parts = tl.load(parts + PART_NUMBERS * own + 6)
    m = tl.arange(0, BLOCK_M)
    token = tl.load(parts + PART_NUMBERS * own + 1) + m // GROUP
    is_query = (token < token_end) & (m % GROUP < H // HKV)
    # The row's last token has the last key's position.
    position = tl.where(is_query, num_keys - token_end + token, 0)
    # No token of the tile sees a key behind its last one.
    num_keys = tl.minimum(num_keys, tl.max(position, 0) + 1)
    size = tl.cdiv(tl.cdiv(num_keys, num_parts), BLOCK_K) * BLOCK_K
    first = part * size
    last = tl.minimum(first + size, num_keys)
    # Blocks of anchor keys, then blocks of ring keys; none has both, so each is seen through one query.
    anchor_end = tl.minimum(last, num_anchor)
    ring_start = tl.maximum(first, num_anchor)
    num_anchor_blocks = tl.cdiv(tl.maximum(anchor_end - first, 0), BLOCK_K)
    num_ring_blocks = tl.cdiv(tl.maximum(last - ring_start, 0), BLOCK_K)

    d = tl.arange(0, BLOCK_D)
    is_d = (d < D)[None, :]
    query_head = head * (H // HKV) + m % GROUP
    at = (token.to(tl.int64) * H + query_head)[:, None] * D + d[None, :]
    mask = is_query[:, None] & is_d
    through_anchor = tl.load(q_anchor + at, mask=mask, other=0.0)
    through_ring = tl.load(q_ring + at, mask=mask, other=0.0)
    slots = key_slots + row.to(tl.int64) * max_keys
    keys += head.to(tl.int64) * head_stride
    values += head.to(tl.int64) * head_stride
    top = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for block in range(0, num_anchor_blocks + num_ring_blocks):
        is_anchor = block < num_anchor_blocks
        start = tl.where(is_anchor, first + block * BLOCK_K, ring_start + (block - num_anchor_blocks) * BLOCK_K)
        index = start + tl.arange(0, BLOCK_K)
        is_there = index < tl.where(is_anchor, anchor_end, last)
        slot = tl.load(slots + index, mask=is_there, other=0).to(tl.int64)
        place = slot[:, None] * slot_stride + d[None, :]
        k = tl.load(keys + place, mask=is_there[:, None] & is_d, other=0.0)
        q = tl.where(is_anchor, through_anchor, through_ring)
        if HAS_SCALES:
            # Straight to bfloat16, Triton rounds one number after the other; this way two at once.
            k = k.to(tl.float32).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_SCALES:
            scale_place = (slot // BLOCK_SIZE * HKV + head) * BLOCK_SIZE + slot % BLOCK_SIZE
            scores *= tl.load(key_scales + scale_place, mask=is_there, other=0.0)[None, :]
        scores = tl.where(is_there[None, :] & (index[None, :] <= position[:, None]), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        v = tl.load(values + place, mask=is_there[:, None] & is_d, other=0.0)
        if HAS_SCALES:
            v = v.to(tl.float32).to(q.dtype)
            scaled = weights * tl.load(value_scales + scale_place, mask=is_there, other=0.0)[None, :]
        else:
            scaled = weights
        result = result * shrink[:, None] + tl.dot(scaled.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
    if num_parts == 1:
        tl.store(out + at, (result / total[:, None]).to(out.dtype.element_ty), mask=mask)
    else:
        # A part without a key it may see has total 0 and weighs nothing.
        to = (head * num_places + first_place + own * BLOCK_M).to(tl.int64) + m
        tl.store(sums + to[:, None] * D + d[None, :], result, mask=(d < D)[None, :])
        tl.store(tops + 2 * to, top)
        tl.store(tops + 2 * to + 1, total)


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - as above
    sums, tops, tokens, out, first_large_place, num_places,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr,
    MAX_PARTS: tl.constexpr, BLOCK_D: tl.constexpr, TOKEN_NUMBERS: tl.constexpr,
):  # fmt: skip
    """One query head of one token: its tile's parts, in order."""
    token, head = tl.program_id(0), tl.program_id(1)
    num_parts = tl.load(tokens + TOKEN_NUMBERS * token + 1)
    if num_parts < 2:
        return
    first = tl.load(tokens + TOKEN_NUMBERS * token)
    is_large = tl.load(tokens + TOKEN_NUMBERS * token + 3) > 0
    p, d = tl.arange(0, MAX_PARTS), tl.arange(0, BLOCK_D)
    is_there = p < num_parts
    place = tl.where(is_large, first_large_place, 0) + (first + p) * tl.where(is_large, LARGE, SMALL)
    place += tl.load(tokens + TOKEN_NUMBERS * token + 2) + head % (H // HKV)
    place = (head // (H // HKV) * num_places + place).to(tl.int64)
    top = tl.load(tops + 2 * place, mask=is_there, other=-1.0e30)
    total = tl.load(tops + 2 * place + 1, mask=is_there, other=0.0)
    weight = tl.exp2(top - tl.max(top, 0))
    mask = is_there[:, None] & (d < D)[None, :]
    found = tl.load(sums + place[:, None] * D + d[None, :], mask=mask, other=0.0)
    result = tl.sum(found * weight[:, None], 0) / tl.sum(total * weight, 0)
    at = (token.to(tl.int64) * H + head) * D + d
    tl.store(out + at, result.to(out.dtype.element_ty), mask=d < D)


def paged_attention(q_anchor: Tensor, q_ring: Tensor, cache: LayerCache, step: StepLayout, scale: float) -> Tensor:
    """Tensors as in `op.py`."""
    out = torch.empty_like(q_anchor)
    N, H, D = out.shape
    HKV, places = cache.keys.shape[2], Places.of(step.tiles)
    sums = torch.empty((HKV * places.num, D), dtype=torch.float32, device=out.device)
    tops = torch.empty((HKV * places.num, 2), dtype=torch.float32, device=out.device)
    for tiles, first_place in zip(step.tiles, places.firsts, strict=True):
        if tiles.parts.shape[0]:
            launch = _Launch.of(q_anchor, cache, tiles.kind)
            scales = (out, out) if cache.scales is None else (cache.scales.keys, cache.scales.values)
            _attend[(tiles.parts.shape[0], HKV)](
                q_anchor, q_ring, cache.keys, cache.values, *scales, step.key_slots, tiles.parts, out, sums, tops,
                step.max_keys, HKV * D, D, scale * _LOG2_E, first_place, places.num,
                H=H, HKV=HKV, GROUP=padded_group(H // HKV), D=D,
                BLOCK_M=QUERIES_PER_TILE[tiles.kind], BLOCK_K=launch.block_k, BLOCK_D=launch.block_d,
                PRECISION=launch.precision, PART_NUMBERS=PART_NUMBERS,
                HAS_SCALES=cache.scales is not None, BLOCK_SIZE=cache.keys.shape[1],
                num_warps=launch.num_warps, num_stages=2,
            )  # fmt: skip
    if N:
        _add_up[(N, H)](
            sums, tops, step.token_parts, out, places.firsts[1], places.num,
            H=H, HKV=HKV, D=D, SMALL=QUERIES_PER_TILE[TileKind.SMALL], LARGE=QUERIES_PER_TILE[TileKind.LARGE],
            MAX_PARTS=MAX_PARTS, BLOCK_D=max(_MIN_DOT, triton.next_power_of_2(D)), TOKEN_NUMBERS=TOKEN_NUMBERS,
        )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class Places:
    """Where parts leave what they found, for each key head: one place per query. firsts: of the parts of each kind."""

    firsts: tuple[int, int]
    num: int

    @staticmethod
    def of(tiles: tuple[Tiles, Tiles]) -> Places:
        num_small, num_large = (one.parts.shape[0] * QUERIES_PER_TILE[one.kind] for one in tiles)
        return Places((0, num_small), num_small + num_large)


@dataclass(frozen=True, slots=True)
class _Launch:
    """How parts of one kind of tiles are launched. block_*: sides of the kernel's products."""

    block_k: int
    block_d: int
    precision: str
    num_warps: int

    @staticmethod
    def of(q: Tensor, cache: LayerCache, kind: TileKind) -> _Launch:
        is_float32 = q.dtype is torch.float32
        # Numbers on their way from float8 take registers: of four warps, a hundred would lie in memory.
        of_large = 4 if cache.scales is None else 8
        return _Launch(
            block_k=32 if is_float32 else 64,
            block_d=max(_MIN_DOT, triton.next_power_of_2(q.shape[2])),
            precision="ieee" if is_float32 else "tf32",
            num_warps=2 if kind is TileKind.SMALL else of_large,
        )
