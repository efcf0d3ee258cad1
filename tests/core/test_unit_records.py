"""Columns of closed units against a plain list of records. In a context: test_context.py; windows: test_window.py."""

from __future__ import annotations

import pickle

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from antiphon.core.unit_records import UnitRecord, UnitRecords

records = st.lists(
    st.builds(UnitRecord, st.integers(0, 9), st.integers(0, 5), st.lists(st.integers(-2, 9), max_size=3).map(tuple)),
    max_size=8,
)


@settings(max_examples=100)
@given(st.data())
def test_after_any_appends_and_removals_the_columns_say_what_a_list_says(data: st.DataObject) -> None:
    units, plain = UnitRecords(), list[UnitRecord]()
    for added in data.draw(st.lists(records, max_size=6)):
        for record in added:
            units.append(record)
        plain += added
        num_taken = data.draw(st.integers(0, len(plain)))
        taken = units.take(num_taken)
        assert [*taken] == plain[:num_taken]
        taken.check()
        del plain[:num_taken]
        units.check()
        assert [*units] == plain
        assert len(units) == len(plain)
        assert units.num_tokens == sum(record.num_tokens for record in plain)
        for num_units in range(len(plain) + 1):
            oldest = plain[:num_units]
            assert units.num_tokens_of(num_units) == sum(record.num_tokens for record in oldest)
            assert units.spoken_by(num_units) == tuple(word for record in oldest for word in record.spoken)


@settings(max_examples=100)
@given(added=records, num_taken=st.integers(0, 8), num_tokens=st.integers(1, 30))
def test_so_many_tokens_are_in_the_fewest_oldest_units_that_have_them(
    added: list[UnitRecord], num_taken: int, num_tokens: int
) -> None:
    units = UnitRecords.of(added)
    units.take(min(num_taken, len(added)))
    num_units, num_found = 0, 0
    for record in units:
        if num_found >= num_tokens:
            break
        num_units, num_found = num_units + 1, num_found + record.num_tokens
    assert units.num_units_of(num_tokens) == num_units


def test_units_are_equal_whatever_stood_before_them() -> None:
    added = [UnitRecord(number, 3 + number, (number,)) for number in range(4)]
    units = UnitRecords.of(added)
    units.take(2)
    assert units == UnitRecords.of(added[2:])
    assert units != UnitRecords.of(added[1:])
    assert units != added[2:]


def test_what_was_taken_stays_as_it_is_and_travels_as_it_is() -> None:
    units = UnitRecords.of([UnitRecord(number, 2, (7, 8)) for number in range(3)])
    taken = units.take(2)
    units.append(UnitRecord(3, 1, (9,)))
    units.take(1)
    assert pickle.loads(pickle.dumps(taken)) == taken == UnitRecords.of([UnitRecord(n, 2, (7, 8)) for n in range(2)])


def test_no_unit_is_asked_for_no_token() -> None:
    with pytest.raises(AssertionError, match="no unit is needed for 0 tokens"):
        UnitRecords().num_units_of(0)
