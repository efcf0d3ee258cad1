"""The programs on the first page, pasted and run against a server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from antiphon.server.app import build_app
from antiphon.server.run import loaded
from server.servers import RunningServer, running_server, tiny_settings

ROOT = Path(__file__).parents[2]
PROGRAMS = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
THE_DEMOS = "127.0.0.1:8000"


@pytest.fixture(scope="module")
def running(tiny_checkpoint: Path) -> Iterator[RunningServer]:
    """With the windows that the demo has."""
    settings = tiny_settings(tiny_checkpoint, window_high_tokens="8000", window_low_tokens="6000")
    with loaded(settings, lambda _: None) as engine, running_server(settings, engine, build_app) as running:
        yield running


def paste(program: str, running: RunningServer, folder: Path) -> str:
    """Run it where the examples are. Returns what it printed."""
    (folder / "examples").symlink_to(ROOT / "examples")
    program = program.replace(THE_DEMOS, running.url.removeprefix("http://"))
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def program_with(text: str) -> str:
    (program,) = (program for program in PROGRAMS if text in program)
    assert THE_DEMOS in program
    return program


def test_there_are_four_ways_to_talk_to_it() -> None:
    assert len(PROGRAMS) == 4


def test_the_official_client_gets_an_answer_in_a_file(running: RunningServer, tmp_path: Path) -> None:
    paste(program_with("realtime.connect"), running, tmp_path)
    answer, rate_hz = soundfile.read(tmp_path / "answer.wav")
    assert rate_hz == 24_000
    assert len(answer) > rate_hz / 2
    assert np.abs(answer).max() > 0.01


def test_a_client_of_the_duplex_protocol_reads_numbered_events(running: RunningServer, tmp_path: Path) -> None:
    lines = paste(program_with("/v1/duplex"), running, tmp_path).splitlines()
    assert [int(line.split()[0]) for line in lines] == [*range(1, len(lines) + 1)]
    assert lines[0].endswith("session.created")
    assert lines[-1].endswith("response.done")
    assert any(line.endswith("response.output_audio.delta") for line in lines)


def test_a_client_of_the_demo_is_told_about_every_second(running: RunningServer, tmp_path: Path) -> None:
    lines = paste(program_with("/ws/duplex/"), running, tmp_path).splitlines()
    assert len(lines) == 2 + 5
    assert lines[2] == "listens"


def test_a_question_in_a_file_is_answered_in_a_file(running: RunningServer, tmp_path: Path) -> None:
    assert paste(program_with("chat.completions"), running, tmp_path).strip()
    answer, rate_hz = soundfile.read(tmp_path / "answer.wav")
    assert rate_hz == 24_000
    assert np.abs(answer).max() > 0.01
