"""One call's misfortune is its own: closed, interrupted or robbed of messages at any point, beside a watched one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

import build
from antiphon.assembly import Inbox, assemble
from antiphon.call import CallPhase
from antiphon.changing import CallSettings, ChangingCall
from antiphon.config import Dtype, EngineConfig, Placement, SessionConfig, everywhere
from antiphon.core.duplex import DuplexConfig
from antiphon.core.events import InputRefused, SessionEnded, SpeechLost, TurnInterrupted
from antiphon.core.messages import GoOn, Handoff, HeardUnit, Retain
from antiphon.core.window import BasicWindow
from antiphon.engine import Engine, MonotonicClock
from antiphon.happenings import Happening, Speech
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.flow import draw_noise
from antiphon.models.minicpmo.model import model_config
from antiphon.models.minicpmo.prompt import wrap
from antiphon.models.minicpmo.source import CheckpointFolder
from antiphon.models.minicpmo.tokens import load_tokenizer
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.talker.state import TalkerSession
from antiphon.stages.thinker.rebuild import Retained
from antiphon.stages.thinker.state import ChatSession, ThinkerSession, UnitInput
from fakes.lossy import Lossy

SESSION = SessionConfig(window=BasicWindow(150, 100), duplex=DuplexConfig(num_forced_listens=0), max_pictures=0, seed=1)
WATCHED = replace(SESSION, seed=4, prompt=wrap("Watch."))
REFERENCE = 0.1 * torch.randn(16_000, generator=torch.Generator().manual_seed(5))
NO_REFERENCE = torch.empty(0)
NUM_UNITS = 5
CONFIG = EngineConfig(everywhere("cpu", Placement.HERE), Dtype.FLOAT32, max_calls=2, max_stored_prompt_bytes=0)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    return Engine.load(open_checkpoint(tiny_checkpoint), CONFIG, SESSION)


@pytest.fixture(scope="module")
def voices(engine: Engine) -> tuple[VoicePrompt, VoicePrompt]:
    return build.voice(engine), build.voice(engine, 40, seed=2)


def run_down(engine: Engine) -> None:
    while not engine.is_idle:
        engine.advance()


def said(happened: Sequence[Happening]) -> list[tuple[tuple[int, ...], list[float]]]:
    return [(one.chunk.codec_tokens, one.samples.tolist()) for one in happened if isinstance(one, Speech)]


def watch(engine: Engine, voice: VoicePrompt, others: Callable[[int], None]) -> list[Happening]:
    """A call that hears one second after the other; others: what happens beside it before its n-th `advance`."""
    happened: list[Happening] = []
    call = ChangingCall(engine, "watched", CallSettings(WATCHED, NO_REFERENCE, voice), happened.append)
    num_advances = 0
    for unit in range(NUM_UNITS):
        call.hear(build.second(unit))
        while not engine.is_idle:
            others(num_advances)
            num_advances += 1
            if not engine.is_idle:  # the others may have had the last work
                engine.advance()
    others(num_advances)
    run_down(engine)
    call.close()
    return happened


@pytest.fixture(scope="module")
def undisturbed(engine: Engine, voices: tuple[VoicePrompt, VoicePrompt]) -> list[tuple[tuple[int, ...], list[float]]]:
    return said(watch(engine, voices[0], lambda _: None))


def check_nothing_is_left(engine: Engine) -> None:
    counts = engine.survey()
    assert (counts.thinker.num_sessions, counts.talker.num_sessions, counts.code2wav.num_sessions) == (0, 0, 0)
    assert counts.thinker.counts.num_free_blocks == counts.thinker.counts.num_blocks
    assert counts.thinker.counts.num_unreserved_blocks == counts.thinker.counts.num_blocks
    assert (counts.talker.counts.num_waiting, counts.talker.counts.num_rooms) == (0, CONFIG.max_speaking_calls)
    assert counts.code2wav.counts.num_due == 0


class Neighbour:
    """A call that comes with a long prompt, hears three seconds at once and meets its fate before the n-th step."""

    def __init__(self, engine: Engine, voice: VoicePrompt, at: int, fate: Callable[[ChangingCall], object]) -> None:
        self.happened: list[Happening] = []
        self._engine, self._voice, self._at, self._fate = engine, voice, at, fate
        self._call: ChangingCall | None = None

    def __call__(self, number: int) -> None:
        if self._call is None:
            session = replace(SESSION, prompt=wrap("a b " * 20))
            settings = CallSettings(session, REFERENCE, self._voice)
            self._call = ChangingCall(self._engine, "neighbour", settings, self.happened.append)
            for unit in range(3):
                self._call.hear(build.second(100 + unit))
        if number == self._at:
            self._fate(self._call)

    @property
    def call(self) -> ChangingCall:
        assert self._call is not None, "it never came"
        return self._call


POINTS = [*range(30), 35, 40, 50]


@pytest.mark.parametrize("at", POINTS)
def test_a_call_closed_at_any_point_leaves_nothing_and_nobody_notices(
    engine: Engine,
    voices: tuple[VoicePrompt, VoicePrompt],
    undisturbed: list[tuple[tuple[int, ...], list[float]]],
    at: int,
) -> None:
    def close_twice(call: ChangingCall) -> None:
        call.close()
        call.close()

    neighbour = Neighbour(engine, voices[1], at, close_twice)
    assert said(watch(engine, voices[0], neighbour)) == undisturbed
    assert isinstance(neighbour.happened[-1], SessionEnded)
    check_nothing_is_left(engine)


@pytest.mark.parametrize("at", POINTS)
def test_a_call_interrupted_at_any_point_goes_on_and_nobody_notices(
    engine: Engine,
    voices: tuple[VoicePrompt, VoicePrompt],
    undisturbed: list[tuple[tuple[int, ...], list[float]]],
    at: int,
) -> None:
    def interrupt_twice(call: ChangingCall) -> None:
        call.interrupt()
        call.interrupt()
        neighbour.happened.append(TurnInterrupted(-1, -1, -1.0, 0, 0))

    neighbour = Neighbour(engine, voices[1], at, interrupt_twice)
    assert said(watch(engine, voices[0], neighbour)) == undisturbed
    call = neighbour.call.present
    mark = next(i for i, one in enumerate(neighbour.happened) if isinstance(one, TurnInterrupted) and one.turn == -1)
    later = [one for one in neighbour.happened[mark:] if isinstance(one, Speech)]
    assert all(speech.chunk.address.epoch == call.record.epoch for speech in later), (
        "no speech of an old epoch is heard"
    )
    result = call.run_unit(build.second(200))
    assert result.outcome.unit == 3, "every second was heard"
    assert call.record.phase is CallPhase.OPEN
    call.close()
    check_nothing_is_left(engine)


Fate = Callable[[int], Sequence[int]]


def lost(number: int) -> Fate:
    return lambda num_sent: [] if num_sent == number else [-1]


def repeated(number: int) -> Fate:
    return lambda num_sent: [-1, -1] if num_sent == number else [-1]


def late(number: int) -> Fate:
    """The n-th changes places with the one after it."""
    return lambda num_sent: [] if num_sent == number else [-1, -2] if num_sent == number + 1 else [-1]


def echoed(number: int) -> Fate:
    """From the n-th on, all that came before comes again before each."""
    return lambda num_sent: range(num_sent) if num_sent >= number else [-1]


@pytest.fixture
def robbed(tiny_checkpoint: Path) -> Callable[[str, Fate], Engine]:
    """Makes engines on whose way to one stage the victim's messages meet a fate."""
    checkpoint = open_checkpoint(tiny_checkpoint)
    noise = draw_noise(model_config(checkpoint).flow.num_mel_bins, 0, torch.device("cpu"))

    def make(stage: str, fate: Fate) -> Engine:
        inbox: Inbox = SimpleQueue()
        stages = assemble(CheckpointFolder(checkpoint.folder), CONFIG, SESSION, noise, inbox)

        def is_victim(key: str) -> bool:
            return key.startswith("victim")

        match stage:
            case "thinker":
                thinker: Lossy[ThinkerSession | Retained | ChatSession, HeardUnit[UnitInput] | Retain | GoOn]
                thinker = Lossy(stages.thinker, is_victim, fate)
                stages = replace(stages, thinker=thinker)
            case "talker":
                talker: Lossy[TalkerSession, Handoff[Tensor] | GoOn] = Lossy(stages.talker, is_victim, fate)
                stages = replace(stages, talker=talker)
            case _:
                stages = replace(stages, code2wav=Lossy(stages.code2wav, is_victim, fate))
        tokenizer = load_tokenizer(checkpoint.folder)
        return Engine(stages, inbox, tokenizer, model_config(checkpoint), MonotonicClock())

    return make


@pytest.mark.parametrize("fate", [lost, repeated, late, echoed])
@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
def test_what_gets_lost_or_repeated_between_stages_costs_an_answer_at_most_and_only_its_own(
    robbed: Callable[[str, Fate], Engine],
    stage: str,
    fate: Callable[[int], Fate],
    engine: Engine,
    voices: tuple[VoicePrompt, VoicePrompt],
) -> None:
    def live(running: Engine) -> tuple[list[Happening], list[Happening]]:
        happened: dict[str, list[Happening]] = {"victim": [], "watched": []}
        calls = [
            ChangingCall(running, name, CallSettings(config, NO_REFERENCE, voices[0]), happened[name].append)
            for name, config in (("victim", SESSION), ("watched", WATCHED))
        ]
        for unit in range(14):
            for call in calls:
                call.hear(build.second(unit))
            run_down(running)
        for call in calls:
            call.close()
        check_nothing_is_left(running)
        return happened["victim"], happened["watched"]

    healthy, watched = live(engine)
    victim, beside = live(robbed(stage, fate(3)))
    assert said(beside) == said(watched) != []
    if fate in (repeated, echoed):
        assert said(victim) == said(healthy)
        return
    assert any(isinstance(one, SpeechLost | InputRefused) for one in victim)
    chunks = [one.chunk for one in victim if isinstance(one, Speech)]
    seen: set[tuple[int, int]] = set()
    for chunk in chunks:
        turn = (chunk.address.epoch, chunk.address.turn)
        assert chunk.is_first_of_turn == (turn not in seen), "a turn is spoken from its first chunk on, or not at all"
        seen.add(turn)
    assert chunks[-1].address.epoch > 0, "it spoke again"
