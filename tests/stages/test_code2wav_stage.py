"""Code2wav behind messages: who speaks when, seats, voices on their way, and streams that lose and repeat messages."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import build_voice
from antiphon.core.batch_grid import BatchGrid
from antiphon.core.codec_buffer import CHUNK_TOKENS
from antiphon.core.messages import (
    Address,
    Close,
    CodecChunk,
    Done,
    Dropped,
    Failed,
    Fault,
    Interrupt,
    Open,
    Opened,
    Refused,
    Spoken,
    Survey,
    Surveyed,
)
from antiphon.core.sampling import Draws
from antiphon.errors import AudioError
from antiphon.models.minicpmo.flow import MelSynthesizer
from antiphon.models.minicpmo.hift_config import Generation
from antiphon.models.minicpmo.speech_arena import ArenaSize
from antiphon.models.minicpmo.vocoder import SeededNoise, SpeechVocoder
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.code2wav.renderer import ChunkRow, Renderer
from antiphon.stages.code2wav.stage import Code2WavStage
from antiphon.stages.code2wav.state import Caller, Code2WavCounts, Code2WavSession
from antiphon.stages.code2wav.voices import VoiceStore
from antiphon.stages.loop import Answer, Interruption, StageLoop
from build_voice import CPU

Loop = StageLoop[Code2WavSession, CodecChunk, Caller, None, Spoken[Tensor], Code2WavCounts]
Said = Answer[None, Spoken[Tensor], Code2WavCounts]

VOCAB = build_voice.FLOW.vocab_size
NUM_STREAMS = 8
MAX_SPEAKING = 3
PROMPTS = [build_voice.prompt(num_tokens, seed=num_tokens) for num_tokens in (3, 20, 60)]
SMALL = ArenaSize(max_speaking=MAX_SPEAKING, max_frames=MAX_SPEAKING * 120, max_windows=2)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@dataclass(frozen=True, slots=True)
class Setup:
    """Room for three turns; small enough that sessions wait for each other."""

    synthesizer: MelSynthesizer
    vocoder: SpeechVocoder

    def loop(self, sizes: tuple[int, ...] = (1,)) -> Loop:
        renderer = Renderer(self.synthesizer, self.vocoder, BatchGrid(sizes))
        stage = Code2WavStage(renderer, VoiceStore(self.synthesizer, max_bytes=0), CPU)
        return StageLoop(stage, Interruption.VOIDS_WORK)


@pytest.fixture(scope="module", params=Generation)
def setup(request: pytest.FixtureRequest) -> Setup:
    with torch.inference_mode():
        synthesizer = build_voice.synthesizer(generation=request.param, size=SMALL)
        return Setup(synthesizer, build_voice.vocoder(request.param))


def opening(name: str, prompt: VoicePrompt = PROMPTS[0], seed: int = 0) -> Open[Code2WavSession]:
    return Open(name, Code2WavSession(name, prompt, Draws.SAMPLED, seed))


def chunk(name: str, seq: int, num_tokens: int = CHUNK_TOKENS, *, epoch: int = 0, last: bool = False) -> CodecChunk:
    tokens = tuple(range(100 * seq, 100 * seq + num_tokens))
    return CodecChunk(Address(name, epoch, 0, seq), float(seq), seq, tokens, is_first_of_turn=seq == 0, ends_turn=last)


def settle(loop: Loop) -> list[Said]:
    answers: list[Said] = []
    while not loop.is_idle:
        answers += loop.step()
    return answers


def ready(loop: Loop, names: Iterable[str]) -> None:
    for number, name in enumerate(names):
        loop.take(opening(name, PROMPTS[number % len(PROMPTS)], seed=number))
    settle(loop)


def counts(loop: Loop) -> Surveyed[Code2WavCounts]:
    loop.take(Survey(0))
    (told,) = [one for one in loop.step() if isinstance(one, Surveyed)]
    return told


def whose(answers: Iterable[Said]) -> list[str]:
    """Who was heard, in order."""
    return [one.address.session_id for one in answers if isinstance(one, Done)]


def test_a_session_is_ready_when_its_voice_is_and_those_who_speak_are_not_held_up(setup: Setup) -> None:
    loop = setup.loop()
    ready(loop, "a")
    loop.take(opening("b", PROMPTS[1]))
    loop.take(opening("c", PROMPTS[1]))
    num_pieces = setup.synthesizer.num_steps + 1
    for piece in range(num_pieces):
        loop.take(chunk("a", piece))
        answers = loop.step()
        assert whose(answers) == ["a"]
        opened = [one.session_id for one in answers if isinstance(one, Opened)]
        assert opened == (["b", "c"] if piece == num_pieces - 1 else [])
    assert counts(loop).counts.voices.num_users == (1, 2)
    for name in "abc":
        loop.take(Close(name))
    assert counts(loop).counts.voices.num_users == ()


def test_a_voice_that_does_not_fit_ends_its_session_only(setup: Setup) -> None:
    loop = setup.loop()
    wrong = VoicePrompt(PROMPTS[0].tokens, PROMPTS[0].mel, torch.zeros(5))
    too_long = build_voice.prompt(5 * MAX_SPEAKING * 20)
    for message in (opening("a"), opening("b", wrong), opening("c", too_long)):
        loop.take(message)
    answers = settle(loop)
    failed = {one.session_id: one.error for one in answers if isinstance(one, Failed)}
    assert failed.keys() == {"b", "c"}
    assert all(isinstance(error, AudioError) for error in failed.values())
    assert [one.session_id for one in answers if isinstance(one, Opened)] == ["a"]


def test_a_pinned_voice_is_there_before_anybody_asks(setup: Setup) -> None:
    renderer = Renderer(setup.synthesizer, setup.vocoder, BatchGrid((1,)))
    stage = Code2WavStage(renderer, VoiceStore(setup.synthesizer, max_bytes=0), CPU)
    loop: Loop = StageLoop(stage, Interruption.VOIDS_WORK)
    stage.pin(PROMPTS[0])
    assert settle(loop) == []
    loop.take(opening("a"))
    assert [type(one) for one in loop.step()] == [Opened]


def test_a_session_closed_while_its_voice_is_built_leaves_nothing(setup: Setup) -> None:
    loop = setup.loop()
    loop.take(opening("a"))
    loop.step()
    loop.take(Close("a"))
    assert loop.is_idle
    assert counts(loop).counts.voices.num_building == 0


def test_who_finds_no_seat_waits_until_a_turn_ends_and_nobody_fails(setup: Setup) -> None:
    loop = setup.loop()
    names = "abcde"
    ready(loop, names)
    for name in names:
        loop.take(chunk(name, 0))
    assert whose(settle(loop)) == ["a", "b", "c"]
    told = counts(loop).counts
    assert (told.num_due, told.num_waiting, told.num_speaking) == (2, 2, 3)
    loop.take(chunk("b", 1, last=True))
    assert whose(settle(loop)) == ["b", "b", "d"], "the seat goes to the next when all of the turn is spoken"
    loop.take(Interrupt("a", 1))
    assert whose(settle(loop)) == ["e"]
    loop.take(Close("e"))
    loop.take(Close("d"))
    loop.take(chunk("a", 0, epoch=1))
    assert whose(settle(loop)) == ["a"]
    for name in "abc":
        loop.take(Close(name))
    assert setup.synthesizer.arena.num_seated == 0
    assert setup.synthesizer.arena.num_held.all == (0, 0, 0)


def test_the_most_urgent_chunks_come_first(setup: Setup) -> None:
    loop = setup.loop()
    ready(loop, "abc")
    for message in (chunk("a", 0), chunk("b", 0)):
        loop.take(message)
    settle(loop)
    for message in (chunk("a", 1), chunk("b", 1), chunk("c", 0)):
        loop.take(message)
    assert whose(settle(loop)) == ["c", "a", "b"]
    for name in "abc":
        loop.take(Close(name))


def test_the_end_of_a_turn_comes_after_its_last_second_and_holds_nobody_up(setup: Setup) -> None:
    loop = setup.loop((1, 3))
    ready(loop, "abc")
    for message in (chunk("a", 0), chunk("b", 0), chunk("c", 0)):
        loop.take(message)
    settle(loop)
    for message in (chunk("a", 1, last=True), chunk("b", 1), chunk("c", 1, last=True)):
        loop.take(message)
    seconds = [one for one in loop.step() if isinstance(one, Done)]
    assert whose(seconds) == ["a", "b", "c"]
    assert [one.result.goes_on for one in seconds] == [True, False, True]
    loop.take(replace(chunk("b", 2), deadline_s=1.2))
    assert whose(loop.step()) == ["b"], "who is more urgent goes first"
    ends = [one for one in loop.step() if isinstance(one, Done)]
    assert whose(ends) == ["a", "c"]
    assert [(one.result.goes_on, one.result.chunk.ends_turn, one.result.chunk.codec_tokens) for one in ends] == (
        [(False, True, ())] * 2
    )
    assert counts(loop).counts.num_speaking == 1
    for name in "abc":
        loop.take(Close(name))


def test_an_answer_stopped_before_its_end_is_spoken_has_none(setup: Setup) -> None:
    loop = setup.loop()
    ready(loop, "a")
    for message in (chunk("a", 0), chunk("a", 1, last=True)):
        loop.take(message)
        loop.step()
    loop.take(Interrupt("a", 1))
    assert [one.fault for one in settle(loop) if isinstance(one, Dropped)] == [Fault.STALE]
    assert counts(loop).counts.num_speaking == 0
    loop.take(Close("a"))


def test_sessions_that_listen_hold_nothing(setup: Setup) -> None:
    loop = setup.loop()
    ready(loop, "abcdefgh")
    assert setup.synthesizer.arena.num_held.all == (0, 0, 0)
    loop.take(chunk("a", 0))
    settle(loop)
    assert counts(loop).counts.num_speaking == 1
    loop.take(chunk("a", 1, 4, last=True))
    settle(loop)
    assert setup.synthesizer.arena.num_held.all == (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Move:
    """What happens to a stream's next message, or to the stream."""

    who: int
    what: str
    num_tokens: int
    ends_turn: bool


@dataclass(slots=True)
class Sender:
    """One stream's talker, and the line that its messages go through."""

    name: str
    epoch: int = 0
    seq: int = 0
    is_turn_start: bool = True
    last: list[CodecChunk] = field(default_factory=list)

    def next(self, move: Move, *, is_bad: bool = False) -> CodecChunk:
        start = (700 * int(self.name) + 90 * self.seq + 31 * self.epoch) % (VOCAB - 100)
        tokens = (*range(start, start + move.num_tokens), *([VOCAB] if is_bad else []))
        address = Address(self.name, self.epoch, 0, self.seq)
        made = CodecChunk(address, float(self.seq), self.seq, tokens, self.is_turn_start, move.ends_turn)
        self.seq += 1
        self.is_turn_start = move.ends_turn
        self.last = [made]
        return made

    def messages(self, move: Move) -> list[CodecChunk | Interrupt]:
        """What arrives."""
        match move.what:
            case "say":
                return [self.next(move)]
            case "lose":
                self.next(move)
                return []
            case "repeat":
                return [*self.last]
            case "swap":
                first = self.next(move)
                return [self.next(move), first]
            case "spoil":
                return [self.next(move, is_bad=True)]
            case _:
                self.epoch, self.seq, self.is_turn_start = self.epoch + 1, 0, True
                return [Interrupt(self.name, self.epoch)] if move.what == "interrupt" else []


FATES = ["say"] * 12 + ["lose", "repeat", "repeat", "swap", "spoil", "interrupt", "interrupt", "lose the interruption"]
moves = st.builds(
    Move,
    who=st.integers(0, NUM_STREAMS - 1),
    what=st.sampled_from(FATES),
    num_tokens=st.sampled_from([0, 1, 2, 4, 5, 10, 25, 25, 25]),
    ends_turn=st.sampled_from([False, False, True]),
)


def play(loop: Loop, script: list[Move], steps_between: int) -> list[Said]:
    """All streams, then each closed in turn, so that those who waited for a seat come to speak too."""
    senders = [Sender(str(who)) for who in range(NUM_STREAMS)]
    ready(loop, [sender.name for sender in senders])
    answers: list[Said] = []
    for number, move in enumerate(script):
        for message in senders[move.who].messages(move):
            loop.take(message)
        if number % steps_between == 0:
            answers += loop.step()
    for sender in senders:
        answers += settle(loop)
        loop.take(Close(sender.name))
    return answers


def alone(setup: Setup, name: str, accepted: Iterable[CodecChunk]) -> list[Tensor]:
    """The sound of a stream of these chunks and nobody else's."""
    renderer, who = Renderer(setup.synthesizer, setup.vocoder, BatchGrid((1,))), int(name)
    voice = setup.synthesizer.build_voice(PROMPTS[who % len(PROMPTS)])
    state = renderer.open(voice, SeededNoise(who, CPU))
    heard, epoch = [], 0
    for one in accepted:
        if one.address.epoch != epoch:
            renderer.reset_turn(state)
            epoch = one.address.epoch
        (samples,) = renderer.speak([ChunkRow(state, one.codec_tokens, one.ends_turn, one.is_first_of_turn)])
        assert isinstance(samples, Tensor), f"{one} came to {samples}"
        heard.append(samples)
    renderer.reset_turn(state)
    return heard


@settings(max_examples=12, deadline=None)
@given(st.lists(moves, min_size=20, max_size=60), st.integers(1, 9))
def test_whatever_is_lost_repeated_or_late_a_stream_sounds_like_its_accepted_chunks_alone(
    setup: Setup, script: list[Move], steps_between: int
) -> None:
    logging.disable(logging.CRITICAL)
    try:
        loop = setup.loop()
        answers = play(loop, script, steps_between)
        told = counts(loop)
    finally:
        logging.disable(logging.NOTSET)
    assert not [one for one in answers if isinstance(one, Failed)]
    assert told.num_sessions == 0
    arena, dropped = setup.synthesizer.arena, Counter(one.fault for one in answers if isinstance(one, Dropped))
    assert dict(told.faults) == dropped, "each fault is counted by its reason"
    assert (arena.num_seated, arena.num_held.all, told.counts.voices.num_users) == (0, (0, 0, 0), ())
    for refused in [one for one in answers if isinstance(one, Refused)]:
        assert "codec tokens go from 0" in str(refused.error)
    for who in range(NUM_STREAMS):
        done = [one.result for one in answers if isinstance(one, Done) and one.address.session_id == str(who)]
        want = alone(setup, str(who), [spoken.chunk for spoken in done])
        assert all(map(torch.equal, (spoken.samples for spoken in done), want))


def test_the_faults_of_a_lossy_line_are_all_met(setup: Setup) -> None:
    """A script that the test above could draw, with one of each."""
    fates = ["say", "repeat", "interrupt", "say", "lose", "say", "say", "lose the interruption", "say", "swap"]
    loop = setup.loop()
    answers = play(loop, [Move(1, what, 25, ends_turn=False) for what in fates], steps_between=1)
    faults = Counter(one.fault for one in answers if isinstance(one, Dropped))
    assert faults == {Fault.REPEATED: 2, Fault.GAP: 2, Fault.VOID: 1}
