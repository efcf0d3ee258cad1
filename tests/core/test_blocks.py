"""Block ownership. Under whole sessions: test_context.py."""

from __future__ import annotations

from array import array
from collections import Counter, deque

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


def test_own_blocks_leave_their_table_when_they_are_freed_and_are_reused_last() -> None:
    pool = BlockPool(5, block_size=2)
    table, other = array("i"), array("i")
    pool.grow(table, 4)
    pool.cut(table, 0, 2)
    assert table.tolist() == [2, 3]
    pool.cut(table, 1, 2)
    assert table.tolist() == [2]
    pool.check([table])
    with pytest.raises(ResourceExhausted):
        pool.grow(other, 5)
    assert not other
    pool.grow(other, 4)
    assert other.tolist() == [4, 0, 1, 3]
    pool.check([table, other])


@settings(max_examples=50)
@given(st.integers(1, 7), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=30))
def test_blocks_come_in_the_order_in_which_they_were_freed(num_blocks: int, changes: list[tuple[int, int]]) -> None:
    pool, table = BlockPool(num_blocks, block_size=1), array("i")
    free, plain = deque(range(num_blocks)), list[int]()
    for num_more, num_fewer in changes:
        num_taken = min(num_more, len(free))
        pool.grow(table, num_taken)
        plain += [free.popleft() for _ in range(num_taken)]
        assert table.tolist() == plain
        num_cut = min(num_fewer, len(plain))
        pool.cut(table, 0, num_cut)
        free.extend(plain[:num_cut])
        del plain[:num_cut]
        assert table.tolist() == plain
        pool.check([table])


def test_own_blocks_can_neither_be_shared_nor_released_and_counted_ones_not_be_cut_off() -> None:
    pool = BlockPool(3, block_size=2)
    own = array("i")
    pool.grow(own, 1)
    with pytest.raises(AssertionError, match="block 0 is free or a table's own"):
        pool.share(own)
    with pytest.raises(AssertionError, match="block 0 is released"):
        pool.release(own)
    counted = array("i", pool.allocate(1))
    with pytest.raises(AssertionError, match="block 1 is counted"):
        pool.cut(counted, 0, 1)
    pool.check([own, counted])


def test_more_blocks_than_there_are_cannot_be_free() -> None:
    pool = BlockPool(2, block_size=2)
    with pytest.raises(AssertionError, match="3 of 2 blocks would be free"):
        pool.cut(array("i", [0]), 0, 1)


def test_the_check_finds_a_leaked_and_a_stolen_block_of_a_table() -> None:
    pool = BlockPool(3, block_size=2)
    own = array("i")
    pool.grow(own, 2)
    for tables in ([own[:1]], [own, [2]], [own, own]):
        with pytest.raises(AssertionError, match="tables hold it"):
            pool.check(tables)
    pool.cut(own[:1], 0, 1)  # of a copy, so that the table still has it
    with pytest.raises(AssertionError, match="block 0: 1 tables hold it, it has 0"):
        pool.check([own])


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
    own = array("i")
    for _ in range(data.draw(st.integers(0, 20))):
        always = ["allocate", "grow", "cut"]
        action = data.draw(st.sampled_from([*always, "share", "release"] if tables else always))
        table: list[int] = data.draw(st.sampled_from(tables)) if tables else []
        match action:
            case "grow":
                pool.grow(own, data.draw(st.integers(0, pool.num_free_blocks)))
            case "cut":
                start = data.draw(st.integers(0, len(own)))
                pool.cut(own, start, data.draw(st.integers(start, len(own))))
            case "allocate":
                tables.append(pool.allocate(data.draw(st.integers(0, pool.num_free_blocks))))
            case "share":
                pool.share(table)
                tables.append(list(table))
            case _:
                pool.release(table)
                tables.remove(table)
        pool.check([*tables, own])
        held = Counter(block for table in [*tables, own] for block in table)
        assert pool.num_free_blocks == pool.num_blocks - len(held)
