"""Window policies on a real context against plain recomputations of what the reference keeps (REFERENCE 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from antiphon.core.blocks import BlockPool
from antiphon.core.context import Context
from antiphon.core.unit_records import UnitRecord, UnitRecords
from antiphon.core.window import BasicWindow, ContextWindow, OffWindow, SlideMode, WindowPolicy
from antiphon.errors import ConfigError

HIGH, LOW = 112, 96
PROMPTS = (0, 7, LOW, 100, HIGH)
MARKER = (901, 902, 903, 904)
MAX_UNIT = 130
"""Longer than LOW and HIGH: such a unit leaves with the next close, or at once."""

unit_lengths = st.lists(st.integers(1, MAX_UNIT) | st.integers(1, 20), max_size=40)


@dataclass(frozen=True, slots=True)
class Moment:
    """A context after a unit was closed and the window had its way. peak_tokens: just before."""

    peak_tokens: int
    num_tokens: int
    units: tuple[int, ...]
    previous: tuple[int, ...]


def live(policy: WindowPolicy, num_prompt_tokens: int, units: Sequence[UnitRecord]) -> Iterator[Moment]:
    """Feed units to a context of its own, as a session does."""
    context = Context(BlockPool(2000, block_size=4), SlideMode.ROTATE_QUERY, max_tokens=10**6)
    context.append_prompt(num_prompt_tokens)
    if policy.keeps_previous:
        context.append_suffix(())
    for unit in units:
        context.append(unit.num_tokens)
        peak = context.num_tokens
        context.close_unit(unit.unit, unit.spoken)
        plan = policy.plan(context.num_tokens, context.units, context.previous)
        if plan is not None:
            assert plan.num_dropped_units, "a plan that drops nothing"
            context.slide(plan)
            context.check()
        retained = tuple(record.unit for record in context.units)
        yield Moment(peak, context.num_tokens, retained, context.previous)


def silent(lengths: Sequence[int]) -> list[UnitRecord]:
    return [UnitRecord(number, length, ()) for number, length in enumerate(lengths)]


def talking(words: Sequence[int]) -> list[UnitRecord]:
    """Units of 12 tokens and more that say so many words; every word is a number of its own."""
    ends = list(accumulate(words))
    return [
        UnitRecord(number, 12 + num, tuple(range(end - num, end)))
        for number, (num, end) in enumerate(zip(words, ends, strict=True))
    ]


@pytest.mark.parametrize("num_prompt_tokens", PROMPTS)
@settings(max_examples=40)
@given(lengths=unit_lengths)
def test_the_basic_window_keeps_exactly_the_newest_whole_units_that_the_limits_allow(
    num_prompt_tokens: int, lengths: list[int]
) -> None:
    kept: list[int] = []
    for number, moment in enumerate(live(BasicWindow(HIGH, LOW), num_prompt_tokens, silent(lengths))):
        kept.append(number)
        if num_prompt_tokens + sum(lengths[i] for i in kept) > HIGH:
            while kept and num_prompt_tokens + sum(lengths[i] for i in kept) > LOW:
                kept.pop(0)
        assert moment.units == tuple(kept)
        assert moment.num_tokens == num_prompt_tokens + sum(lengths[i] for i in kept)
        assert moment.previous == ()


def test_the_limits_of_the_basic_window_are_inclusive() -> None:
    ten = UnitRecords.of(silent([10] * 4))
    assert BasicWindow(40, 20).plan(40, ten, ()) is None
    plan = BasicWindow(39, 20).plan(40, ten, ())
    assert plan is not None
    assert plan.num_dropped_units == 2
    assert BasicWindow(39, 20).plan(40, UnitRecords(), ()) is None


@settings(max_examples=60)
@given(
    words=st.lists(st.integers(0, 8), max_size=30),
    max_units=st.integers(1, 5),
    previous_max_tokens=st.integers(0, 20),
    num_prompt_tokens=st.sampled_from(PROMPTS),
)
def test_the_context_window_keeps_the_newest_units_and_the_newest_words_of_the_others(
    words: list[int], max_units: int, previous_max_tokens: int, num_prompt_tokens: int
) -> None:
    units = talking(words)
    policy = ContextWindow(max_units, previous_max_tokens, MARKER)
    for number, moment in enumerate(live(policy, num_prompt_tokens, units)):
        first_kept = max(0, number + 1 - max_units)
        said = [word for unit in units[:first_kept] for word in unit.spoken]
        newest = tuple(said[-previous_max_tokens:]) if previous_max_tokens else ()
        assert moment.units == tuple(range(first_kept, number + 1))
        assert moment.previous == ((*MARKER, *newest) if said else ())


@settings(max_examples=20)
@given(words=st.lists(st.integers(0, 8), min_size=1, max_size=30), step=st.integers(1, 5))
def test_dropping_many_units_at_once_keeps_the_words_that_dropping_them_singly_keeps(
    words: list[int], step: int
) -> None:
    units, policy = talking(words), ContextWindow(1, 10, MARKER)
    previous: tuple[int, ...] = ()
    waiting: list[UnitRecord] = []
    for number, unit in enumerate(units):
        waiting.append(unit)
        plan = policy.plan(0, UnitRecords.of(waiting), previous) if number % step == 0 else None
        if plan is not None:
            waiting, previous = waiting[plan.num_dropped_units :], plan.previous
    said = [word for unit in units[: len(units) - len(waiting)] for word in unit.spoken]
    assert previous == ((*MARKER, *said[-10:]) if said else ())


def test_a_window_that_is_off_keeps_everything() -> None:
    *_, last = live(OffWindow(10), 7, silent([5] * 9))
    assert (last.units, last.num_tokens) == (tuple(range(9)), 52)


policies: st.SearchStrategy[WindowPolicy] = st.one_of(
    st.builds(lambda low, more: BasicWindow(low + more, low), st.integers(0, 200), st.integers(1, 200)),
    st.builds(ContextWindow, st.integers(1, 8), st.integers(0, 30), st.just(MARKER)),
)


@settings(max_examples=80)
@given(policy=policies, data=st.data())
def test_no_context_ever_holds_more_than_the_peak_of_its_window(policy: WindowPolicy, data: st.DataObject) -> None:
    max_unit_tokens = data.draw(st.integers(1, 60))
    longest_prompt = policy.max_prompt_tokens(max_unit_tokens, max_context_tokens=500)
    if longest_prompt < 0:
        return
    num_prompt_tokens = data.draw(st.integers(0, longest_prompt) | st.just(longest_prompt))
    lengths = data.draw(st.lists(st.integers(1, max_unit_tokens) | st.just(max_unit_tokens), max_size=30))
    units = [UnitRecord(i, n, tuple(range(data.draw(st.integers(0, n))))) for i, n in enumerate(lengths)]
    peak = policy.peak_tokens(num_prompt_tokens, max_unit_tokens)
    assert all(moment.peak_tokens <= peak for moment in live(policy, num_prompt_tokens, units))


def test_the_peak_of_a_window_is_reached() -> None:
    basic = max(moment.peak_tokens for moment in live(BasicWindow(HIGH, LOW), 12, silent([10] * 11)))
    assert basic == BasicWindow(HIGH, LOW).peak_tokens(12, 10)
    window = ContextWindow(3, 5, MARKER)
    units = [UnitRecord(number, 20, tuple(range(20))) for number in range(6)]
    assert max(moment.peak_tokens for moment in live(window, 7, units)) == window.peak_tokens(7, 20)
    assert OffWindow(50).peak_tokens(7, 20) == 50


def test_the_longest_prompt_leaves_room_for_what_the_window_holds() -> None:
    assert OffWindow(500).max_prompt_tokens(98, max_context_tokens=8192) == 402
    assert OffWindow(9000).max_prompt_tokens(98, max_context_tokens=8192) == 8094
    assert BasicWindow(HIGH, LOW).max_prompt_tokens(98, max_context_tokens=8192) == HIGH
    assert BasicWindow(HIGH, LOW).max_prompt_tokens(98, max_context_tokens=200) == 102
    window = ContextWindow(24, 500, MARKER)
    longest = window.max_prompt_tokens(98, max_context_tokens=8192)
    assert window.peak_tokens(longest, 98) == 8192


@settings(max_examples=60)
@given(policy=policies | st.builds(OffWindow, st.integers(1, 300)), max_unit_tokens=st.integers(1, 60))
def test_the_largest_unit_fits_behind_the_longest_prompt(policy: WindowPolicy, max_unit_tokens: int) -> None:
    longest = policy.max_prompt_tokens(max_unit_tokens, max_context_tokens=250)
    if longest >= 0:
        assert longest + max_unit_tokens <= min(250, policy.peak_tokens(longest, max_unit_tokens))


@pytest.mark.parametrize("policy", [OffWindow(50), BasicWindow(HIGH, LOW), ContextWindow(2, 5, MARKER)])
def test_a_unit_that_is_longer_than_the_window_leaves_no_prompt(policy: WindowPolicy) -> None:
    assert policy.max_prompt_tokens(9000, max_context_tokens=8192) < 0


@pytest.mark.parametrize(("high", "low"), [(100, 100), (100, 101), (0, 0), (10, -1)])
def test_a_low_limit_that_is_not_below_the_high_one_is_refused(high: int, low: int) -> None:
    with pytest.raises(ConfigError, match=f"low limit .{low} tokens"):
        BasicWindow(high, low)


def test_limits_that_keep_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 unit, got 0"):
        ContextWindow(0, 5, MARKER)
    with pytest.raises(ConfigError, match="previous_max_tokens must not be negative, got -1"):
        ContextWindow(1, -1, MARKER)
    with pytest.raises(ConfigError, match="must be positive, got 0 tokens"):
        OffWindow(0)
