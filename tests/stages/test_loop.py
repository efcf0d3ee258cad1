"""What every stage does with its messages, shown on one that repeats what it is told."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.messages import (
    Address,
    Close,
    Done,
    Dropped,
    Failed,
    Fault,
    Interrupt,
    Open,
    Opened,
    Refused,
    Survey,
    Surveyed,
)
from antiphon.errors import InputError, InternalError, ResourceExhausted
from antiphon.stages.loop import Answer, Interruption, Message, StageLoop
from fakes.echo_stage import EchoStage, EchoState, Say

Loop = StageLoop[tuple[str, str], Say, EchoState, str, tuple[str, ...], int]
Told = Message[tuple[str, str], Say]
Said = Answer[str, tuple[str, ...], int]


def new_loop(interruption: Interruption = Interruption.VOIDS_WORK) -> tuple[Loop, EchoStage]:
    stage = EchoStage(interruption)
    return StageLoop(stage, interruption), stage


def say(name: str, seq: int, text: str, *, epoch: int = 0, num_steps: int = 1) -> Say:
    return Say(Address(name, epoch, 0, seq), text, num_steps)


def open_session(name: str, how: str = "") -> Open[tuple[str, str]]:
    return Open(name, (name, how))


def run(loop: Loop, messages: Sequence[Told]) -> list[Said]:
    """What a loop answers to messages that come at once."""
    for message in messages:
        loop.take(message)
    return settle(loop)


def settle(loop: Loop) -> list[Said]:
    answers: list[Said] = []
    while not loop.is_idle:
        answers += loop.step()
    return answers


def told(answers: Sequence[Said]) -> list[Done[tuple[str, ...]] | Opened[str]]:
    """Only these may come where nothing goes wrong."""
    assert all(isinstance(one, Done | Opened) for one in answers), answers
    return [one for one in answers if isinstance(one, Done | Opened)]


def results(answers: Sequence[Said], name: str) -> list[tuple[str, ...]]:
    return [one.result for one in answers if isinstance(one, Done) and one.address.session_id == name]


def test_work_is_done_in_order_one_piece_at_a_time_and_each_is_answered() -> None:
    loop, _ = new_loop()
    answers = run(loop, [open_session("a"), say("a", 0, "x", num_steps=3), say("a", 1, "y"), say("a", 2, "z")])
    assert answers == [
        Opened("a", "hello a"),
        Done(Address("a", 0, 0, 0), ("x",)),
        Done(Address("a", 0, 0, 1), ("x", "y")),
        Done(Address("a", 0, 0, 2), ("x", "y", "z")),
    ]


def test_work_that_comes_before_a_session_is_ready_waits_for_it() -> None:
    loop, _ = new_loop()
    answers = run(loop, [open_session("a", "slow"), say("a", 0, "x")])
    assert answers == [Opened("a", "hello a"), Done(Address("a", 0, 0, 0), ("x",))]


def test_what_comes_twice_is_done_once() -> None:
    loop, _ = new_loop()
    twice = say("a", 0, "x")
    answers = run(loop, [open_session("a"), twice, twice, open_session("a"), say("a", 1, "y")])
    assert results(answers, "a") == [("x",), ("x", "y")]
    assert Dropped(twice.address, Fault.REPEATED) in answers


def test_after_a_gap_the_rest_of_the_epoch_is_void_and_the_next_one_is_clean() -> None:
    loop, _ = new_loop()
    lossy = [say("a", 0, "x"), say("a", 2, "z"), say("a", 3, "?"), say("a", 1, "late")]
    answers = run(loop, [open_session("a"), *lossy, Interrupt("a", 1), say("a", 0, "new", epoch=1)])
    faults = [one.fault for one in answers if isinstance(one, Dropped)]
    assert faults == [Fault.GAP, Fault.VOID, Fault.REPEATED, Fault.STALE]
    assert results(answers, "a") == [("new",)]


def test_an_interruption_voids_what_is_under_way_and_what_waits() -> None:
    loop, _ = new_loop()
    loop.take(open_session("a"))
    loop.step()
    for number in range(3):
        loop.take(say("a", number, "x", num_steps=2))
    loop.step()
    answers = run(loop, [Interrupt("a", 1), Interrupt("a", 1), say("a", 3, "old"), say("a", 0, "new", epoch=1)])
    assert [one.fault for one in answers if isinstance(one, Dropped)] == [Fault.STALE] * 4
    assert results(answers, "a") == [("new",)]


def test_an_interruption_may_keep_what_the_caller_said() -> None:
    loop, stage = new_loop(Interruption.KEEPS_WORK)
    run(loop, [open_session("a"), say("a", 0, "x")])
    loop.take(Interrupt("a", 1))
    assert stage.open_sessions["a"].said == []
    answers = run(loop, [say("a", 0, "y", epoch=1), say("a", 1, "z", epoch=1), Interrupt("a", 2)])
    assert [one.address.seq for one in answers if isinstance(one, Done)] == [0, 1]


def test_a_later_epoch_announces_itself() -> None:
    loop, stage = new_loop()
    answers = run(loop, [open_session("a"), say("a", 0, "x"), say("a", 0, "y", epoch=2)])
    assert results(answers, "a") == [("y",)]
    assert stage.open_sessions["a"].said == ["y"]


@pytest.mark.parametrize("text", ["refuse", "step refuse"])
def test_work_that_cannot_be_done_is_refused_and_an_answer_with_a_hole_is_not_gone_on_with(text: str) -> None:
    loop, _ = new_loop()
    bad = say("a", 1, text, num_steps=2)
    answers = run(loop, [open_session("a"), say("a", 0, "x"), bad, say("a", 2, "y")])
    answers += run(loop, [say("a", 3, "y"), say("a", 0, "z", epoch=1)])
    (refused,) = [one for one in answers if isinstance(one, Refused)]
    assert refused.address == bad.address
    assert isinstance(refused.error, InputError)
    assert results(answers, "a") == [("x",), ("z",)]


@pytest.mark.parametrize("text", ["refuse", "step refuse"])
def test_a_callers_second_that_is_refused_does_not_stop_the_next_one(text: str) -> None:
    loop, _ = new_loop(Interruption.KEEPS_WORK)
    answers = run(loop, [open_session("a"), say("a", 0, "x"), say("a", 1, text), say("a", 2, "y")])
    assert results(answers, "a") == [("x",), ("x", "y")]


@pytest.mark.parametrize(
    ("how", "error"),
    [("fail", ResourceExhausted), ("raise", InternalError), ("step fail", ResourceExhausted)],
)
def test_a_session_that_fails_is_over_and_the_others_go_on(
    how: str, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    loop, stage = new_loop()
    with caplog.at_level(logging.CRITICAL):
        answers = run(
            loop,
            [
                open_session("a"),
                open_session("b"),
                say("a", 0, "x"),
                say("b", 0, "1"),
                say("a", 1, how),
                say("b", 1, "2"),
            ],
        )
        answers += run(loop, [say("a", 2, "y"), say("b", 2, "3")])
    (failed,) = [one for one in answers if isinstance(one, Failed)]
    assert failed.session_id == "a"
    assert isinstance(failed.error, error)
    assert results(answers, "b") == [("1",), ("1", "2"), ("1", "2", "3")]
    assert stage.open_sessions.keys() == {"b"}


@pytest.mark.parametrize(("how", "error"), [("fail", ResourceExhausted), ("raise", InternalError)])
def test_a_session_that_cannot_be_opened_holds_nothing_and_is_told(how: str, error: type[Exception]) -> None:
    loop, stage = new_loop()
    answers = run(loop, [open_session("a", how), say("a", 0, "x"), open_session("b")])
    assert [type(one) for one in answers] == [Failed, Opened]
    assert isinstance(answers[0], Failed)
    assert isinstance(answers[0].error, error)
    assert stage.open_sessions.keys() == {"b"}
    assert run(loop, [open_session("a")]) == [Opened("a", "hello a")], "the name is free"


@pytest.mark.parametrize("num_steps_before", range(6))
def test_a_session_closed_at_any_point_says_nothing_more_and_leaves_nothing(num_steps_before: int) -> None:
    loop, stage = new_loop()
    for message in (open_session("a", "slow"), open_session("b"), say("a", 0, "x", num_steps=2), say("b", 0, "1")):
        loop.take(message)
    answers: list[Said] = []
    for _ in range(num_steps_before):
        answers += loop.step()
    after = run(loop, [Close("a"), Close("a"), say("a", 1, "y"), Interrupt("a", 1), say("b", 1, "2")])
    assert "a" not in {one.address.session_id if isinstance(one, Done) else one.session_id for one in told(after)}
    assert results([*answers, *after], "b") == [("1",), ("1", "2")]
    assert stage.open_sessions.keys() == {"b"}


def test_faults_are_counted_and_told_when_asked() -> None:
    loop, _ = new_loop()
    run(loop, [open_session("a"), say("a", 0, "x"), say("a", 0, "x"), say("nobody", 0, "x")])
    (told,) = run(loop, [Survey(7)])
    assert told == Surveyed(7, 1, ((Fault.REPEATED, 1), (Fault.UNKNOWN, 1)), 1)


scripts = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 2), st.integers(0, 4), st.sampled_from(["x", "y", "step refuse"])),
        st.tuples(st.just("interrupt"), st.integers(0, 3), st.just(0), st.just("")),
        st.tuples(st.just("step"), st.just(0), st.just(0), st.just("")),
        st.tuples(st.just("fail"), st.integers(0, 2), st.integers(0, 4), st.sampled_from(["step fail", "raise"])),
        st.tuples(st.just("close"), st.just(0), st.just(0), st.just("")),
    ),
    max_size=25,
)
Script = list[tuple[str, int, int, str]]


def play(loop: Loop, crowd: Sequence[Script]) -> list[Said]:
    """Streams of several sessions, message by message in turn; a step of any session is a step of all."""
    answers: list[Said] = []
    for number in range(len(crowd)):
        loop.take(open_session(str(number)))
    for index in range(max(map(len, crowd), default=0)):
        for number, script in enumerate(crowd):
            if index >= len(script):
                continue
            kind, epoch, seq, text = script[index]
            match kind:
                case "interrupt":
                    loop.take(Interrupt(str(number), epoch))
                case "close":
                    loop.take(Close(str(number)))
                case "step":
                    answers += loop.step()
                case _:
                    loop.take(say(str(number), seq, text, epoch=epoch))
    return answers + settle(loop)


@given(crowd=st.lists(scripts, min_size=1, max_size=4))
def test_whatever_comes_each_message_is_answered_at_most_once_and_nobody_notices_the_others(
    crowd: list[Script],
) -> None:
    logging.disable(logging.CRITICAL)
    try:
        loop, stage = new_loop()
        answers = play(loop, crowd)
        for number, script in enumerate(crowd):
            done = [one for one in answers if isinstance(one, Done) and one.address.session_id == str(number)]
            assert max(Counter(one.address for one in done).values(), default=0) <= 1
            for one in done:
                assert len(one.result) <= one.address.seq + 1, "nothing of an older epoch is in it"
            is_over = any(isinstance(one, Failed) and one.session_id == str(number) for one in answers)
            assert (str(number) in stage.open_sessions) == (not is_over and ("close", 0, 0, "") not in script)
    finally:
        logging.disable(logging.NOTSET)
