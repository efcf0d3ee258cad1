from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given

from antiphon.core.admission import Admission
from antiphon.core.blocks import BlockPool
from antiphon.core.context import Context
from antiphon.core.prompts import PromptStore
from antiphon.core.window import SlideMode

SIZE = 4


@dataclass(slots=True)
class House:
    """A pool, a store and the sessions that use prompts of it, opened and closed as the thinker does."""

    num_blocks: int = 60
    max_stored_blocks: int = 10
    pool: BlockPool = field(init=False)
    admission: Admission = field(init=False)
    store: PromptStore = field(init=False)
    sessions: dict[int, Context] = field(default_factory=dict)
    num_opened: int = 0

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, SIZE)
        self.admission = Admission(self.num_blocks)
        self.store = PromptStore(self.pool, self.admission, self.max_stored_blocks)

    def open(self, key: str, num_tokens: int) -> tuple[int, bool]:
        """A session with this prompt and one unit of its own; says whether the prompt was there."""
        context = Context(self.pool, SlideMode.ROTATE_QUERY, max_tokens=100)
        stored = self.store.find(key)
        if stored is None:
            self.admission.admit({key: -(-num_tokens // SIZE)})
            context.append_prompt(num_tokens)
            self.store.keep(key, context.prompt)
        else:
            context.adopt_prompt(stored)
        context.append(3)
        self.num_opened += 1
        self.sessions[self.num_opened] = context
        return self.num_opened, stored is not None

    def close(self, session: int) -> None:
        self.sessions.pop(session).free()
        self.store.trim()

    def check(self) -> None:
        tables = [tuple(segment.blocks) for context in self.sessions.values() for segment in context.segments()]
        self.pool.check([*tables, *self.store.tables()])
        assert self.store.counts.num_blocks == sum(map(len, self.store.tables()))


def test_equal_prompts_are_one_copy_whatever_their_length() -> None:
    for num_tokens in (0, 1, 3, 4, 5, 7, 8, 29):
        house = House()
        first, is_hit = house.open("a", num_tokens)
        assert not is_hit
        num_free = house.pool.num_free_blocks
        second, is_hit = house.open("a", num_tokens)
        assert is_hit
        assert num_free - house.pool.num_free_blocks == 1, "only the second session's unit takes a block"
        one, other = house.sessions[first], house.sessions[second]
        assert one.segments()[0].blocks == other.segments()[0].blocks
        assert one.num_tokens == other.num_tokens == num_tokens + 3
        assert not set(one.segments()[-1].blocks) & set(other.segments()[-1].blocks)
        house.check()


def test_a_prompt_stays_when_its_first_user_goes_and_when_its_last_one_does() -> None:
    house = House()
    first, _ = house.open("a", 9)
    second, _ = house.open("a", 9)
    house.close(first)
    house.check()
    house.close(second)
    house.check()
    assert house.open("a", 9)[1]
    house.check()


def test_an_early_prompt_that_was_touched_outlives_later_ones() -> None:
    house = House(max_stored_blocks=4)
    for key in ("early", "later"):
        house.close(house.open(key, 8)[0])
    house.close(house.open("early", 8)[0])
    house.close(house.open("new", 8)[0])
    assert house.store.counts.num_evictions == 1
    assert house.open("early", 8)[1]
    assert not house.open("later", 8)[1]


def test_a_prompt_in_use_is_never_forgotten() -> None:
    house = House(max_stored_blocks=0)
    session, _ = house.open("a", 9)
    assert not house.store.evict()
    assert house.open("a", 9)[1]
    house.close(session)
    assert house.store.counts.num_blocks == 3
    house.close(2)
    assert house.store.counts.num_blocks == 0
    assert house.admission.num_free_blocks == house.num_blocks
    house.check()


def test_hits_and_misses_are_counted() -> None:
    house = House()
    for key in "abaab":
        house.open(key, 5)
    counts = house.store.counts
    assert (counts.num_hits, counts.num_misses, counts.num_evictions) == (3, 2, 0)


def test_a_prompt_can_be_spared_when_room_is_made_for_it() -> None:
    house = House()
    for key in "ab":
        house.close(house.open(key, 5)[0])
    assert house.store.evict(but="a")
    assert not house.store.evict(but="a")
    assert house.open("a", 5)[1]


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 5)), max_size=40), st.integers(0, 12))
def test_blocks_are_conserved_whoever_comes_and_goes(actions: list[tuple[str, int]], max_stored_blocks: int) -> None:
    house = House(num_blocks=400, max_stored_blocks=max_stored_blocks)
    lengths = {key: 3 * number + 1 for number, key in enumerate("abcde")}
    for key, leaving in actions:
        house.open(key, lengths[key])
        house.check()
        if len(house.sessions) > leaving:
            house.close(next(iter(house.sessions)))
            house.check()
    while house.sessions:
        house.close(next(iter(house.sessions)))
    assert house.store.counts.num_blocks <= max_stored_blocks
    house.check()
