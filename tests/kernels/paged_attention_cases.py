"""Steps of ragged rows for `paged_attention`, and its kernel as a process with Triton's interpreter runs it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from antiphon.core.context import Segment
from antiphon.kernels.kv_cache import RowSpan, StepLayout
from antiphon.kernels.paged_attention.op import paged_attention
from antiphon.kernels.paged_attention.tiles import TILE_NUMBERS, TileKind, Tiles, tokens_per_tile
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
    keys: Tensor
    values: Tensor
    step: StepLayout
    scale: float
    want: Tensor
    tolerance: float

    def run(self) -> Tensor:
        return paged_attention(self.q_anchor, self.q_ring, self.keys, self.values, self.step, self.scale)


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
        keys=keys,
        values=values,
        step=layout(rows, parts, at, written, block_size, heads.num_heads // heads.num_kv_heads),
        scale=scale,
        want=torch.cat([no_query.double(), *(part.want for part in parts)]),
        tolerance=max([0.0, *(part.tolerance for part in parts)]),
    )


def layout(
    rows: Sequence[Row], parts: Sequence[Part], at: Tensor, written: Tensor, block_size: int, group_size: int
) -> StepLayout:
    """The tables of a step, by hand. at: [N] positions. written: [N] slots."""
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
        is_small = row.num_queries <= tokens_per_tile(TileKind.SMALL, group_size)
        kind = TileKind.SMALL if is_small else TileKind.LARGE
        size = tokens_per_tile(kind, group_size)
        places[kind] += [(index, first, *spans[-1][1:]) for first in range(start, spans[-1].token_end, size)]
    numbers = [(one.token_start, one.token_end, one.num_keys, one.num_anchor_keys) for one in spans]
    return StepLayout(
        positions=at,
        ring_positions=at,
        key_positions=at,
        slots=written,
        rows=tuple(spans),
        spans=table_of(numbers, 4),
        segments=table_of(tables, MAX_SEGMENTS, 3),
        blocks=table_of(blocks),
        tiles=tuple(Tiles(kind, table_of(own, TILE_NUMBERS)) for kind, own in places.items()),
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

CASES = {
    "mixed, blocks of 4": build((*MIXED, REFORWARD, PIECE), Heads(), 4),
    "mixed, blocks of 16": build((*MIXED, REFORWARD, PIECE), Heads(8, 2, 64), 16),
    "heads of an odd size": build(MIXED, Heads(3, 3, 6), 4),
    "groups of three": build((*MIXED, REFORWARD), Heads(6, 2, 10), 4),
    "one key head": build((PIECE, *MIXED), Heads(4, 1), 1),
    "long": build(LONG, Heads(8, 2, 16), 16),
}


def run_kernel(name: str, device: str) -> np.ndarray:
    """On the CPU to be called where TRITON_INTERPRET was set before anything imported Triton."""
    from antiphon.kernels.key_slots import kernel as slots_kernel
    from antiphon.kernels.paged_attention import kernel

    case = CASES[name]
    step = on_device(case.step, device)
    listed = slots_kernel.key_slots(step.blocks, step.segments, step.spans, step.block_size, step.max_keys)
    for row, mine, kernels in zip(step.rows, case.step.key_slots, listed.cpu(), strict=True):
        assert torch.equal(mine[: row.num_keys], kernels[: row.num_keys])
    q_anchor, q_ring, keys, values = (x.to(device) for x in (case.q_anchor, case.q_ring, case.keys, case.values))
    result: np.ndarray = kernel.paged_attention(q_anchor, q_ring, keys, values, step, case.scale).cpu().numpy()
    return result


def on_device(step: StepLayout, device: str) -> StepLayout:
    return replace(
        step,
        positions=step.positions.to(device),
        slots=step.slots.to(device),
        spans=step.spans.to(device),
        segments=step.segments.to(device),
        blocks=step.blocks.to(device),
        tiles=tuple(replace(tiles, places=tiles.places.to(device)) for tiles in step.tiles),
    )
