"""`antiphon bench unit`, `duplex`, `sweep` and `soak`: paced callers on a real engine, with what came of it.

`unit`: all of them speak, for the time from a unit to its first PCM. `duplex`: a share of them does. `sweep`: more and
more of them, until one unit is late or anything fails. `soak`: for long. Shown by tests/bench/test_duplex.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from antiphon.bench.callers import memory_at, run_load
from antiphon.bench.environment import device_name
from antiphon.bench.load import LoadPlan, LoadRun
from antiphon.bench.pacing import Arrival
from antiphon.bench.results import BenchResult, Count, Figure, Quantity, Unit
from antiphon.bench.script import Talk
from antiphon.bench.target import Target
from antiphon.config import EngineConfig, SessionConfig
from antiphon.engine import Engine
from antiphon.errors import ConfigError
from antiphon.live import LiveEngine
from antiphon.models.minicpmo.tokens import PREVIOUS_MARKER
from antiphon.server.for_engine import engine_config, session_config
from antiphon.server.settings import ServerSettings, from_file, from_flags, resolve
from antiphon.units import CODEC_RATE_HZ

ROOM_TO_SPEAK = 1.1
"""So many times the speakers of the script may speak at once, and one more: one turn ends while the next begins."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ProfileFlags:
    """What a command says over a profile; None is a flag that was not given. profile: a server's options."""

    profile: Path | None
    device: str | None
    dtype: str | None
    high: int | None
    low: int | None

    def settings(self, num_sessions: int, plan: LoadPlan) -> ServerSettings:
        """For so many callers of a load. Raises: ConfigError."""
        share = min(1.0, (math.ceil(ROOM_TO_SPEAK * plan.talk.speaking_share * num_sessions) + 1) / num_sessions)
        flags = {
            "thinker_device": self.device,
            "talker_device": self.device,
            "code2wav_device": self.device,
            "dtype": self.dtype,
            "window_high_tokens": None if self.high is None else str(self.high),
            "window_low_tokens": None if self.low is None else str(self.low),
            "max_calls": str(num_sessions),
            "speaking_share": str(share),
            "max_pictures": str(int(plan.picture_side > 0)),
            "code2wav_voice_s": str(plan.voice_s + 1 / CODEC_RATE_HZ),
        }
        file = {} if self.profile is None else from_file(self.profile)
        return resolve(from_flags(flags), file).settings


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """An engine that serves. session: of each caller, but for its script. loading: what that took."""

    live: LiveEngine
    session: SessionConfig
    loading: tuple[Figure, ...]
    counts: tuple[Count, ...]


@contextmanager
def loaded(target: Target, settings: ServerSettings) -> Iterator[Loaded]:
    """An engine as long as the context lasts. Raises: CheckpointError, ConfigError."""
    marker = target.source.tokenizer().encode(PREVIOUS_MARKER)
    config, session = engine_config(settings), session_config(settings, marker)
    started_s = time.perf_counter()
    with _engine(target, config, session) as engine:
        target.synchronize()
        took_s, memory = time.perf_counter() - started_s, memory_at(0.0, target.device)
        size = ("sessions", settings.max_calls)
        loading = Figure.of(Quantity.LOADING, "engine, caches included", size, Unit.S, [[took_s]])
        counts = (
            Count("host memory after loading", "engine", *size, memory.host_bytes / 1e6, "MB"),
            Count("device memory after loading", "engine", *size, memory.held_bytes / 1e6, "MB"),
        )
        with LiveEngine(engine) as live:
            yield Loaded(live, session, (loading,), counts)


def _engine(target: Target, config: EngineConfig, session: SessionConfig) -> Engine:
    """Raises: ConfigError if its caches do not fit."""
    try:
        return Engine.of(target.source, config, session)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"weights and caches of {config.max_calls} calls do not fit into {device_name(target.device)}; ask for "
            "fewer sessions or shorter windows: antiphon inspect --memory has the arithmetic"
        ) from error


def run_unit(target: Target, flags: ProfileFlags, plans: Sequence[LoadPlan], say: Say) -> BenchResult:
    """One load after the other on one engine, all of them to their ends."""
    runs = []
    most = max(plans, key=lambda plan: plan.num_sessions)
    with loaded(target, flags.settings(most.num_sessions, most)) as engine:
        for number, plan in enumerate(plans):
            say(f"{plan.num_sessions} sessions, {plan.case}")
            runs.append(_run(target, engine, plan, f"load {number}", say))
        return _result("unit", target, runs, engine.loading, engine.counts, ())


def run_duplex(target: Target, flags: ProfileFlags, plan: LoadPlan, say: Say, name: str = "duplex") -> BenchResult:
    """name: of the result; `soak` is the same for longer."""
    with loaded(target, flags.settings(plan.num_sessions, plan)) as engine:
        run = _run(target, engine, plan, "load", say)
        return _result(name, target, [run], engine.loading, engine.counts, ())


def run_sweep(target: Target, flags: ProfileFlags, plans: Sequence[LoadPlan], say: Say) -> BenchResult:
    """plans: with more and more callers. Ends with the first one that is too much."""
    runs: list[LoadRun] = []
    verdict = "No load was too much."
    with loaded(target, flags.settings(plans[-1].num_sessions, plans[-1])) as engine:
        for number, plan in enumerate(plans):
            say(f"{plan.num_sessions} sessions, {plan.case}")
            runs.append(_run(target, engine, plan, f"load {number}", say))
            if runs[-1].failures:
                verdict = f"{plan.num_sessions} sessions were too much: {', '.join(runs[-1].failures)}."
                break
        return _result("sweep", target, runs, engine.loading, engine.counts, (verdict,))


def _run(target: Target, engine: Loaded, plan: LoadPlan, name: str, say: Say) -> LoadRun:
    run = run_load(engine.live, target.source, engine.session, plan, name, target.device)
    say(", ".join(run.failures) or "everything in time")
    return run


def _result(
    name: str,
    target: Target,
    runs: Sequence[LoadRun],
    figures: Sequence[Figure],
    counts: Sequence[Count],
    notes: tuple[str, ...],
) -> BenchResult:
    reasons = dict.fromkeys(text for run in runs for text in run.troubles.reasons)
    plan = runs[0].plan
    pace = (
        f"Units of {plan.talk.unit_words} spoken tokens and turns of {plan.talk.turn_units} units; "
        f"{plan.num_units} s measured after {plan.num_warm_up_units} s, in {plan.num_parts} parts; voice of "
        f"{plan.voice_s:g} s; "
        + (f"a picture of {plan.picture_side} pixels a side every second." if plan.picture_side else "no camera.")
    )
    meaning = (
        "Windows were filled by computed units before the clock started. Every unit is complete at a time that was "
        "fixed before, and all times count from there. A unit is late by what it takes beyond the second until the "
        "next one is complete. The lead that a listener needs is the least with which a turn has no gap."
    )
    return BenchResult(
        name=name,
        environment=target.environment(),
        figures=(*figures, *(figure for run in runs for figure in run.figures())),
        counts=(*counts, *(count for run in runs for count in run.counts())),
        series=tuple(series for run in runs for series in run.series()),
        notes=(meaning, pace, *notes, *(f"Trouble: {reason}" for reason in reasons)),
    )


def unit_plans(base: LoadPlan, num_sessions: Sequence[int]) -> tuple[LoadPlan, ...]:
    """Everybody speaks; as callers come, and all at once."""
    talk = Talk(1.0, base.talk.turn_units, base.talk.unit_words)
    return tuple(
        replace(base, num_sessions=number, talk=talk, arrival=arrival) for number in num_sessions for arrival in Arrival
    )
