"""Context and pool against the brute-force model, under random sessions with pools that are far too small."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from antiphon.core.blocks import BlockPool
from antiphon.core.context import Context, Placement, Segment
from antiphon.core.window import BasicWindow, ContextWindow, OffWindow, SlideMode, SlidePlan, WindowPolicy
from antiphon.errors import ContextLengthExceeded, ResourceExhausted
from core.brute_force import PlainCache, PlainSession, SharedPrompt, Unit, blocks_wanted, slots_of, snapshot

MARKER = (-1, -2)
UNLIMITED = 10_000

short = st.integers(0, 9)
policies: st.SearchStrategy[WindowPolicy] = st.one_of(
    st.builds(OffWindow, st.integers(1, 80)),
    st.builds(lambda low, more: BasicWindow(low + more, low), st.integers(0, 40), st.integers(1, 20)),
    st.builds(ContextWindow, st.integers(1, 4), st.integers(0, 6), st.just(MARKER)),
)
choices = st.lists(st.tuples(st.sampled_from(SlideMode), policies, st.integers(30, 90)), min_size=2, max_size=4)


class Sessions(RuleBasedStateMachine):
    """Many sessions in one pool, each also kept as plain lists; the cache is a dict of slots."""

    sessions = Bundle("sessions")
    shared = Bundle("shared")

    def __init__(self) -> None:
        super().__init__()
        self.cache = PlainCache()
        self.all: list[PlainSession] = []
        self.held: list[SharedPrompt] = []
        self.num_tokens_made = 0

    @initialize(target=sessions, num_blocks=st.integers(4, 60), block_size=st.integers(1, 5), choices=choices)
    def open(self, num_blocks: int, block_size: int, choices: list[tuple[SlideMode, WindowPolicy, int]]) -> object:
        self.pool = BlockPool(num_blocks, block_size)
        for mode, policy, max_tokens in choices:
            # Only a context that is as long as its policy may need can take `previous` in a slide.
            limit = UNLIMITED if policy.keeps_previous else max_tokens
            self.all.append(PlainSession(Context(self.pool, mode, limit), mode, policy, limit))
        return multiple(*self.all)

    @rule(session=sessions, prompt=st.lists(short, max_size=2), num_suffix_tokens=short)
    def feed_prompt(self, session: PlainSession, prompt: list[int], num_suffix_tokens: int) -> None:
        is_shared = any(self.pool.num_holders(block) > 1 for block in session.context.prompt.blocks)
        if session.suffix is not None or session.ring_tokens or is_shared:
            return
        for num_tokens in [] if session.is_prompt_shared else prompt:
            place = self.grown(session, 0, num_tokens, partial(session.context.append_prompt, num_tokens))
            if place is not None:
                session.prompt += self.write(place, num_tokens)
        if not session.policy.keeps_previous:
            return
        suffix = tuple(self.made(num_suffix_tokens))
        place = self.grown(session, 1, num_suffix_tokens, partial(session.context.append_suffix, suffix))
        if place is not None:
            self.cache.write(place, suffix)
            session.suffix = suffix

    @rule(session=sessions, num_tokens=short)
    def append(self, session: PlainSession, num_tokens: int) -> None:
        if session.policy.keeps_previous and session.suffix is None:
            self.feed_prompt(session, [], num_suffix_tokens=num_tokens)
            return
        place = self.grown(session, -1, num_tokens, partial(session.context.append, num_tokens))
        if place is not None:
            session.open_tokens += self.write(place, num_tokens)

    @rule(session=sessions, num_tokens=short)
    def retract(self, session: PlainSession, num_tokens: int) -> None:
        num_tokens = min(num_tokens, len(session.open_tokens))
        session.context.retract(num_tokens)
        del session.open_tokens[len(session.open_tokens) - num_tokens :]

    @rule(session=sessions, num_spoken=short)
    def close_unit(self, session: PlainSession, num_spoken: int) -> None:
        said = tuple(session.open_tokens[-1 : -1 - num_spoken : -1])
        record = session.context.close_unit(0, said)
        assert record.num_tokens == len(session.open_tokens)
        session.units.append(Unit(session.open_tokens, said))
        session.open_tokens = []

    @rule(session=sessions, units=st.lists(st.lists(short, max_size=3), min_size=1, max_size=5), num_spoken=short)
    def live(self, session: PlainSession, units: list[list[int]], num_spoken: int) -> None:
        """Whole units, each followed by what the session's own policy wants."""
        for pieces in units:
            for num_tokens in pieces:
                self.append(session, num_tokens)
            self.close_unit(session, num_spoken)
            plan = session.policy.plan(session.num_tokens, session.context.units, session.context.previous)
            if plan is not None:
                self.slide(session, plan)
            self.everything_is_as_the_lists_say()

    @rule(session=sessions, num_dropped=st.integers(0, 3), num_words=short)
    def slide_at_will(self, session: PlainSession, num_dropped: int, num_words: int) -> None:
        if session.open_tokens:
            return
        num_dropped = min(num_dropped, len(session.units))
        previous = session.previous if session.suffix is None else tuple(self.made(num_words))
        self.slide(session, SlidePlan(num_dropped, previous))

    @rule(session=sessions)
    def free(self, session: PlainSession) -> None:
        """At any point, twice too; the context may then be used anew."""
        session.context.free()
        session.forget()

    @rule(target=shared, session=sessions)
    def share_prompt(self, session: PlainSession) -> object:
        if not session.prompt:
            return multiple()
        session.is_prompt_shared = True
        given = SharedPrompt(session.context.prompt, list(session.prompt))
        self.pool.share(given.prompt.blocks)
        self.held.append(given)
        return given

    @rule(session=sessions, given=shared)
    def adopt_prompt(self, session: PlainSession, given: SharedPrompt) -> None:
        is_new = len(session.context.segments()) == 1 and not session.ring_tokens
        if is_new and session.num_tokens + len(given.tokens) <= session.max_tokens:
            session.context.adopt_prompt(given.prompt)
            session.prompt, session.is_prompt_shared = list(given.tokens), True

    @rule(given=consumes(shared))
    def release_shared_prompt(self, given: SharedPrompt) -> None:
        self.held.remove(given)
        self.pool.release(given.prompt.blocks)

    @invariant()
    def everything_is_as_the_lists_say(self) -> None:
        for session in self.all:
            session.check(self.cache, self.pool.block_size)
        for given in self.held:
            given.check(self.cache, self.pool.block_size)
        tables = [segment.blocks for session in self.all for segment in session.context.segments()]
        shared = [given.prompt.blocks for given in self.held]
        self.pool.check([*tables, *shared])
        everything = [block for table in [*tables, *shared] for block in table]
        assert self.pool.num_free_blocks + len(set(everything)) == self.pool.num_blocks
        for session in self.all:
            own = session.own_blocks()
            assert all(everything.count(block) == 1 for block in own), "somebody else holds a block that is written to"

    def teardown(self) -> None:
        for session in self.all:
            self.free(session)
        for given in self.held:
            self.pool.release(given.prompt.blocks)
        if self.all:
            self.pool.check([])

    def grown(
        self, session: PlainSession, index: int, num_tokens: int, append: Callable[[], Placement]
    ) -> Placement | None:
        """Append to a segment; None if it was refused, which must be for a reason and must change nothing."""
        segments = session.context.segments()
        is_there = index == -1 or len(segments) > index + 1
        segment = segments[index] if is_there else Segment()
        is_too_long = session.num_tokens + num_tokens > session.max_tokens
        is_full = blocks_wanted(segment, num_tokens, self.pool.block_size) > self.pool.num_free_blocks
        before = snapshot(session.context, self.pool)
        try:
            placement = append()
        except ContextLengthExceeded:
            is_right = is_too_long
        except ResourceExhausted:
            is_right = is_full
        else:
            assert not is_too_long, "an append over the limit was taken"
            assert not is_full, "an append that finds no block was taken"
            assert placement.first_position == session.num_tokens
            return placement
        assert is_right, "an append that fits was refused"
        assert snapshot(session.context, self.pool) == before, "a refused append left something behind"
        return None

    def slide(self, session: PlainSession, plan: SlidePlan) -> None:
        before = snapshot(session.context, self.pool)
        is_rewritten = plan.previous != session.previous
        is_full = is_rewritten and self.wanted_by(session, plan) > self.pool.num_free_blocks
        try:
            slide = session.context.slide(plan)
        except ResourceExhausted:
            assert is_full, "a slide whose words fit was refused"
            assert snapshot(session.context, self.pool) == before, "a refused slide left something behind"
            return
        assert not is_full, "a slide whose words find no block was taken"
        dropped = session.units[: plan.num_dropped_units]
        assert [record.num_tokens for record in slide.dropped] == [len(unit.tokens) for unit in dropped]
        assert slide.anchor_ids == ((*plan.previous, *(session.suffix or ())) if is_rewritten else ())
        session.units = session.units[plan.num_dropped_units :]
        session.previous = plan.previous
        session.apply(slide, self.cache)

    def wanted_by(self, session: PlainSession, plan: SlidePlan) -> int:
        """Blocks that a slide with new words needs besides those that it gives back."""
        size = self.pool.block_size
        *_, words, ring = session.context.segments()
        num_dropped_tokens = sum(len(unit.tokens) for unit in session.units[: plan.num_dropped_units])
        kept = {slot // size for slot in list(slots_of(ring, size))[num_dropped_tokens:]}
        num_words = len(plan.previous) + len(session.suffix or ())
        return -(-num_words // size) - len(words.blocks) - (len(ring.blocks) - len(kept))

    def write(self, placement: Placement, num_tokens: int) -> list[int]:
        tokens = self.made(num_tokens)
        self.cache.write(placement, tokens)
        return tokens

    def made(self, num_tokens: int) -> list[int]:
        first = self.num_tokens_made
        self.num_tokens_made += num_tokens
        return list(range(first, self.num_tokens_made))


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=150, stateful_step_count=50)


def opened(num_blocks: int = 8, *, mode: SlideMode = SlideMode.ROTATE_QUERY) -> tuple[BlockPool, Context]:
    pool = BlockPool(num_blocks, block_size=4)
    return pool, Context(pool, mode, UNLIMITED)


def test_the_default_slide_moves_the_shift_and_leaves_every_slot_where_it_is() -> None:
    _, context = opened()
    context.append_prompt(6)
    placed: list[int] = []
    for unit in range(3):
        placed += context.append(3).slots
        context.close_unit(unit, ())
    slide = context.slide(SlidePlan(2, ()))
    assert [record.unit for record in slide.dropped] == [0, 1]
    assert slide.anchor.slots == slide.rotated.slots == slide.recomputed.slots == ()
    assert context.shift == 6
    assert list(slots_of(context.segments()[-1], 4)) == placed[6:]
    added = context.append(1)
    assert (added.first_position, added.key_shift) == (9, 6)


@pytest.mark.parametrize("mode", SlideMode)
def test_a_call_of_any_length_holds_as_many_blocks_as_its_window(mode: SlideMode) -> None:
    pool, context = opened(12, mode=mode)
    window = BasicWindow(high_tokens=40, low_tokens=30)
    context.append_prompt(7)
    num_dropped_tokens = 0
    for unit in range(2000):
        context.append(3)
        context.close_unit(unit, ())
        plan = window.plan(context.num_tokens, context.units, ())
        if plan is not None:
            num_dropped_tokens += sum(record.num_tokens for record in context.slide(plan).dropped)
        assert context.num_blocks <= 12
    assert num_dropped_tokens > 5000
    assert context.shift == (num_dropped_tokens if mode is SlideMode.ROTATE_QUERY else 0)


def test_free_gives_everything_back_at_any_point() -> None:
    pool, context = opened()
    context.free()
    context.append_prompt(5)
    context.append_suffix((1, 2))
    context.append(3)
    context.close_unit(0, (9,))
    context.slide(SlidePlan(1, (9,)))
    assert context.shift == 2
    context.append(1)
    context.free()
    context.free()
    pool.check([])
    assert (context.num_tokens, len(context.units), context.previous, context.shift) == (0, 0, (), 0)


def test_a_refused_suffix_can_be_placed_when_there_is_room() -> None:
    pool, context = opened(num_blocks=1)
    others = pool.allocate(1)
    with pytest.raises(ResourceExhausted):
        context.append_suffix((1, 2))
    pool.release(others)
    assert len(context.append_suffix((1, 2)).slots) == 2


def test_a_unit_that_is_open_cannot_be_cut_by_a_slide() -> None:
    _, context = opened()
    context.append(2)
    with pytest.raises(AssertionError, match="2 tokens of an open unit"):
        context.slide(SlidePlan(0, ()))


def test_a_prompt_cannot_grow_under_units_nor_under_its_suffix() -> None:
    _, context = opened()
    context.append(1)
    with pytest.raises(AssertionError, match="under units"):
        context.append_prompt(1)
    _, context = opened()
    context.append_suffix((1,))
    with pytest.raises(AssertionError, match="suffix"):
        context.append_prompt(1)


def test_tokens_of_a_closed_unit_cannot_be_taken_back() -> None:
    context = Context(BlockPool(4, 2), SlideMode.ROTATE_QUERY, UNLIMITED)
    context.append(3)
    context.close_unit(0, ())
    context.append(2)
    with pytest.raises(AssertionError, match="3 of 2 open tokens"):
        context.retract(3)
