"""The engine: networks, stages, and calls that run through them. One call advances at a time.

The order within a unit is thinker → talker → code2wav, joined by the messages of `core.messages`. Shown by
tests/test_engine.py and the golden kind endtoend.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
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
    TurnStarted,
    UnitDecided,
    WindowSlid,
)
from antiphon.core.messages import CodecChunk
from antiphon.core.playback import PlaybackClock
from antiphon.core.sampling import Draws
from antiphon.errors import AudioError
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
from antiphon.stages.thinker.stage import ThinkerStage, ThinkerState
from antiphon.stages.thinker.state import ThinkerSession, UnitInput, UnitOutcome
from antiphon.units import OUTPUT_RATE_HZ, UNIT_S, UNIT_SAMPLES

NUM_FLOW_STEPS = 10
"""Euler steps of the vocoder's flow, as the reference's duplex default (REFERENCE 4.7)."""


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
    """Owns the stages. Its cache holds one session, so one call at a time."""

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
        decider = Decider(model.thinker, tokenizer, CacheConfig.for_tokens(window_tokens, num_segments=3))
        self._thinker = ThinkerStage(senses, decider, tokenizer, config.max_prompt_tokens)
        talker_tokens = model.config.talker.max_position_tokens
        self._talker = TalkerStage(model.talker, CacheConfig.for_tokens(talker_tokens, num_segments=1))
        self._synthesizer = MelSynthesizer(model.flow, flow_noise, NUM_FLOW_STEPS)
        self._code2wav = Code2WavStage(self._synthesizer, Vocoder(model.hift))

    @staticmethod
    def load(checkpoint: Checkpoint, tokenizer: TextTokenizer, config: EngineConfig, session: SessionConfig) -> Engine:
        """session: whose need the cache is sized for. Raises: CheckpointError, ConfigError."""
        if config.device.type == "cuda":
            # The vocoder sums up a sine's phase in float32; TF32 convolutions before it would be heard.
            torch.backends.cudnn.allow_tf32 = False
        model = load_model(checkpoint, config.device, config.dtype)
        noise = draw_noise(model.config.flow.num_mel_bins, config.flow_seed, config.device)
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
            prompt_ms=1000 * (self._clock.now_s() - started_s),
        )
        stages = CallStages(self._thinker, self._talker, self._code2wav)
        return Call(stages, CallStates(thinker, talker, self._code2wav.open(voice, noise)), self._clock, opened)


@dataclass(frozen=True, slots=True)
class CallStages:
    """Shared by all calls."""

    thinker: ThinkerStage
    talker: TalkerStage
    code2wav: Code2WavStage


@dataclass(frozen=True, slots=True)
class CallStates:
    """One call's state in each stage."""

    thinker: ThinkerState
    talker: TalkerState
    code2wav: Code2WavState


class Call:
    """One session from its prompt to its end; made by `Engine.open`. opened: its first event."""

    def __init__(self, stages: CallStages, states: CallStates, clock: Clock, opened: SessionOpened) -> None:
        self.opened = opened
        self._stages = stages
        self._states = states
        self._clock = clock
        self._playback = PlaybackClock()

    def run_unit(self, heard: UnitInput) -> UnitResult:
        """Live through one second.

        Raises: AudioError, ImageError or InputError for bad input, with the call as before;
        ContextLengthExceeded when the window is off and the context full: the call is over then.
        """
        if heard.samples.shape != (UNIT_SAMPLES,):
            raise AudioError(f"a unit is {UNIT_SAMPLES} samples of one channel, got shape {tuple(heard.samples.shape)}")
        timer = _Timer(self._clock)
        outcome = self._stages.thinker.run_unit(self._states.thinker, heard)
        thinker_ms = timer.lap_ms()
        at_s = (outcome.unit + 1) * UNIT_S
        chunks = [self._stages.talker.speak(self._states.talker, handoff) for handoff in outcome.handoffs]
        talker_ms = timer.lap_ms()
        speech = tuple(self._speak(chunk, at_s) for chunk in chunks)
        decided = UnitDecided(
            unit=outcome.unit,
            at_s=at_s,
            is_listen=outcome.is_listen,
            text=outcome.text,
            token_ids=outcome.token_ids,
            num_context_tokens=outcome.num_context_tokens,
            num_context_blocks=self._states.thinker.mind.memory.context.num_blocks,
            num_retained_units=len(outcome.retained_units),
            thinker_ms=thinker_ms,
            talker_ms=talker_ms,
            code2wav_ms=timer.lap_ms(),
        )
        events = (decided, *_slide_events(outcome, at_s), *(event for said in speech for event in _speech_events(said)))
        return UnitResult(outcome, speech, events)

    def close(self) -> None:
        """Give everything back; idempotent."""
        self._stages.thinker.close(self._states.thinker)
        self._stages.talker.close(self._states.talker)
        self._stages.code2wav.reset_turn(self._states.code2wav)

    def _speak(self, chunk: CodecChunk, at_s: float) -> Speech:
        samples = self._stages.code2wav.speak(
            self._states.code2wav, chunk.codec_tokens, is_turn_end=chunk.ends_turn, is_flush=chunk.is_first_of_turn
        ).cpu()
        return Speech(chunk, at_s, self._playback.place(at_s, samples.numel()), samples)


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


def _slide_events(outcome: UnitOutcome, at_s: float) -> Iterator[Event]:
    if outcome.slide is not None:
        yield WindowSlid(
            unit=outcome.unit,
            at_s=at_s,
            dropped_units=tuple(record.unit for record in outcome.slide.dropped),
            num_dropped_tokens=sum(record.num_tokens for record in outcome.slide.dropped),
            num_context_tokens=outcome.num_context_tokens,
            previous_ids=outcome.previous_ids,
        )


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
