"""Paged attention against dense causal attention in float64 on keys that were never shifted."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from antiphon.errors import ShapeError
from antiphon.kernels.paged_attention.op import paged_attention
from kernels.paged_attention_cases import CASES, MIXED, PIECE, REFORWARD, Heads, Row, build, run_kernel


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_kernel_is_dense_attention(name: str, device: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]
    if device == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU here")
        got = torch.from_numpy(run_kernel(name, device))
    else:
        process: Executor = request.getfixturevalue("interpreter")
        got = torch.from_numpy(process.submit(run_kernel, name, device).result())
    torch.testing.assert_close(got.double(), case.want, rtol=0, atol=case.tolerance)


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
