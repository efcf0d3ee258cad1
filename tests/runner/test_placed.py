"""The same stage in every place: here, in a thread, in a process. What it answers is the same."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import cast

import pytest
import torch

from antiphon.core.messages import Address, Close, Done, Interrupt, Open, Opened, Survey, Surveyed
from antiphon.errors import ConfigError
from antiphon.runner.device import Precedence
from antiphon.runner.placed import Died, Here, Placed, Threaded
from antiphon.runner.process import Separate
from antiphon.stages.loop import Answer, Message
from fakes.echo_stage import EchoBuilder, Say

Told = Message[tuple[str, str], Say]
Said = Answer[str, tuple[str, ...], int] | Died


Place = Callable[[EchoBuilder, Callable[[Said], None]], Placed[Told]]


def here(builder: EchoBuilder, emit: Callable[[Said], None]) -> Placed[Told]:
    return Here(builder.build(), emit)


def threaded(builder: EchoBuilder, emit: Callable[[Said], None]) -> Placed[Told]:
    return Threaded("echo", builder.build(), builder.device, builder.precedence, emit)


def separate(builder: EchoBuilder, emit: Callable[[Said], None]) -> Placed[Told]:
    return Separate("echo", builder, emit)


PLACES: dict[str, Place] = {"here": here, "thread": threaded, "process": separate}
MESSAGES: tuple[Told, ...] = (
    Open("a", ("a", "slow")),
    Say(Address("a", 0, 0, 0), "x", num_steps=2),
    Say(Address("a", 0, 0, 1), "y"),
    Open("b", ("b", "fail")),
    Say(Address("a", 0, 0, 1), "y"),
    Say(Address("a", 0, 0, 2), "z"),
)


def answers_to(place: Place, messages: Sequence[Told], num_answers: int) -> list[Said]:
    """The first answers, and a check that the last message comes to an end."""
    inbox: SimpleQueue[Said] = SimpleQueue()
    placed = place(EchoBuilder(), inbox.put)
    placed.start()
    for message in messages:
        placed.send(message)
    got: list[Said] = []
    while len(got) < num_answers:
        while not placed.is_idle:
            placed.step()
        got.append(inbox.get())
    placed.stop()
    placed.stop()
    return got


@pytest.mark.parametrize("name", PLACES)
def test_a_stage_answers_the_same_in_every_place(name: str) -> None:
    got = answers_to(PLACES[name], MESSAGES, num_answers=6)
    assert [one.result for one in got if isinstance(one, Done)] == [("x",), ("x", "y"), ("x", "y", "z")]
    assert [one.about for one in got if isinstance(one, Opened)] == ["hello a"]
    assert sorted(type(one).__name__ for one in got) == ["Done", "Done", "Done", "Dropped", "Failed", "Opened"]


@pytest.mark.parametrize("name", PLACES)
def test_a_closed_session_is_gone_in_every_place(name: str) -> None:
    messages = (Open("a", ("a", "")), Open("b", ("b", "")), Interrupt("a", 1), Close("a"), Survey(1))
    got = answers_to(PLACES[name], messages, num_answers=2)
    surveyed = next(one for one in got if isinstance(one, Surveyed))
    assert (surveyed.num_sessions, surveyed.counts) == (1, 1)


@pytest.mark.parametrize("name", PLACES)
def test_a_stage_that_cannot_be_built_says_why(name: str) -> None:
    def build() -> None:
        placed = PLACES[name](EchoBuilder("refuse"), print)
        try:
            placed.start()
        finally:
            placed.stop()

    with pytest.raises(ConfigError, match="this cannot be built"):
        build()


def test_a_process_that_dies_while_it_is_built_is_an_error() -> None:
    placed = separate(EchoBuilder("crash"), print)
    with pytest.raises(Exception, match="ended before its stage was built"):
        placed.start()
    placed.stop()


def test_a_process_that_is_killed_tells_so_and_what_comes_later_does_no_harm() -> None:
    inbox: SimpleQueue[Said] = SimpleQueue()
    placed = separate(EchoBuilder(), inbox.put)
    placed.start()
    placed.send(MESSAGES[0])
    assert isinstance(inbox.get(), Opened)
    (child,) = (process for process in multiprocessing.active_children() if process.name == "antiphon echo")
    os.kill(cast(int, child.pid), signal.SIGKILL)  # a running process has one
    died = inbox.get()
    assert isinstance(died, Died)
    assert "ended with status -9" in died.reason
    placed.send(MESSAGES[1])
    placed.stop()


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_what_a_stage_holds_is_given_back_when_it_stops(place: Place, tmp_path: Path) -> None:
    inbox: SimpleQueue[Said] = SimpleQueue()
    held = tmp_path / "held"
    placed = place(EchoBuilder(held=held), inbox.put)
    placed.start()
    assert held.exists()
    placed.stop()
    assert not held.exists()
    placed.stop()


def test_processes_leave_nothing_in_shared_memory() -> None:
    def segments() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir()}

    before = segments()
    answers_to(separate, MESSAGES, num_answers=6)
    assert segments() <= before


@dataclass(slots=True)
class _Broken:
    """A loop with a bug that no fence inside it holds."""

    is_idle: bool = True

    def take(self, message: Told) -> None:
        raise AssertionError(f"a bug of ours, met with {message}")

    def close(self) -> None:
        pass

    def step(self) -> list[Said]:
        return []


def test_a_thread_that_fails_as_a_whole_tells_so() -> None:
    inbox: SimpleQueue[Said] = SimpleQueue()
    placed: Threaded[Told, Said] = Threaded("broken", _Broken(), torch.device("cpu"), Precedence.USUAL, inbox.put)
    placed.start()
    placed.send(MESSAGES[0])
    died = inbox.get()
    assert isinstance(died, Died)
    assert "a bug of ours" in died.reason
    placed.stop()
