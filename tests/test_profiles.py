"""The profiles in deploy: each loads, and those for a GPU fit into it as their comments say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from antiphon.__main__ import app
from antiphon.inspection import needs_of_engine
from antiphon.models.minicpmo.released import RELEASED
from antiphon.server.for_engine import engine_config, session_config
from antiphon.server.settings import ServerSettings, from_file, resolve

DEPLOY = Path(__file__).parents[1] / "deploy"
MIB = 2**20
MIN_LEFT_MIB = 3000
"""For what steps compute with, their recordings and CUDA itself."""
MEMORY_MIB = {"one-h200": 143_771, "one-h200-float8": 143_771, "one-h100-80gb": 81_559, "one-24gb": 24_564}
"""What the driver says of these GPUs."""


def settings(name: str) -> ServerSettings:
    return resolve(from_file(DEPLOY / f"{name}.yaml")).settings


@pytest.mark.parametrize("name", sorted(path.stem for path in DEPLOY.glob("*.yaml")))
def test_a_profile_is_one_that_an_engine_can_be_made_with(name: str) -> None:
    found = settings(name)
    config, session = engine_config(found), session_config(found, ())
    assert config.max_calls == found.max_calls
    assert session.window.max_prompt_tokens(200, RELEASED.thinker.max_position_tokens) > 0


@pytest.mark.parametrize("name", MEMORY_MIB)
def test_the_arithmetic_beside_a_profile_is_what_its_engine_takes(name: str) -> None:
    found = settings(name)
    needs = needs_of_engine(RELEASED, engine_config(found), session_config(found, ()))
    computed = [need.num_bytes / MIB for need in needs if need.num_bytes and not need.is_on_host]
    comment = (DEPLOY / f"{name}.yaml").read_text()
    first, *lines = [line for line in comment.splitlines() if line.startswith("#")]
    rows = [match for line in lines if (match := re.match(r"#\s+(\d[\d ]*\d)  \S", line))]
    said = [int(row[1].replace(" ", "")) for row in rows]
    assert said[:-1] == pytest.approx(computed, abs=1)
    assert said[-1] == pytest.approx(sum(computed), abs=1)
    assert f"{MEMORY_MIB[name]:,}".replace(",", " ") in first
    left_mib = MEMORY_MIB[name] - said[-1]
    assert f"{left_mib:,} are left".replace(",", " ") in comment
    assert left_mib >= MIN_LEFT_MIB


def test_a_call_more_would_leave_steps_too_little_on_the_smallest() -> None:
    found = settings("one-24gb")
    more = found.model_copy(update={"max_calls": found.max_calls + 2})
    needs = needs_of_engine(RELEASED, engine_config(more), session_config(more, ()))
    assert MEMORY_MIB["one-24gb"] - sum(need.num_bytes for need in needs) / MIB < MIN_LEFT_MIB


def test_inspect_computes_the_same_for_any_profile(tiny_checkpoint: Path) -> None:
    arguments = ["inspect", str(tiny_checkpoint), "--config", str(DEPLOY / "one-24gb.yaml")]
    said = CliRunner().invoke(app, arguments)
    assert said.exit_code == 0, said.output
    rows = [" ".join(line.split()) for line in said.output.splitlines()]
    assert any(row.startswith("thinker KV per 2 calls ") for row in rows)
    assert any(row.startswith("flow per 2 speaking sessions ") for row in rows)
