"""The engine: networks, stages, and calls that run through them, several in one step.

The order within a unit is thinker → talker → code2wav, joined by the messages of `core.messages`. Shown by
tests/test_engine.py and the golden kind endtoend.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from antiphon.config import EngineConfig, SessionConfig, check_window
from antiphon.core.clock import Clock
from antiphon.core.events import (
    Event,
    SessionOpened,
    SpeechQueued,
    TurnEnded,
    TurnInterrupted,
    TurnStarted,
    UnitDecided,
    WindowSlid,
)
from antiphon.core.messages import CodecChunk
from antiphon.core.playback import PlaybackClock
from antiphon.core.prompts import PromptCounts
from antiphon.core.sampling import Draws
from antiphon.errors import AntiphonError, AudioError, InputError
from antiphon.models.minicpmo.checkpoint import Checkpoint
from antiphon.models.minicpmo.flow import MelSynthesizer, draw_noise
from antiphon.models.minicpmo.flow_cache import Voice
from antiphon.models.minicpmo.model import Model, load_model
from antiphon.models.minicpmo.tokens import TextTokenizer
from antiphon.models.minicpmo.vocoder import NoNoise, SeededNoise, Vocoder
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.code2wav.stage import Code2WavStage
from antiphon.stages.code2wav.state import Code2WavState
from antiphon.stages.paged import CacheConfig
from antiphon.stages.talker.stage import TalkerStage
from antiphon.stages.talker.state import TalkerSession, TalkerState
from antiphon.stages.thinker.decider import Decider
from antiphon.stages.thinker.senses import Senses
from antiphon.stages.thinker.stage import NUM_SEGMENTS, PromptLimits, ThinkerStage, ThinkerState
from antiphon.stages.thinker.state import ThinkerSession, UnitInput, UnitOutcome
from antiphon.units import OUTPUT_RATE_HZ, UNIT_S, UNIT_SAMPLES

NUM_FLOW_STEPS = 10
"""Euler steps of the vocoder's flow, as the reference's duplex default (REFERENCE 4.7)."""


FLOW_NOISE_SEED = 0
"""The reference draws this noise once, unseeded (REFERENCE 9.3); ours is the same for all engines."""


class MonotonicClock:
    """The machine's clock."""

    def now_s(self) -> float:
        return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Speech:
    """What the model says.

    at_s: when it became available, on the input's clock.
    start_samples: where it plays, on the output's clock: after what was queued before.
    samples: [n] float32 on the host, 24 kHz; n = 0 when code2wav holds everything back.
    """

    chunk: CodecChunk
    at_s: float
    start_samples: int
    samples: Tensor


@dataclass(frozen=True, slots=True)
class UnitResult:
    """Everything that one second of a call came to."""

    outcome: UnitOutcome
    speech: tuple[Speech, ...]
    events: tuple[Event, ...]


class Engine:
    """Owns the stages and their caches, which hold `EngineConfig.max_calls` calls like `session`."""

    def __init__(
        self,
        model: Model,
        tokenizer: TextTokenizer,
        config: EngineConfig,
        session: SessionConfig,
        flow_noise: Tensor,
        clock: Clock,
    ) -> None:
        """session: whose need the cache is sized for. flow_noise: [M, N] float32 on the engine's device.

        Raises: ConfigError if the session's window does not fit the model.
        """
        self.tokenizer = tokenizer
        self.config = config
        self.num_mel_bins = model.config.flow.num_mel_bins
        self._clock = clock
        senses = Senses(model.thinker, tokenizer.special, model.audio, model.vision)
        max_unit_tokens = (
            senses.num_input_tokens(session.max_pictures, session.max_slices) + session.duplex.max_output_tokens
        )
        check_window(session.window, max_unit_tokens, model.config.thinker.max_position_tokens)
        window_tokens = session.window.peak_tokens(config.max_prompt_tokens, max_unit_tokens)
        decider = Decider(model.thinker, tokenizer, _cache(config, window_tokens, NUM_SEGMENTS))
        self._thinker = ThinkerStage(senses, decider, tokenizer, _prompt_limits(config))
        talker_tokens = model.config.talker.max_position_tokens
        self._talker = TalkerStage(model.talker, _cache(config, talker_tokens, num_segments=1))
        self._synthesizer = MelSynthesizer(model.flow, flow_noise, NUM_FLOW_STEPS)
        self._code2wav = Code2WavStage(self._synthesizer, Vocoder(model.hift))
        self._open_calls: dict[str, Call] = {}
        self._on_their_way: dict[str, _Second] = {}

    @staticmethod
    def load(checkpoint: Checkpoint, tokenizer: TextTokenizer, config: EngineConfig, session: SessionConfig) -> Engine:
        """session: whose need the cache is sized for. Raises: CheckpointError, ConfigError."""
        if config.device.type == "cuda":
            # The vocoder sums up a sine's phase in float32; TF32 convolutions before it would be heard.
            torch.backends.cudnn.allow_tf32 = False
        model = load_model(checkpoint, config.device, config.dtype)
        noise = draw_noise(model.config.flow.num_mel_bins, FLOW_NOISE_SEED, config.device)
        return Engine(model, tokenizer, config, session, noise, MonotonicClock())

    def build_voice(self, prompt: VoicePrompt) -> Voice:
        """Condition the vocoder on a voice; it may be used by any number of calls. Raises: AudioError."""
        return self._synthesizer.build_voice(prompt)

    def open(self, session_id: str, session: SessionConfig, reference: Tensor, voice: Voice) -> Call:
        """Start a call.

        reference: [n] float32 on the host, 16 kHz, the voice in the prompt; n = 0 for none.
        Raises: PromptTooLong, AudioError, ResourceExhausted; nothing is held then.
        """
        started_s = self._clock.now_s()
        thinker = self._thinker.open(
            ThinkerSession(
                session_id=session_id,
                prompt=session.prompt,
                reference=reference,
                window=session.window,
                slide=session.slide,
                max_pictures=session.max_pictures,
                max_slices=session.max_slices,
                duplex=session.duplex,
                sampling=session.text,
                draws=session.draws,
                seed=_stream_seed(session.seed, _Stream.TEXT),
            )
        )
        codec_seed = _stream_seed(session.seed, _Stream.CODEC)
        talker = self._talker.open(TalkerSession(session_id, session.codec, session.draws, codec_seed))
        noise = (
            NoNoise(self.config.device)
            if session.draws is Draws.MOST_LIKELY
            else SeededNoise(_stream_seed(session.seed, _Stream.SOURCE), self.config.device)
        )
        opened = SessionOpened(
            session_id=session_id,
            num_prompt_tokens=thinker.mind.memory.context.num_tokens,
            max_context_tokens=thinker.max_tokens,
            is_prompt_hit=thinker.is_prompt_hit,
            prompt_ms=1000 * (self._clock.now_s() - started_s),
        )
        call = Call(self, CallStates(thinker, talker, self._code2wav.open(voice, noise)), opened)
        self._open_calls[session_id] = call
        return call

    @property
    def is_idle(self) -> bool:
        """No second of any call is on its way."""
        return not self._on_their_way

    def start_unit(self, call: Call, heard: UnitInput) -> None:
        """Let a call live through one second; `step` returns what it came to.

        Raises: AudioError, ImageError or InputError for bad input, with the call as before;
        ContextLengthExceeded when the window is off and the context full: the call is over then.
        """
        if not self._is_open(call):
            raise InputError(f"the call {call.session_id!r} has ended; open another one")
        assert call.session_id not in self._on_their_way, f"a second of {call.session_id} is on its way already"
        if heard.samples.shape != (UNIT_SAMPLES,):
            raise AudioError(f"a unit is {UNIT_SAMPLES} samples of one channel, got shape {tuple(heard.samples.shape)}")
        timer = _Timer(self._clock)
        self._thinker.start_unit(call.states.thinker, heard, deadline_s=call.playback.end_s)
        self._on_their_way[call.session_id] = _Second(call, timer)

    def step(self) -> list[tuple[Call, UnitResult | AntiphonError]]:
        """One step of each stage for the most urgent calls. Returns the seconds that came to their end.

        A call whose second ended with an error is over. Nobody's error touches another call.
        """
        ended: list[tuple[Call, UnitResult | AntiphonError]] = []
        for session_id, outcome in self._thinker.step().items():
            second = self._on_their_way[session_id]
            if isinstance(outcome, AntiphonError):
                ended.append((second.call, outcome))
            else:
                second.outcomes.append((outcome, second.timer.lap_ms()))
                talker = second.call.states.talker
                self._talker.start(talker, outcome.handoffs, deadline_s=second.call.playback.end_s)
        for session_id, chunks in self._talker.step().items():
            second = self._on_their_way[session_id]
            if isinstance(chunks, AntiphonError):
                ended.append((second.call, chunks))
            else:
                second.talker_ms = second.timer.lap_ms()
                second.unspoken += chunks
                second.is_decided = True
        self._speak_most_urgent()
        complete = [second for second in self._on_their_way.values() if second.is_decided and not second.unspoken]
        ended += ((second.call, second.result()) for second in complete)
        for call, _ in ended:
            del self._on_their_way[call.session_id]
        return ended

    def run_units(self, seconds: Sequence[tuple[Call, UnitInput]]) -> list[UnitResult | AntiphonError]:
        """Let different calls live through one second each, together, and wait for all; nothing else may be on its way.

        Returns one result per call, in order, as `start_unit` raises and `step` returns them.
        """
        assert self.is_idle, f"seconds of {sorted(self._on_their_way)} are on their way"
        results: dict[str, UnitResult | AntiphonError] = {}
        for call, heard in seconds:
            try:
                self.start_unit(call, heard)
            except AntiphonError as error:
                results[call.session_id] = error
        while not self.is_idle:
            results |= {call.session_id: result for call, result in self.step()}
        return [results[call.session_id] for call, _ in seconds]

    def interrupt(self, call: Call) -> TurnInterrupted | None:
        """Stop a call's present answer between units.

        Talker and vocoder forget it, queued speech is void, and the call's next unit closes the turn in the context:
        what was said until now stays there. Returns None if nothing was being said or played.
        """
        if not self._is_open(call):
            return None
        assert call.session_id not in self._on_their_way, f"a second of {call.session_id} is on its way"
        mind = call.states.thinker.mind
        at_s = mind.num_units * UNIT_S
        turn, is_saying = mind.turn, mind.is_turn_open or mind.is_speaking
        num_void_samples = call.playback.cut(at_s)
        if not is_saying and not num_void_samples:
            return None
        self._thinker.interrupt(call.states.thinker)
        self._talker.close(call.states.talker)
        self._code2wav.reset_turn(call.states.code2wav)
        return TurnInterrupted(turn, mind.epoch, at_s, num_void_samples)

    @property
    def prompt_counts(self) -> PromptCounts:
        """Hits, misses and evictions of shared prompts, and the blocks that they hold."""
        return self._thinker.prompts.counts

    def close(self, call: Call) -> None:
        """End a call wherever it is and give everything back; idempotent."""
        # Stages know sessions by name, and another call may have the name by now.
        if not self._is_open(call):
            return
        del self._open_calls[call.session_id]
        self._on_their_way.pop(call.session_id, None)
        self._thinker.close(call.states.thinker)
        self._talker.close(call.states.talker)
        self._code2wav.reset_turn(call.states.code2wav)

    def _is_open(self, call: Call) -> bool:
        return self._open_calls.get(call.session_id) is call

    def _speak_most_urgent(self) -> None:
        """Render one chunk: the first of a turn before all others, then whose listener runs dry first."""
        waiting = [second for second in self._on_their_way.values() if second.unspoken]
        if not waiting:
            return
        second = min(waiting, key=lambda one: (not one.unspoken[0].is_first_of_turn, one.call.playback.end_s))
        call, chunk = second.call, second.unspoken.popleft()
        samples = self._code2wav.speak(
            call.states.code2wav, chunk.codec_tokens, is_turn_end=chunk.ends_turn, is_flush=chunk.is_first_of_turn
        ).cpu()
        at_s = (chunk.unit + 1) * UNIT_S
        second.speech.append(Speech(chunk, at_s, call.playback.place(at_s, samples.numel()), samples))


@dataclass(frozen=True, slots=True)
class CallStates:
    """One call's state in each stage."""

    thinker: ThinkerState
    talker: TalkerState
    code2wav: Code2WavState


class Call:
    """One session from its prompt to its end; made by `Engine.open`. opened: its first event."""

    def __init__(self, engine: Engine, states: CallStates, opened: SessionOpened) -> None:
        self.opened = opened
        self.states = states
        self.playback = PlaybackClock()
        self._engine = engine

    @property
    def session_id(self) -> str:
        return self.opened.session_id

    def run_unit(self, heard: UnitInput) -> UnitResult:
        """Live through one second, alone.

        Raises: AudioError, ImageError or InputError for bad input, with the call as before;
        ContextLengthExceeded when the window is off and the context full: the call is over then.
        """
        (result,) = self._engine.run_units([(self, heard)])
        if isinstance(result, AntiphonError):
            raise result
        return result

    def interrupt(self) -> TurnInterrupted | None:
        """Stop the present answer between units, speech at once. Returns None if nothing was being said."""
        return self._engine.interrupt(self)

    def close(self) -> None:
        """Give everything back; idempotent."""
        self._engine.close(self)


@dataclass(slots=True)
class _Second:
    """A second of a call on its way through the stages; the outcome and its cost are there once the thinker is done.

    unspoken: chunks that wait for the vocoder. is_decided: no more will come.
    """

    call: Call
    timer: _Timer
    outcomes: list[tuple[UnitOutcome, float]] = field(default_factory=list)
    talker_ms: float = 0.0
    unspoken: deque[CodecChunk] = field(default_factory=deque)
    speech: list[Speech] = field(default_factory=list)
    is_decided: bool = False

    def result(self) -> UnitResult:
        ((outcome, thinker_ms),) = self.outcomes
        costs = UnitCosts(thinker_ms, self.talker_ms, code2wav_ms=self.timer.lap_ms())
        return UnitResult(outcome, tuple(self.speech), tuple(_events(self.call, outcome, self.speech, costs)))


def _prompt_limits(config: EngineConfig) -> PromptLimits:
    return PromptLimits(config.max_prompt_tokens, config.shares_prompts, config.max_stored_prompt_bytes)


def _cache(config: EngineConfig, num_tokens: int, num_segments: int) -> CacheConfig:
    """Room for all calls of the kind that the engine is made for. num_tokens: that one of them ever holds."""
    one = CacheConfig.for_tokens(num_tokens, num_segments)
    return CacheConfig(config.max_calls * one.num_blocks, one.block_size)


class _Stream(Enum):
    """Independent random streams of one session."""

    TEXT = 0
    CODEC = 1
    SOURCE = 2


def _stream_seed(seed: int, stream: _Stream) -> int:
    return len(_Stream) * seed + stream.value


class _Timer:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_s = clock.now_s()

    def lap_ms(self) -> float:
        """Milliseconds since the last lap."""
        now_s = self._clock.now_s()
        lap_s, self._last_s = now_s - self._last_s, now_s
        return 1000 * lap_s


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Time that a unit spent in each stage; calls that are on their way together share it."""

    thinker_ms: float
    talker_ms: float
    code2wav_ms: float


def _events(call: Call, outcome: UnitOutcome, speech: Sequence[Speech], costs: UnitCosts) -> Iterator[Event]:
    at_s = (outcome.unit + 1) * UNIT_S
    yield UnitDecided(
        unit=outcome.unit,
        at_s=at_s,
        is_listen=outcome.is_listen,
        text=outcome.text,
        token_ids=outcome.token_ids,
        num_context_tokens=outcome.num_context_tokens,
        num_context_blocks=call.states.thinker.mind.memory.context.num_blocks,
        num_retained_units=len(outcome.retained_units),
        thinker_ms=costs.thinker_ms,
        talker_ms=costs.talker_ms,
        code2wav_ms=costs.code2wav_ms,
    )
    if outcome.slide is not None:
        yield WindowSlid(
            unit=outcome.unit,
            at_s=at_s,
            dropped_units=tuple(record.unit for record in outcome.slide.dropped),
            num_dropped_tokens=sum(record.num_tokens for record in outcome.slide.dropped),
            num_context_tokens=outcome.num_context_tokens,
            previous_ids=outcome.previous_ids,
        )
    for said in speech:
        yield from _speech_events(said)


def _speech_events(said: Speech) -> Iterator[Event]:
    chunk, turn = said.chunk, said.chunk.address.turn
    if chunk.is_first_of_turn:
        yield TurnStarted(turn, chunk.unit, said.at_s)
    if said.samples.numel():
        yield SpeechQueued(
            turn=turn,
            unit=chunk.unit,
            at_s=said.at_s,
            start_s=said.start_samples / OUTPUT_RATE_HZ,
            num_codec_tokens=len(chunk.codec_tokens),
            num_samples=said.samples.numel(),
        )
    if chunk.ends_turn:
        yield TurnEnded(turn, chunk.unit, said.at_s)
