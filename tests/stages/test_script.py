"""A script in place of decisions: it decides and nothing else; who has none does not notice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import build
from antiphon.config import Dtype, EngineConfig, Placement, SessionConfig, everywhere
from antiphon.core.duplex import DuplexConfig
from antiphon.core.events import UnitDecided
from antiphon.core.window import BasicWindow
from antiphon.engine import Engine
from antiphon.models.minicpmo.source import ModelSize, RandomWeights

SOURCE = RandomWeights(ModelSize.TINY)
FREE = SessionConfig(
    window=BasicWindow(400, 300), duplex=DuplexConfig(num_forced_listens=1), max_pictures=0, max_text_tokens=0
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    config = EngineConfig(everywhere("cpu", Placement.HERE), Dtype.FLOAT32, max_calls=2)
    with Engine.of(SOURCE, config, FREE) as engine:
        yield engine


def script() -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Ids, and the units that they make: one that listens, two that speak, the second of them the turn's last."""
    special = SOURCE.tokenizer().special
    (_, speak, turn_eos), duplex = special.chat.decisions, special.duplex
    words = SOURCE.tokenizer().encode("words")
    units = [(duplex.listen,), (speak, *words, duplex.chunk_eos), (speak, *words, turn_eos, duplex.chunk_eos)]
    return tuple(token for unit in units for token in unit), units


def decided(engine: Engine, sessions: dict[str, SessionConfig], num_units: int) -> dict[str, list[tuple[int, ...]]]:
    """What each session decides, all of them together; their speech is finite."""
    voice = build.voice(engine)
    calls = {name: engine.open(name, session, torch.empty(0), voice) for name, session in sessions.items()}
    units: dict[str, list[tuple[int, ...]]] = {name: [] for name in calls}
    for number in range(num_units):
        results = engine.run_units([(call, build.second(number)) for call in calls.values()])
        for name, result in zip(calls, results, strict=True):
            assert not isinstance(result, Exception), result
            units[name] += [event.token_ids for event in result.events if isinstance(event, UnitDecided)]
            assert all(bool(torch.isfinite(speech.samples).all()) for speech in result.speech)
            if name == "scripted" and any(unit == number for unit in (2, 3, 5, 6)):
                assert sum(speech.samples.numel() for speech in result.speech) > 0
    for call in calls.values():
        call.close()
    return units


def test_units_are_decided_as_the_script_says_over_and_over(engine: Engine) -> None:
    ids, units = script()
    unit_end = SOURCE.tokenizer().special.duplex.unit_end
    forced = (SOURCE.tokenizer().special.duplex.listen,)
    found = decided(engine, {"scripted": replace(FREE, script=ids)}, 7)["scripted"]
    assert found == [(*unit, unit_end) for unit in (forced, *units, *units)]


def test_who_has_no_script_decides_as_without_a_scripted_neighbour(engine: Engine) -> None:
    ids, _ = script()
    alone = decided(engine, {"free": FREE}, 5)["free"]
    beside = decided(engine, {"free": FREE, "scripted": replace(FREE, script=ids)}, 5)
    assert beside["free"] == alone
    assert beside["scripted"] != alone
