"""Callers in real time on a tiny engine: what they meet is what is told. No speed is asserted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.bench.duplex import ProfileFlags, run_duplex, run_sweep, run_unit, unit_plans
from antiphon.bench.load import LoadPlan
from antiphon.bench.pacing import Arrival
from antiphon.bench.results import BenchResult, Quantity
from antiphon.bench.script import Talk
from antiphon.bench.target import RANDOM, target
from antiphon.config import Dtype
from antiphon.errors import ConfigError
from antiphon.models.minicpmo.source import ModelSize

TINY = target(RANDOM, ModelSize.TINY, "cpu", Dtype.FLOAT32)
FLAGS = ProfileFlags(profile=None, device="cpu", dtype=None, high=600, low=400)
PLAN = LoadPlan(
    num_sessions=2,
    talk=Talk(0.5, 1, 4),
    arrival=Arrival.STAGGERED,
    num_warm_up_units=0,
    num_units=2,
    num_parts=1,
    lead_ms=300.0,
    max_late_ms=1e6,
    picture_side=0,
    voice_s=1.0,
)


def said(_: str) -> None:
    pass


def counts(result: BenchResult, sessions: int) -> dict[str, float]:
    """Of the loads with so many sessions, each name once."""
    return {count.name: count.value for count in result.counts if count.number == sessions and count.case != "engine"}


def test_windows_are_full_before_the_clock_starts_and_every_unit_is_accounted_for() -> None:
    result = run_duplex(TINY, FLAGS, replace(PLAN, picture_side=60), said)
    told = counts(result, 2)
    assert told["tokens of the shortest context at the start"] >= 400
    assert told["tokens of the longest context at the start"] <= 600
    assert told["units complete"] == 4
    for name in ("units never finished", "units not taken", "sessions refused", "sessions lost", "inputs refused"):
        assert told[name] == 0, name
    quantities = list(dict.fromkeys(figure.quantity for figure in result.figures))
    assert quantities == [
        Quantity.LOADING,
        Quantity.DECIDED,
        Quantity.FIRST_PCM,
        Quantity.FIRST_AUDIO,
        Quantity.STAGE_TIME,
        Quantity.LATENESS,
        Quantity.NEEDED_LEAD,
        Quantity.SENDING,
    ]
    by_quantity = {figure.quantity: figure.summary.num for figure in result.figures}
    assert by_quantity[Quantity.DECIDED] == by_quantity[Quantity.LATENESS] == by_quantity[Quantity.SENDING] == 4
    assert by_quantity[Quantity.FIRST_PCM] == by_quantity[Quantity.FIRST_AUDIO] == 2
    assert told["turns heard"] == 2
    assert len(result.series[0].times_s) == 2


def test_a_unit_is_measured_while_everybody_speaks_staggered_and_together() -> None:
    plans = unit_plans(replace(PLAN, num_units=1), (1, 2))
    result = run_unit(TINY, FLAGS, plans, said)
    spoken = [
        (figure.number, figure.case, figure.summary.num)
        for figure in result.figures
        if figure.quantity is Quantity.FIRST_PCM
    ]
    assert spoken == [
        (size, f"{arrival}, 100% speaking", size) for size in (1, 2) for arrival in ("staggered", "together")
    ]


def test_a_sweep_ends_with_the_load_that_is_too_much() -> None:
    calm = replace(PLAN, num_units=1, max_late_ms=1e6, lead_ms=1e4)
    plans = [replace(calm, num_sessions=number) for number in (1, 2)]
    result = run_sweep(TINY, FLAGS, plans, said)
    assert {count.number for count in result.counts if count.case != "engine"} == {1, 2}
    assert "No load was too much." in result.notes
    # Whatever is finished at all is late by more than that.
    too_much = [replace(plan, max_late_ms=-1.0) for plan in plans]
    result = run_sweep(TINY, FLAGS, too_much, said)
    assert {count.number for count in result.counts if count.case != "engine"} == {1}
    assert any("1 sessions were too much: 1 units were late" in note for note in result.notes)


def test_callers_beyond_the_caches_are_refused_and_counted(tmp_path: Path) -> None:
    # A prompt that is longer than the limit is refused like a call beyond the caches: at its opening.
    profile = tmp_path / "small.yaml"
    profile.write_text("max_prompt_tokens: 10\n")
    result = run_duplex(TINY, replace(FLAGS, profile=profile), replace(PLAN, num_units=1), said)
    told = counts(result, 2)
    assert told["sessions refused"] == 2
    assert told["units never finished"] == told["units complete"] == 2
    assert any("prompt" in note for note in result.notes if note.startswith("Trouble"))


def test_a_profile_decides_what_no_flag_does(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text("window_high_tokens: 500\nwindow_low_tokens: 300\nmax_text_tokens: 5\nmax_calls: 99\n")
    settings = ProfileFlags(profile, None, None, None, 200).settings(10, replace(PLAN, picture_side=448))
    assert (settings.window_high_tokens, settings.window_low_tokens, settings.max_text_tokens) == (500, 200, 5)
    assert (settings.max_calls, settings.max_pictures, settings.thinker_device) == (10, 1, "cpu")
    # Half of ten, a tenth more, and one.
    assert settings.speaking_share == pytest.approx(0.7)


def test_a_load_wants_a_window_of_tokens(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text("window: context\nwindow_max_units: 4\n")
    with pytest.raises(ConfigError, match="basic"):
        run_duplex(TINY, replace(FLAGS, profile=profile), PLAN, said)
