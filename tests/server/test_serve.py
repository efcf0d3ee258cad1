"""`antiphon serve` as an operator uses it: a process with flags, a file, variables and signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from antiphon.__main__ import app
from antiphon.console import EXIT_BAD_INPUT
from antiphon.server.settings import flag, options

LAPTOP = Path(__file__).parents[2] / "deploy" / "laptop-cpu.yaml"
SOURCES = Path(__file__).parents[2] / "src"


@contextmanager
def served(folder: Path, *flags: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A process that listens, its address and what it printed so far."""
    log = folder / "log"
    command = [sys.executable, "-m", "antiphon", "serve", "--config", str(LAPTOP), "--port", "0", *flags]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), **variables}  # noqa: TID251 - a process needs one
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        assert process.stdout is not None, "its output is a pipe"
        try:
            printed = []
            for line in process.stdout:
                printed.append(line.rstrip())
                if found := re.match(r"listening at (\S+)", line):
                    break
            else:
                raise AssertionError(f"it never listened: {printed} {log.read_text()}")
            yield process, found[1], printed
        finally:
            process.kill()


def test_a_server_says_what_it_runs_with_and_ends_with_status_0(tiny_checkpoint: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("the secret key\n")
    flags = ("--model", str(tiny_checkpoint), "--api-keys-file", str(keys), "--log-format", "json")
    with served(tmp_path, *flags, ANTIPHON_MAX_CALLS="2") as (process, url, printed):
        assert httpx.get(f"{url}/ready").json()["calls"] == {"now": 0, "most": 2}
        process.send_signal(signal.SIGTERM)
        printed += [line.rstrip() for line in process.stdout or ()]
        assert process.wait(timeout=60) == 0
    assert f"model = {tiny_checkpoint}  (flag --model)" in printed
    assert "max_calls = 2  (environment variable ANTIPHON_MAX_CALLS)" in printed
    assert f"window_high_tokens = 400  (window_high_tokens in file {LAPTOP})" in printed
    assert [line.split()[0] for line in printed[len(options()) :]] == [
        "server_vad",
        "opening",
        "THE",
        "loading",
        "loaded",
        "listening",
        "stopping:",
    ]
    everything = "\n".join(printed) + (tmp_path / "log").read_text()
    assert "the secret key" not in everything
    assert all(line.startswith("{") for line in (tmp_path / "log").read_text().splitlines())


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--port", "x"), "flag --port is 'x'"),
        (("--config", "none.yaml"), "none.yaml cannot be read"),
        (("--model", "none", "--port", "0"), "none"),
    ],
)
def test_what_is_wrong_ends_the_command_in_one_line(flags: tuple[str, ...], complaint: str) -> None:
    result = CliRunner().invoke(app, ["serve", *flags])
    assert result.exit_code == EXIT_BAD_INPUT
    (line,) = result.stderr.splitlines()
    assert line.startswith("antiphon: ")
    assert complaint in line


def test_a_variable_that_is_no_option_is_refused() -> None:
    result = CliRunner(env={"ANTIPHON_MAX_CALS": "2"}).invoke(app, ["serve"])
    assert result.exit_code == EXIT_BAD_INPUT
    assert "ANTIPHON_MAX_CALS is no option; did you mean max_calls?" in result.stderr


def test_every_option_has_a_flag_with_its_description() -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["serve", "--help"]).output
    assert [option for option in options() if f"{flag(option)} " not in shown] == []
    assert "Part of them that may speak at the same time." in shown
