"""`paged_attention` in Triton: a split of a row's keys per program, anchor keys first, then the ring's; then the sum.

A program serves some tokens of one row (a tile) with all query heads of one key head, so that a key is read once for
them. Where the tiles are fewer than the GPU has room for, several programs share a row's keys and a second launch adds
up what they found. Shown, interpreted on the CPU, by tests/kernels/test_paged_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.kv_cache import LayerCache, StepLayout
from antiphon.kernels.paged_attention.tiles import QUERIES_PER_TILE, TILE_NUMBERS, TileKind, Tiles, num_splits

_LOG2_E = 1.4426950408889634
_MIN_DOT = 16
"""Smallest side of a product."""


@triton.jit(do_not_specialize=["max_keys"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915 - Triton knows no dataclasses; one algorithm
    q_anchor, q_ring, keys, values, key_scales, value_scales, key_slots, tiles, out, sums, tops,
    max_keys, slot_stride, head_stride, scale,
    H: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    TILE_NUMBERS: tl.constexpr, HAS_SCALES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(tiles + TILE_NUMBERS * tile)
    if row < 0:
        return
    token_end = tl.load(tiles + TILE_NUMBERS * tile + 2)
    num_keys = tl.load(tiles + TILE_NUMBERS * tile + 3)
    num_anchor = tl.load(tiles + TILE_NUMBERS * tile + 4)
    m = tl.arange(0, BLOCK_M)
    token = tl.load(tiles + TILE_NUMBERS * tile + 1) + m // GROUP
    is_query = (token < token_end) & (m % GROUP < H // HKV)
    # The row's last token has the last key's position.
    position = tl.where(is_query, num_keys - token_end + token, 0)
    # No token of the tile sees a key behind its last one.
    num_keys = tl.minimum(num_keys, tl.max(position, 0) + 1)
    size = tl.cdiv(tl.cdiv(num_keys, SPLITS), BLOCK_K) * BLOCK_K
    first = split * size
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
    if SPLITS == 1:
        tl.store(out + at, (result / total[:, None]).to(out.dtype.element_ty), mask=mask)
    else:
        # A part without a key it may see has total 0 and weighs nothing.
        part = ((tile * HKV + head) * SPLITS + split).to(tl.int64) * BLOCK_M + m
        tl.store(sums + part[:, None] * D + d[None, :], result, mask=(d < D)[None, :])
        tl.store(tops + 2 * part, top)
        tl.store(tops + 2 * part + 1, total)


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - as above
    sums, tops, tiles, out,
    H: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, TILE_NUMBERS: tl.constexpr,
):  # fmt: skip
    """One query head of one token: its splits' parts, in order."""
    tile, head, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(tiles + TILE_NUMBERS * tile) < 0:
        return
    # m counts heads of real groups only: as m of `_attend` it skips the padding of a group.
    token = tl.load(tiles + TILE_NUMBERS * tile + 1) + m // (H // HKV)
    if token >= tl.load(tiles + TILE_NUMBERS * tile + 2):
        return
    in_tile = m // (H // HKV) * GROUP + m % (H // HKV)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    part = ((tile * HKV + head) * SPLITS + s).to(tl.int64) * BLOCK_M + in_tile
    top = tl.load(tops + 2 * part, mask=s < SPLITS, other=-1.0e30)
    total = tl.load(tops + 2 * part + 1, mask=s < SPLITS, other=0.0)
    weight = tl.exp2(top - tl.max(top, 0))
    mask = (s < SPLITS)[:, None] & (d < D)[None, :]
    found = tl.load(sums + part[:, None] * D + d[None, :], mask=mask, other=0.0)
    result = tl.sum(found * weight[:, None], 0) / tl.sum(total * weight, 0)
    at = (token.to(tl.int64) * H + head * (H // HKV) + m % (H // HKV)) * D + d
    tl.store(out + at, result.to(out.dtype.element_ty), mask=d < D)


def paged_attention(q_anchor: Tensor, q_ring: Tensor, cache: LayerCache, step: StepLayout, scale: float) -> Tensor:
    """Tensors as in `op.py`."""
    out = torch.empty_like(q_anchor)
    for tiles in step.tiles:
        if tiles.places.shape[0]:
            launch = _Launch.of(q_anchor, cache, step, tiles)
            _attend_tiles(launch, (q_anchor, q_ring), cache, step, scale, out)
    return out


@dataclass(frozen=True, slots=True)
class _Launch:
    """How tiles of one kind are launched. block_*: sides of the kernel's products."""

    tiles: Tiles
    splits: int
    block_m: int
    block_k: int
    block_d: int
    precision: str
    num_warps: int

    @staticmethod
    def of(q: Tensor, cache: LayerCache, step: StepLayout, tiles: Tiles) -> _Launch:
        is_float32 = q.dtype is torch.float32
        # Numbers on their way from float8 take registers: of four warps, a hundred would lie in memory.
        of_large = 4 if cache.scales is None else 8
        return _Launch(
            tiles=tiles,
            splits=num_splits(tiles.kind, tiles.places.shape[0] * cache.keys.shape[2], q.shape[2], step.max_keys),
            block_m=QUERIES_PER_TILE[tiles.kind],
            block_k=32 if is_float32 else 64,
            block_d=max(_MIN_DOT, triton.next_power_of_2(q.shape[2])),
            precision="ieee" if is_float32 else "tf32",
            num_warps=2 if tiles.kind is TileKind.SMALL else of_large,
        )


def _attend_tiles(
    launch: _Launch,
    queries: tuple[Tensor, Tensor],
    cache: LayerCache,
    step: StepLayout,
    scale: float,
    out: Tensor,
) -> None:
    """queries: for anchor and for ring keys. Writes the tokens of the tiles into out."""
    _, H, D = out.shape
    HKV, places, splits = cache.keys.shape[2], launch.tiles.places, launch.splits
    num_tiles, group = places.shape[0], triton.next_power_of_2(H // HKV)
    sums = tops = out
    if splits > 1:
        parts = num_tiles * HKV * splits * launch.block_m
        sums = torch.empty((parts, D), dtype=torch.float32, device=out.device)
        tops = torch.empty((parts, 2), dtype=torch.float32, device=out.device)
    scales = (out, out) if cache.scales is None else (cache.scales.keys, cache.scales.values)
    _attend[(num_tiles, HKV, splits)](
        *queries, cache.keys, cache.values, *scales, step.key_slots, places, out, sums, tops,
        step.max_keys, HKV * D, D, scale * _LOG2_E,
        H=H, HKV=HKV, GROUP=group, D=D, SPLITS=splits,
        BLOCK_M=launch.block_m, BLOCK_K=launch.block_k, BLOCK_D=launch.block_d, PRECISION=launch.precision,
        TILE_NUMBERS=TILE_NUMBERS, HAS_SCALES=cache.scales is not None, BLOCK_SIZE=cache.keys.shape[1],
        num_warps=launch.num_warps, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _add_up[(num_tiles, HKV, launch.block_m // group * (H // HKV))](
            sums, tops, places, out,
            H=H, HKV=HKV, GROUP=group, D=D, SPLITS=splits, BLOCK_M=launch.block_m,
            BLOCK_S=splits, BLOCK_D=launch.block_d, TILE_NUMBERS=TILE_NUMBERS,
        )  # fmt: skip
