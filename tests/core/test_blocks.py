"""Block ownership. Under whole sessions: test_context.py."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from antiphon.core.blocks import BlockPool
from antiphon.errors import ResourceExhausted


def test_a_freed_block_is_reused_last() -> None:
    pool = BlockPool(4, block_size=2)
    first, second = pool.allocate(2)
    pool.release([first])
    assert pool.allocate(3)[-1] == first
    assert second not in pool.allocate(0)


def test_a_refused_allocation_takes_no_block() -> None:
    pool = BlockPool(3, block_size=2)
    held = pool.allocate(1)
    with pytest.raises(ResourceExhausted, match=r"3 KV blocks wanted, 2 of 3 are free"):
        pool.allocate(3)
    pool.check([held])
    assert pool.num_free_blocks == 2


def test_require_takes_nothing_and_refuses_what_allocate_would_refuse() -> None:
    pool = BlockPool(3, block_size=2)
    pool.require(3)
    assert pool.num_free_blocks == 3
    with pytest.raises(ResourceExhausted):
        pool.require(4)


def test_a_shared_block_is_free_when_its_last_holder_has_left() -> None:
    pool = BlockPool(2, block_size=2)
    held = pool.allocate(1)
    pool.share(held)
    pool.check([held, held])
    pool.release(held)
    assert pool.num_free_blocks == 1
    pool.check([held])
    pool.release(held)
    assert pool.num_free_blocks == 2
    pool.check([])


def test_a_free_block_can_neither_be_shared_nor_released() -> None:
    pool = BlockPool(2, block_size=2)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(AssertionError, match=f"block {block} is free"):
        pool.share([block])
    with pytest.raises(AssertionError, match=f"block {block} is released"):
        pool.release([block])


def test_the_check_finds_a_leaked_a_stolen_and_a_miscounted_block() -> None:
    pool = BlockPool(3, block_size=2)
    held = pool.allocate(2)
    for tables in ([held[:1]], [held, [2]], [held, held]):
        with pytest.raises(AssertionError, match="tables hold it"):
            pool.check(tables)


@settings(max_examples=50)
@given(st.data())
def test_counts_are_those_of_a_plain_counter_after_any_actions(data: st.DataObject) -> None:
    pool = BlockPool(data.draw(st.integers(1, 6)), block_size=1)
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 20))):
        action = data.draw(st.sampled_from(["allocate", "share", "release"] if tables else ["allocate"]))
        table: list[int] = data.draw(st.sampled_from(tables)) if tables else []
        match action:
            case "allocate":
                tables.append(pool.allocate(data.draw(st.integers(0, pool.num_free_blocks))))
            case "share":
                pool.share(table)
                tables.append(list(table))
            case _:
                pool.release(table)
                tables.remove(table)
        pool.check(tables)
        held = Counter(block for table in tables for block in table)
        assert pool.num_free_blocks == pool.num_blocks - len(held)
