"""What a call's listener is told: events, and speech with its samples; and how events are made of stages' answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from antiphon.core.events import (
    Event,
    SessionOpened,
    SpeechQueued,
    TurnEnded,
    TurnStarted,
    TurnText,
    UnitDecided,
    UnitFinished,
    WindowSlid,
)
from antiphon.core.messages import CodecChunk
from antiphon.stages.thinker.state import PromptReady, UnitOutcome
from antiphon.units import OUTPUT_RATE_HZ, UNIT_S


@dataclass(frozen=True, slots=True, eq=False)
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


Happening = Event | Speech


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Time that a unit spent in each stage, waiting for others included.

    Not the end of a turn behind its last second, which gives way to what others wait for.
    """

    thinker_ms: float = 0.0
    talker_ms: float = 0.0
    code2wav_ms: float = 0.0


def opening_event(session_id: str, prompt: PromptReady, took_s: float) -> SessionOpened:
    return SessionOpened(
        session_id=session_id,
        num_prompt_tokens=prompt.num_tokens,
        max_context_tokens=prompt.max_tokens,
        is_prompt_hit=prompt.is_hit,
        prompt_ms=1000 * took_s,
    )


def decision_events(outcome: UnitOutcome) -> Iterator[Event]:
    at_s = (outcome.unit + 1) * UNIT_S
    yield UnitDecided(
        unit=outcome.unit,
        at_s=at_s,
        is_listen=outcome.is_listen,
        said=tuple(
            TurnText(handoff.address.turn, text, handoff.ends_turn)
            for handoff, text in zip(outcome.handoffs, outcome.texts, strict=True)
        ),
        token_ids=outcome.token_ids,
        num_context_tokens=outcome.num_context_tokens,
        num_context_blocks=outcome.num_context_blocks,
        num_retained_units=len(outcome.retained_units),
    )
    if outcome.slide is not None:
        yield WindowSlid(
            unit=outcome.unit,
            at_s=at_s,
            dropped_units=tuple(outcome.slide.dropped.numbers),
            num_dropped_tokens=outcome.slide.dropped.num_tokens,
            num_context_tokens=outcome.num_context_tokens,
            previous_ids=outcome.previous_ids,
        )


def speech_events(said: Speech) -> Iterator[Event]:
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


def finish_event(outcome: UnitOutcome, times: StageTimes) -> UnitFinished:
    at_s = (outcome.unit + 1) * UNIT_S
    return UnitFinished(outcome.unit, at_s, times.thinker_ms, times.talker_ms, times.code2wav_ms)
