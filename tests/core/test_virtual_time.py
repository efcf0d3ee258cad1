"""Scheduler and admission in virtual time: thousands of sessions on a stage that only costs time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from antiphon.core.admission import Admission
from antiphon.core.scheduler import Waiting, schedule
from antiphon.errors import ResourceExhausted

UNIT_INPUT_TOKENS, CLOSING_TOKENS = 11, 2
MAX_STEP_TOKENS = 512
SLACK_S = 0.9
"""A unit's audio must exist so long after its second is complete."""


@dataclass(slots=True)
class Talk:
    """A session: a unit is due every second until it leaves. rows: what is left of the unit on its way."""

    name: str
    leaves_s: float
    next_due_s: float
    order: int
    rows: list[int] = field(default_factory=list)
    deadline_s: float = 0.0


@dataclass(slots=True)
class World:
    """One engine. A step costs `base_s` and `token_s` per token; everything else is free. decided: tokens of a unit."""

    rng: random.Random
    num_blocks: int
    base_s: float
    token_s: float
    decided: tuple[int, ...] = (0, 0, 0, 4, 12, 18)
    now_s: float = 0.0
    num_arrived: int = 0
    num_refused: int = 0
    num_units: int = 0
    num_late: int = 0
    talks: dict[str, Talk] = field(default_factory=dict)
    admission: Admission = field(init=False)

    def __post_init__(self) -> None:
        self.admission = Admission(self.num_blocks)

    def arrive(self, need_blocks: int, stays_s: float) -> None:
        name = f"caller {self.num_arrived}"
        self.num_arrived += 1
        try:
            self.admission.admit({name: need_blocks})
        except ResourceExhausted:
            self.num_refused += 1
            return
        due_s = self.now_s + self.rng.random()
        self.talks[name] = Talk(name, self.now_s + stays_s, due_s, self.num_arrived)

    def leave(self, name: str) -> None:
        del self.talks[name]
        self.admission.leave(name)

    def step(self) -> None:
        """Start what is due, run the most urgent rows, let time pass, end units and talks."""
        for talk in self.talks.values():
            if not talk.rows and talk.next_due_s <= self.now_s:
                num_decided = self.rng.choice(self.decided)
                talk.rows = [UNIT_INPUT_TOKENS, *[1] * num_decided, CLOSING_TOKENS]
                talk.deadline_s = talk.next_due_s + SLACK_S
                talk.next_due_s += 1.0
        busy = [talk for talk in self.talks.values() if talk.rows]
        plan = schedule([Waiting(talk.rows[0], talk.deadline_s, talk.order) for talk in busy], MAX_STEP_TOKENS)
        num_tokens = sum(busy[index].rows[0] for index in plan)
        self.now_s += self.base_s + self.token_s * num_tokens if plan else 0.01
        for index in plan:
            talk = busy[index]
            del talk.rows[0]
            if not talk.rows:
                self.num_units += 1
                self.num_late += self.now_s > talk.deadline_s
        for name in [talk.name for talk in self.talks.values() if talk.leaves_s <= self.now_s]:
            self.leave(name)


def test_thousands_of_sessions_come_and_go_without_a_leak() -> None:
    rng = random.Random(1)
    world = World(rng, num_blocks=4000, base_s=0.02, token_s=0.0002)
    while world.num_arrived < 3000:
        for _ in range(rng.randrange(4)):
            world.arrive(need_blocks=rng.randrange(20, 120), stays_s=rng.expovariate(1 / 8))
        if world.talks and rng.random() < 0.3:  # hangs up at any moment, also within a unit
            world.leave(rng.choice(list(world.talks)))
        world.step()
    assert world.num_refused > 100, "the cache was never full, so nothing was shown"
    assert world.num_units > 1000
    for name in list(world.talks):
        world.leave(name)
    assert world.admission.num_free_blocks == world.num_blocks


@pytest.mark.parametrize("num_talks", [1, 8, 32])
def test_no_deadline_is_missed_while_the_load_fits(num_talks: int) -> None:
    world = World(random.Random(2), num_blocks=10**6, base_s=0.01, token_s=0.0002)
    for _ in range(num_talks):
        world.arrive(need_blocks=100, stays_s=30.0)
    while world.talks:
        world.step()
    assert world.num_units >= 29 * num_talks
    assert world.num_late == 0


def test_a_load_that_does_not_fit_is_late_for_all_alike_and_starves_nobody() -> None:
    world = World(random.Random(3), num_blocks=10**6, base_s=0.15, token_s=0.001, decided=(8,))
    for _ in range(20):
        world.arrive(need_blocks=100, stays_s=40.0)
    talks = list(world.talks.values())
    while world.talks:
        world.step()
    assert world.num_late > 100
    dues = [talk.next_due_s for talk in talks]
    assert max(dues) - min(dues) < 4.0, "everyone got about as many units"
