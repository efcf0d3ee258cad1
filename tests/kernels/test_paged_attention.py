"""Paged attention against dense causal attention in float64 on keys that were never shifted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.kv_cache import RowLayout, SegmentLayout, StepLayout
from antiphon.kernels.paged_attention.op import paged_attention
from antiphon.kernels.rotation import rotate, rotation
from kernels.formulas import EPS, turned

THETA = 1e4
NUM_BLOCKS = 160


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

    layout: RowLayout
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
        *anchor, ring = segments = take_blocks(row, free_blocks, block_size)
        slots = torch.tensor([slot for segment in segments for slot in slots_of(segment, block_size)])[: row.num_keys]
        k, v = (torch.randn(row.num_keys, *shape[2:], generator=rng) for _ in range(2))
        q = torch.randn(row.num_queries, heads.num_heads, heads.head_dim, generator=rng)
        positions = torch.arange(row.num_keys)
        key_positions = positions + row.shift * (positions >= sum(row.anchor))
        keys.view(-1, *shape[2:])[slots] = rotate(k, rotation(key_positions, heads.head_dim, THETA))
        values.view(-1, *shape[2:])[slots] = v
        at = positions[-row.num_queries :]
        q_anchor, q_ring = (rotate(q, rotation(at + shift, heads.head_dim, THETA)) for shift in (0, row.shift))
        start = parts[-1].layout.token_end if parts else 0
        layout = RowLayout(start, start + row.num_queries, row.num_keys, tuple(anchor), ring)
        want = dense(q, k, v, at, scale)
        parts.append(Part(layout, slots, at, q_anchor, q_ring, want, tolerance_of(q, k, v, scale)))
    no_query = torch.empty(0, heads.num_heads, heads.head_dim)
    at = torch.cat([torch.empty(0, dtype=torch.int64), *(part.at for part in parts)])
    written = torch.cat([at[:0], *(part.slots[-len(part.at) :] for part in parts)])
    return Case(
        q_anchor=torch.cat([no_query, *(part.q_anchor for part in parts)]),
        q_ring=torch.cat([no_query, *(part.q_ring for part in parts)]),
        keys=keys,
        values=values,
        step=StepLayout(at, at, at, written, tuple(part.layout for part in parts), block_size),
        scale=scale,
        want=torch.cat([no_query.double(), *(part.want for part in parts)]),
        tolerance=max([0.0, *(part.tolerance for part in parts)]),
    )


def take_blocks(row: Row, free_blocks: list[int], block_size: int) -> list[SegmentLayout]:
    """Anchor segments, then the ring; every one in blocks of its own."""
    segments = []
    for first_slot, num_tokens in [*((0, num_tokens) for num_tokens in row.anchor), (row.first_slot, row.ring)]:
        num_blocks = -(-(first_slot + num_tokens) // block_size)
        segments.append(SegmentLayout(tuple(free_blocks[:num_blocks]), first_slot, num_tokens))
        del free_blocks[:num_blocks]
    return segments


def slots_of(segment: SegmentLayout, block_size: int) -> list[int]:
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


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(
    "heads", [Heads(), Heads(4, 1), Heads(3, 3, 6), Heads(6, 2, 10), Heads(8, 2, 64)], ids=lambda heads: str(heads)
)
def test_rows_of_any_kind_in_one_step_are_dense_attention(heads: Heads, block_size: int) -> None:
    rows = tuple(replace(row, first_slot=row.first_slot % block_size) for row in (*MIXED, REFORWARD, PIECE))
    case = build(rows, heads, block_size)
    torch.testing.assert_close(case.run().double(), case.want, rtol=0, atol=case.tolerance)


rows = st.builds(
    lambda anchor, ring, num_queries, first_slot, shift: Row(
        tuple(anchor), ring, min(num_queries, sum(anchor) + ring), 0, first_slot, shift
    ),
    anchor=st.lists(st.integers(0, 9), max_size=3),
    ring=st.integers(1, 20),
    num_queries=st.integers(1, 30),
    first_slot=st.integers(0, 3),
    shift=st.integers(-(10**9), 10**9),
)


@settings(max_examples=60)
@given(rows=st.lists(rows, max_size=4))
def test_any_step_is_dense_attention(rows: list[Row]) -> None:
    case = build(tuple(rows), Heads(), block_size=4)
    torch.testing.assert_close(case.run().double(), case.want, rtol=0, atol=case.tolerance)


def test_a_step_without_tokens_gives_none() -> None:
    case = build((), Heads(), block_size=4)
    assert case.run().shape == (0, 4, 8)


@pytest.mark.parametrize("row", [*MIXED, REFORWARD, PIECE])
def test_a_row_does_not_see_who_shares_its_step_nor_where_its_blocks_lie(row: Row) -> None:
    alone = build((row,), Heads(), block_size=4)
    moved = build((row,), Heads(), block_size=4, seed=7)
    crowd = build((row, *MIXED), Heads(), block_size=4)
    assert torch.equal(alone.run(), moved.run())
    assert torch.equal(alone.run(), crowd.run()[: row.num_queries])


def test_a_shift_changes_nothing_but_roundings() -> None:
    still, shifted = (build((replace(MIXED[0], shift=shift),), Heads(), block_size=4) for shift in (0, 10**9))
    assert not torch.equal(still.keys.nan_to_num(), shifted.keys.nan_to_num())
    torch.testing.assert_close(still.run(), shifted.run(), rtol=0, atol=still.tolerance)


def test_a_wide_result_comes_back_in_the_dtype_of_the_queries() -> None:
    case = build(MIXED, Heads(), block_size=4)
    q_anchor, q_ring, keys, values = (x.bfloat16() for x in (case.q_anchor, case.q_ring, case.keys, case.values))
    got = paged_attention(q_anchor, q_ring, keys, values, case.step, case.scale)
    wide = paged_attention(q_anchor.float(), q_ring.float(), keys.float(), values.float(), case.step, case.scale)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, wide.bfloat16())


def test_operands_that_do_not_match_are_refused() -> None:
    case = build(MIXED, Heads(), block_size=4)
    with pytest.raises(ShapeError, match="q_anchor and q_ring"):
        replace(case, q_ring=case.q_ring[1:]).run()
    with pytest.raises(ShapeError, match="q_anchor and q_ring"):
        replace(case, q_anchor=case.q_anchor[1:], q_ring=case.q_ring[1:]).run()
    with pytest.raises(ShapeError, match="keys and values"):
        replace(case, values=case.values[1:]).run()
    with pytest.raises(ShapeError, match="keys and values"):
        replace(case, step=replace(case.step, block_size=8)).run()
    with pytest.raises(ShapeError, match="dividing 4 heads"):
        replace(case, keys=case.keys[:, :, :1].repeat(1, 1, 3, 1), values=case.keys[:, :, :1].repeat(1, 1, 3, 1)).run()
