"""`antiphon bench soak --unpaced`: does a call stay bounded? One of any length, as fast as it goes.

Compares its first and last hundred units: time, KV blocks and host memory. The input is noise and silence by turns
from a fixed seed. Shown by tests/test_engine.py and tests/bench/test_commands.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from antiphon.bench.callers import resident_bytes
from antiphon.bench.results import BenchResult, Count, Figure, Quantity, Series, Unit
from antiphon.bench.target import LOUDNESS, Target
from antiphon.config import EngineConfig, SessionConfig
from antiphon.core.events import UnitDecided, UnitFinished, WindowSlid
from antiphon.engine import Engine
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.thinker.state import UnitInput
from antiphon.units import MEL_FRAMES_PER_CODEC_TOKEN, UNIT_SAMPLES

NUM_COMPARED_UNITS = 100
NUM_VOICE_TOKENS = 75


@dataclass(frozen=True, slots=True)
class UnitCost:
    """unit_ms: computing. num_blocks: held by the session after it. host_bytes: resident memory of the process."""

    unit_ms: float
    num_blocks: int
    num_context_tokens: int
    host_bytes: int
    num_slides: int


def run_long_call(target: Target, config: EngineConfig, session: SessionConfig, num_units: int) -> BenchResult:
    """session: with the script by which the call goes, or none. num_units: twice those that are compared at least."""
    with Engine.of(target.source, config, session) as engine:
        costs = tuple(measure(engine, session, num_units))
    last = num_units - NUM_COMPARED_UNITS
    parts = (
        (f"units 0 to {NUM_COMPARED_UNITS - 1}", costs[:NUM_COMPARED_UNITS]),
        (f"units {last} to {num_units - 1}", costs[last:]),
        ("all units", costs),
    )
    times = tuple(float(unit) for unit in range(num_units))
    return BenchResult(
        name="soak-unpaced",
        environment=target.environment(),
        figures=tuple(_busy(case, part) for case, part in parts),
        counts=tuple(count for case, part in parts for count in _counts(case, part)),
        series=(Series("host memory", "1 session", "MB", times, tuple(one.host_bytes / 1e6 for one in costs)),),
        notes=(
            f"One call, unit after unit without a pause; window {session.window}, slide {session.slide.value}. Time is "
            "of the call, a second a unit.",
        ),
    )


def _busy(case: str, costs: Sequence[UnitCost]) -> Figure:
    values = [one.unit_ms for one in costs]
    return Figure.of(Quantity.BUSY_TIME, case, ("units", len(costs)), Unit.MS, [values])


def _counts(case: str, costs: Sequence[UnitCost]) -> Iterator[Count]:
    size = ("units", len(costs))
    yield Count("context tokens at most", case, *size, max(one.num_context_tokens for one in costs))
    yield Count("KV blocks at most", case, *size, max(one.num_blocks for one in costs))
    yield Count("resident memory after", case, *size, costs[-1].host_bytes / 1e6, "MB")
    yield Count("slides", case, *size, sum(one.num_slides for one in costs))


def measure(engine: Engine, session: SessionConfig, num_units: int) -> Iterator[UnitCost]:
    """Run a call of `num_units` seconds."""
    num_frames = NUM_VOICE_TOKENS * MEL_FRAMES_PER_CODEC_TOKEN
    generator = torch.Generator().manual_seed(0)
    mel = torch.randn(num_frames, engine.model.flow.num_mel_bins, generator=generator)
    speaker = torch.randn(engine.model.flow.speaker_size, generator=generator)
    voice = VoicePrompt(tuple(range(NUM_VOICE_TOKENS)), mel, speaker)
    call = engine.open("long", session, torch.empty(0), voice)
    for unit in range(num_units):
        is_loud = unit // 3 % 2
        samples = LOUDNESS * is_loud * torch.randn(UNIT_SAMPLES, generator=generator)
        events = call.run_unit(UnitInput(samples, ())).events
        decided = next(event for event in events if isinstance(event, UnitDecided))
        finished = next(event for event in events if isinstance(event, UnitFinished))
        yield UnitCost(
            unit_ms=finished.thinker_ms + finished.talker_ms + finished.code2wav_ms,
            num_blocks=decided.num_context_blocks,
            num_context_tokens=decided.num_context_tokens,
            host_bytes=resident_bytes(),
            num_slides=sum(isinstance(event, WindowSlid) for event in events),
        )
    call.close()
