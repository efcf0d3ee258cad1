"""The commands, from flags to a folder of results."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from antiphon.__main__ import app
from antiphon.bench.commands import app as bench_app
from antiphon.bench.results import read_results

TINY = ("--size", "tiny", "--device", "cpu", "--repetitions", "1")
TALK = ("--seconds", "1", "--warm-up", "0", "--high", "600", "--low", "400", "--voice-s", "1")
SMALL: dict[str, tuple[str, ...]] = {
    "kernels": (*TINY, "--sessions", "1", "--context", "40", "--step-tokens", "4", "--frames", "10"),
    "slide": (*TINY, "--context", "100", "--slides", "2", "--reprefills", "0"),
    "step": (*TINY, "--sessions", "1", "--mixed", "", "--talkers", "1", "--speakers", "", "--context", "50"),
    "unit": (*TINY, *TALK, "--sessions", "1"),
    "duplex": (*TINY, *TALK, "--sessions", "1", "--turn-units", "1", "--camera", "32"),
    "sweep": (*TINY, *TALK, "--sessions", "1", "--max-late-ms", "1000000"),
    "error": ("--size", "tiny", "--device", "cpu", "--seconds", "1"),
    "cache": ("--size", "tiny", "--device", "cpu", "--context", "100", "--unit-tokens", "10", "--slides", "1"),
    "soak": (*TINY, *TALK, "--sessions", "1"),
}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", SMALL)
def test_a_command_writes_its_result_and_the_report(name: str, tmp_path: Path) -> None:
    said = run(name, *SMALL[name], "--out", str(tmp_path))
    (result,) = read_results(tmp_path)
    assert result.name == name
    assert result.figures
    assert result.environment.model == "random weights, tiny size"
    assert result.environment.dtype == "float32"
    assert str(tmp_path / "report.md") in said.replace("\n", "")
    assert f"## {name}" in (tmp_path / "report.md").read_text()


def test_a_call_of_any_length_is_compared_at_both_ends(tiny_checkpoint: Path, tmp_path: Path) -> None:
    flags = ("--unpaced", "--seconds", "200", "--high", "500", "--low", "400", "--out", str(tmp_path))
    run("soak", "--weights", str(tiny_checkpoint), *flags, "--speaking-share", "0")
    (result,) = read_results(tmp_path)
    assert [figure.case for figure in result.figures] == ["units 0 to 99", "units 100 to 199", "all units"]
    assert result.environment.model == f"weights of {tiny_checkpoint.name}"
    slides = [count.value for count in result.counts if count.name == "slides"]
    assert slides[2] == slides[0] + slides[1] > 0


def test_a_report_can_be_made_again_elsewhere(tmp_path: Path) -> None:
    run("slide", *SMALL["slide"], "--out", str(tmp_path))
    (tmp_path / "report.md").unlink()
    run("report", str(tmp_path))
    assert "## slide" in (tmp_path / "report.md").read_text()


def test_loading_is_a_command_too(tiny_checkpoint: Path, tmp_path: Path) -> None:
    run("load", str(tiny_checkpoint), "--tokenizer", str(tiny_checkpoint), "--size", "tiny", "--out", str(tmp_path))
    (result,) = read_results(tmp_path)
    assert result.name == "load"


def test_every_measurement_is_tried() -> None:
    names = {command.callback.__name__ for command in bench_app.registered_commands if command.callback}
    assert names == {*SMALL, "load", "report"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("slide", "--context", "1,x"), "no list of whole numbers"),
        (("unit", "--size", "tiny", "--sessions", ""), "empty"),
        (("soak", "--size", "tiny", "--unpaced", "--seconds", "10"), "--seconds is 10"),
        (("duplex", "--size", "tiny", "--unit-words", "30"), "spoken tokens"),
        (("kernels", "--device", "tpu"), "tpu"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 1
    assert complaint in result.output.replace("\n", "")
