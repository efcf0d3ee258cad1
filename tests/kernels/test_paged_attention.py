"""Paged attention against dense causal attention in float64 on keys that were never shifted."""

from __future__ import annotations

import math
from concurrent.futures import Executor
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from antiphon.errors import ShapeError
from antiphon.kernels.kv_cache import LayerCache
from antiphon.kernels.paged_attention.op import paged_attention
from kernels.paged_attention_cases import (
    CASES,
    MIXED,
    NUM_BLOCKS,
    PIECE,
    PLAIN,
    REFORWARD,
    Heads,
    Row,
    build,
    far,
    in_half,
    run_case,
    run_kernel,
)

SCALED = [name for name in CASES if name not in PLAIN]


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


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_kernel_attends_to_float8_with_queries_of_half_the_bits(
    name: str, device: str, request: pytest.FixtureRequest
) -> None:
    if device == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU here")
        case, got = in_half(CASES[name], torch.bfloat16), run_kernel(name, device, torch.bfloat16)
    else:
        process: Executor = request.getfixturevalue("interpreter")
        # Of the interpreter's half types only this one rounds as the hardware does.
        case = in_half(CASES[name], torch.float16)
        got = process.submit(run_kernel, name, device, torch.float16).result()
    torch.testing.assert_close(torch.from_numpy(got).double(), case.want, rtol=0, atol=case.tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a cache of more than 2^31 keys")
def test_blocks_beyond_two_to_the_31st_element_are_read_where_they_are() -> None:
    near = CASES["mixed, blocks of 16, float8"]
    case = far(near, num_blocks=2**31 // near.cache.keys[0].numel())
    assert case.cache.keys[:-NUM_BLOCKS].numel() >= 2**31
    got = torch.from_numpy(run_case(case, "cuda", torch.float32))
    torch.testing.assert_close(got.double(), case.want, rtol=0, atol=case.tolerance)


@pytest.mark.parametrize("name", SCALED)
def test_attention_to_float8_is_attention_to_the_numbers_that_it_stands_for(name: str) -> None:
    case = CASES[name]
    torch.testing.assert_close(case.run().double(), case.want, rtol=0, atol=case.tolerance)


@pytest.mark.parametrize("name", PLAIN)
def test_float8_costs_no_more_than_its_steps_allow(name: str) -> None:
    """By how far scores move, and values.

    If no score of a query moves by more than e, its weights are each multiplied by a number from exp(-e) to exp(e)
    before they are divided by their sum: they move by tanh(e / 2) in all, from the smallest values to the largest ones
    at worst. To this comes how far the values themselves move.
    """
    plain, float8 = CASES[name], CASES[f"{name}, float8"]
    group = plain.q_anchor.shape[1] // plain.cache.keys.shape[2]
    error = (float8.run().double() - plain.want).abs()
    largest = 0.0
    for row, slots in zip(plain.step.rows, plain.step.key_slots, strict=True):
        k, v = (x.flatten(0, 1)[slots[: row.num_keys]].double() for x in (plain.cache.keys, plain.cache.values))
        k_step, v_step = (torch.maximum(x.abs() / 16, x.abs().amax(-1, keepdim=True) / 448 * 2.0**-10) for x in (k, v))
        index = torch.arange(row.num_keys)
        for token in range(row.token_start, row.token_end):
            is_seen = index <= plain.step.positions[token]
            for head in range(plain.q_anchor.shape[1]):
                own = k_step[is_seen, head // group]
                moved = plain.scale * max(
                    (own @ q[token, head].double().abs()).max().item() for q in (plain.q_anchor, plain.q_ring)
                )
                seen = v[is_seen, head // group]
                span = seen.amax(0) - seen.amin(0)
                bound = math.tanh(moved / 2) * span + v_step[is_seen, head // group].amax(0) + plain.tolerance
                assert (error[token, head] <= bound).all()
                largest = max(largest, (error[token, head] / bound).max().item())
    assert largest > 0.01, "nothing was rounded"


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
    assert not torch.equal(still.cache.keys.nan_to_num(), shifted.cache.keys.nan_to_num())
    torch.testing.assert_close(still.run(), shifted.run(), rtol=0, atol=still.tolerance)


def test_a_wide_result_comes_back_in_the_dtype_of_the_queries() -> None:
    case = build(MIXED, Heads(), block_size=4)
    tensors = tuple(x.bfloat16() for x in (case.q_anchor, case.q_ring, case.cache.keys, case.cache.values))
    got, wide = (
        paged_attention(q_anchor, q_ring, LayerCache(keys, values), case.step, case.scale)
        for q_anchor, q_ring, keys, values in (tensors, tuple(x.float() for x in tensors))
    )
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, wide.bfloat16())


def test_operands_that_do_not_match_are_refused() -> None:
    case = build(MIXED, Heads(), block_size=4)
    with pytest.raises(ShapeError, match="q_anchor and q_ring"):
        replace(case, q_ring=case.q_ring[1:]).run()
    with pytest.raises(ShapeError, match="q_anchor and q_ring"):
        replace(case, q_anchor=case.q_anchor[1:], q_ring=case.q_ring[1:]).run()
    with pytest.raises(ShapeError, match="keys and values"):
        replace(case, cache=replace(case.cache, values=case.cache.values[1:])).run()
    with pytest.raises(ShapeError, match="keys and values"):
        replace(case, step=replace(case.step, block_size=8)).run()
    three = case.cache.keys[:, :, :1].repeat(1, 1, 3, 1)
    with pytest.raises(ShapeError, match="dividing 4 heads"):
        replace(case, cache=LayerCache(three, three)).run()
    with pytest.raises(ShapeError, match="scales with float8_e4m3fn and only there"):
        replace(case, cache=replace(case.cache, keys=case.cache.keys.to(torch.float8_e4m3fn))).run()
