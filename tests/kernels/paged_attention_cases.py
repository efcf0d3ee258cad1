"""Steps of ragged rows for `paged_attention`, and its kernel as a process with Triton's interpreter runs it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from antiphon.core.context import Segment
from antiphon.kernels.kv_cache import KVCache, LayerCache, RowSpan, Scales, StepLayout
from antiphon.kernels.paged_attention.op import paged_attention
from antiphon.kernels.paged_attention.tiles import (
    TILE_NUMBERS,
    TOKEN_NUMBERS,
    TileKind,
    Tiles,
    Tiling,
)
from antiphon.kernels.rotary_store.contract import LARGEST
from antiphon.kernels.rotary_store.reference import quantised
from antiphon.kernels.rotation import rotate, rotation
from kernels.formulas import EPS, turned

THETA = 1e4
NUM_BLOCKS = 160
MAX_SEGMENTS = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One session of a step. The last `num_queries` of the first `num_keys` tokens attend; what follows is not written.

    anchor: tokens in each of its segments. ring: tokens in the ring, from `first_slot` of its first block on.
    """

    anchor: tuple[int, ...]
    ring: int
    num_queries: int = 1
    num_later: int = 0
    first_slot: int = 0
    shift: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.anchor) + self.ring

    @property
    def num_keys(self) -> int:
        return self.num_tokens - self.num_later


@dataclass(frozen=True, slots=True)
class Heads:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8


@dataclass(frozen=True, slots=True)
class Case:
    """A step with its cache, and what dense attention makes of the same tokens: want [N, H, D] float64."""

    q_anchor: Tensor
    q_ring: Tensor
    cache: LayerCache
    step: StepLayout
    scale: float
    want: Tensor
    tolerance: float

    def run(self) -> Tensor:
        return paged_attention(self.q_anchor, self.q_ring, self.cache, self.step, self.scale)


@dataclass(frozen=True, slots=True)
class Part:
    """A row's share of a step. at: [Q] positions of its queries. slots: [num_keys]."""

    segments: list[Segment]
    slots: Tensor
    at: Tensor
    q_anchor: Tensor
    q_ring: Tensor
    want: Tensor
    tolerance: float


def build(rows: tuple[Row, ...], heads: Heads, block_size: int, *, seed: int = 0) -> Case:
    """Scatter the rows over shuffled blocks of a cache of NaN. seed: of the blocks only."""
    rng = torch.Generator().manual_seed(1)
    free_blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
    shape = (NUM_BLOCKS, block_size, heads.num_kv_heads, heads.head_dim)
    keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    scale = heads.head_dim**-0.5
    parts: list[Part] = []
    for row in rows:
        segments = take_blocks(row, free_blocks, block_size)
        slots = torch.tensor([slot for segment in segments for slot in slots_of(segment, block_size)])[: row.num_keys]
        k, v = (torch.randn(row.num_keys, *shape[2:], generator=rng) for _ in range(2))
        q = torch.randn(row.num_queries, heads.num_heads, heads.head_dim, generator=rng)
        positions = torch.arange(row.num_keys)
        key_positions = positions + row.shift * (positions >= sum(row.anchor))
        keys.view(-1, *shape[2:])[slots] = rotate(k, rotation(key_positions, heads.head_dim, THETA))
        values.view(-1, *shape[2:])[slots] = v
        at = positions[-row.num_queries :]
        q_anchor, q_ring = (rotate(q, rotation(at + shift, heads.head_dim, THETA)) for shift in (0, row.shift))
        want = dense(q, k, v, at, scale)
        parts.append(Part(segments, slots, at, q_anchor, q_ring, want, tolerance_of(q, k, v, scale)))
    no_query = torch.empty(0, heads.num_heads, heads.head_dim)
    at = torch.cat([torch.empty(0, dtype=torch.int64), *(part.at for part in parts)])
    written = torch.cat([at[:0], *(part.slots[-len(part.at) :] for part in parts)])
    return Case(
        q_anchor=torch.cat([no_query, *(part.q_anchor for part in parts)]),
        q_ring=torch.cat([no_query, *(part.q_ring for part in parts)]),
        cache=LayerCache(keys, values),
        step=layout(rows, parts, at, written, block_size, heads.num_heads // heads.num_kv_heads),
        scale=scale,
        want=torch.cat([no_query.double(), *(part.want for part in parts)]),
        tolerance=max([0.0, *(part.tolerance for part in parts)]),
    )


def layout(
    rows: Sequence[Row], parts: Sequence[Part], at: Tensor, written: Tensor, block_size: int, group_size: int
) -> StepLayout:
    """The tables of a step, by hand. at: [N] positions. written: [N] slots."""
    # So fine that short rows are cut too, and that some parts end before their tile's first query sees anything.
    tiling = Tiling(group_size, has_large=True, num_parts=20, parts_per_tile=2, least_keys=3)
    spans: list[RowSpan] = []
    tables: list[list[tuple[int, int, int]]] = []
    blocks: list[int] = []
    places: dict[TileKind, list[tuple[int, ...]]] = {kind: [] for kind in TileKind}
    for index, (row, part) in enumerate(zip(rows, parts, strict=True)):
        start = spans[-1].token_end if spans else 0
        spans.append(RowSpan(start, start + row.num_queries, row.num_keys, min(sum(row.anchor), row.num_keys)))
        table = []
        for segment in part.segments:
            table.append((len(blocks), segment.first_slot, segment.num_tokens))
            blocks += segment.blocks
        tables.append([*table, *[(0, 0, 0)] * (MAX_SEGMENTS - len(table))])
        is_small = row.num_queries <= tiling.tokens_per_tile(TileKind.SMALL)
        kind = TileKind.SMALL if is_small else TileKind.LARGE
        size = tiling.tokens_per_tile(kind)
        places[kind] += [(index, first, *spans[-1][1:]) for first in range(start, spans[-1].token_end, size)]
    numbers = [(one.token_start, one.token_end, one.num_keys, one.num_anchor_keys) for one in spans]
    token_parts = np.zeros((len(at), TOKEN_NUMBERS), np.int32)
    tiles = []
    for kind in TileKind:
        own = tiling.parts_of(np.array(places[kind], np.int32).reshape(-1, TILE_NUMBERS))
        tiling.tell_tokens(own, kind, token_parts)
        tiles.append(Tiles(kind, torch.from_numpy(own)))
    small, large = tiles
    return StepLayout(
        positions=at,
        ring_positions=at,
        key_positions=at,
        slots=written,
        rows=tuple(spans),
        spans=table_of(numbers, 4),
        segments=table_of(tables, MAX_SEGMENTS, 3),
        blocks=table_of(blocks),
        tiles=(small, large),
        token_parts=torch.from_numpy(token_parts),
        block_size=block_size,
        max_keys=max((one.num_keys for one in spans), default=0),
    )


def table_of(numbers: Sequence[object], *shape: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32).reshape(-1, *shape)


def take_blocks(row: Row, free_blocks: list[int], block_size: int) -> list[Segment]:
    """Anchor segments, then the ring; every one in blocks of its own."""
    segments = []
    for first_slot, num_tokens in [*((0, num_tokens) for num_tokens in row.anchor), (row.first_slot, row.ring)]:
        num_blocks = -(-(first_slot + num_tokens) // block_size)
        segments.append(Segment(array("i", free_blocks[:num_blocks]), first_slot, num_tokens))
        del free_blocks[:num_blocks]
    return segments


def slots_of(segment: Segment, block_size: int) -> list[int]:
    every = [block * block_size + offset for block in segment.blocks for offset in range(block_size)]
    return every[segment.first_slot : segment.first_slot + segment.num_tokens]


def dense(q: Tensor, k: Tensor, v: Tensor, own: Tensor, scale: float) -> Tensor:
    """Causal attention of queries at positions `own` to keys at 0..K-1, everything in float64, nothing shared."""
    q, k = turned(q, own, THETA), turned(k, torch.arange(k.shape[0]), THETA)
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * scale
        scores = scores.masked_fill(torch.arange(k.shape[0]) > own[:, None], -torch.inf)
        out[:, head] = scores.softmax(-1) @ v[:, head // group].double()
    return out


def tolerance_of(q: Tensor, k: Tensor, v: Tensor, scale: float) -> float:
    """A score sums D products of vectors that are each turned (five roundings, and one of an angle of 10^9: one more).

    Weights move by twice the largest error of a score; the softmax and the output sum K terms.
    """
    of_score = scale * q.norm(dim=-1).max().item() * k.norm(dim=-1).max().item() * (q.shape[-1] + 2 * 6)
    return (2 * of_score + 2 * k.shape[0] + 4) * EPS * v.abs().max().item()


MIXED = (
    Row(anchor=(7,), ring=9, num_queries=1, shift=41, first_slot=3),
    Row(anchor=(), ring=12, num_queries=12),
    Row(anchor=(5, 6), ring=10, num_queries=4, shift=10**9, first_slot=1),
    Row(anchor=(16,), ring=0, num_queries=16),
    Row(anchor=(0, 3), ring=2, num_queries=2, shift=-3),
)
"""Decode, first unit without a prompt, unit prefill behind two segments, prompt prefill, a segment without a token."""

REFORWARD = Row(anchor=(9, 7), ring=11, num_queries=7, num_later=11, shift=10**6, first_slot=2)
"""`previous` and suffix are computed anew while the ring stands behind them."""

PIECE = Row(anchor=(20,), ring=0, num_queries=6, num_later=8)
"""A middle piece of a long prompt."""


LONG = (
    Row(anchor=(40, 6), ring=530, num_queries=1, shift=77, first_slot=3),
    Row(anchor=(600,), ring=0, num_queries=70),
)
"""More keys than one program reads, and more queries than a tile holds."""

PLAIN = {
    "mixed, blocks of 4": build((*MIXED, REFORWARD, PIECE), Heads(), 4),
    "mixed, blocks of 16": build((*MIXED, REFORWARD, PIECE), Heads(8, 2, 64), 16),
    "heads of an odd size": build(MIXED, Heads(3, 3, 6), 4),
    "groups of three": build((*MIXED, REFORWARD), Heads(6, 2, 10), 4),
    "one key head": build((PIECE, *MIXED), Heads(4, 1), 1),
    "long": build(LONG, Heads(8, 2, 16), 16),
}


def scaled(case: Case) -> Case:
    """The same cache in float8, and what attention to its numbers is."""
    stored = [quantised(tensor.flatten(0, 1)) for tensor in (case.cache.keys, case.cache.values)]
    block_size, num_kv_heads, head_dim = case.cache.keys.shape[1:]
    keys, values = (numbers.view(-1, block_size, num_kv_heads, head_dim) for numbers, _ in stored)
    scales = Scales(*(scale.view(-1, block_size, num_kv_heads).mT.contiguous() for _, scale in stored))
    wide_keys, wide_values = (numbers.double() * scale.double()[..., None] for numbers, scale in stored)
    return replace(
        case, cache=LayerCache(keys, values, scales), want=attended(case, LayerCache(wide_keys, wide_values))
    )


def attended(case: Case, cache: LayerCache) -> Tensor:
    """Attention in float64 to what is stored. cache: keys and values [slots, Hkv, D] float64."""
    out = torch.empty(case.q_anchor.shape, dtype=torch.float64)
    group = case.q_anchor.shape[1] // cache.keys.shape[1]
    for row, slots in zip(case.step.rows, case.step.key_slots, strict=True):
        k, v = (tensor[slots[: row.num_keys]] for tensor in (cache.keys, cache.values))
        index = torch.arange(row.num_keys)
        for token in range(row.token_start, row.token_end):
            for head in range(case.q_anchor.shape[1]):
                through_anchor, through_ring = (
                    k[:, head // group] @ q[token, head].double() for q in (case.q_anchor, case.q_ring)
                )
                scores = torch.where(index < row.num_anchor_keys, through_anchor, through_ring) * case.scale
                scores = scores.masked_fill(index > case.step.positions[token], -torch.inf)
                out[token, head] = scores.softmax(0) @ v[:, head // group]
    return out


CASES = PLAIN | {f"{name}, float8": scaled(case) for name, case in PLAIN.items()}


def in_half(case: Case, dtype: torch.dtype) -> Case:
    """With queries of a half type, and a tolerance for it.

    Weights, with their values' scales, and the result are each rounded once more; and of float16, a weight with its
    scale may be smaller than its smallest number, 2^-24.
    """
    narrow = replace(case, q_anchor=case.q_anchor.to(dtype), q_ring=case.q_ring.to(dtype))
    assert case.cache.scales is not None
    scales = case.cache.scales
    wide = LayerCache(
        case.cache.keys.flatten(0, 1).double() * scales.keys.mT.flatten(0, 1).double()[..., None],
        case.cache.values.flatten(0, 1).double() * scales.values.mT.flatten(0, 1).double()[..., None],
    )
    most = wide.values.nan_to_num().abs().max().item()
    lost = 2.0**-25 * LARGEST * case.step.max_keys if dtype is torch.float16 else 0.0
    tolerance = case.tolerance + torch.finfo(dtype).eps * most + lost
    return replace(narrow, want=attended(narrow, wide), tolerance=tolerance)


def run_kernel(name: str, device: str, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """dtype: of the queries. On the CPU to be called where TRITON_INTERPRET was set before anything imported Triton.

    Returns float32.
    """
    return run_case(CASES[name], device, dtype)


def far(case: Case, num_blocks: int) -> Case:
    """The same behind so many more blocks, of zeros, on the GPU."""
    block_size, num_kv_heads, head_dim = case.cache.keys.shape[1:]
    shape = (1, num_blocks + case.cache.keys.shape[0], block_size, num_kv_heads, head_dim)
    (cache,) = KVCache.empty(shape, case.cache.keys.dtype, torch.device("cuda")).layers()
    pairs = [(cache.keys, case.cache.keys), (cache.values, case.cache.values)]
    if cache.scales and case.cache.scales:
        pairs += [(cache.scales.keys, case.cache.scales.keys), (cache.scales.values, case.cache.scales.values)]
    for there, here in pairs:
        there[num_blocks:] = here
    return replace(case, cache=cache, step=replace(case.step, blocks=case.step.blocks + num_blocks))


def run_case(case: Case, device: str, dtype: torch.dtype) -> np.ndarray:
    """As `run_kernel`."""
    from antiphon.kernels.key_slots import kernel as slots_kernel
    from antiphon.kernels.paged_attention import kernel

    step = on_device(case.step, device)
    listed = slots_kernel.key_slots(step.blocks, step.segments, step.spans, step.block_size, step.max_keys)
    for row, mine, kernels in zip(step.rows, case.step.key_slots, listed.cpu(), strict=True):
        assert torch.equal(mine[: row.num_keys], kernels[: row.num_keys])
    q_anchor, q_ring = case.q_anchor.to(device, dtype), case.q_ring.to(device, dtype)
    out = kernel.paged_attention(q_anchor, q_ring, cache_on_device(case.cache, device), step, case.scale)
    result: np.ndarray = out.float().cpu().numpy()
    return result


def cache_on_device(cache: LayerCache, device: str) -> LayerCache:
    scales = cache.scales and Scales(cache.scales.keys.to(device), cache.scales.values.to(device))
    return LayerCache(cache.keys.to(device), cache.values.to(device), scales)


def on_device(step: StepLayout, device: str) -> StepLayout:
    small, large = step.tiles
    return replace(
        step,
        positions=step.positions.to(device),
        slots=step.slots.to(device),
        spans=step.spans.to(device),
        segments=step.segments.to(device),
        blocks=step.blocks.to(device),
        tiles=(replace(small, parts=small.parts.to(device)), replace(large, parts=large.parts.to(device))),
        token_parts=step.token_parts.to(device),
    )
