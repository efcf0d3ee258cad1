"""Every golden folder that ships with the project, through the same code as `python tests/golden.py`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch

from golden import run_folder
from golden_kinds import causal, code2wav
from golden_kinds.company import Company
from golden_kinds.report import Outcome

GOLDEN = Path(__file__).parent / "golden"
IN_COMPANY = [company for company in Company if company is not Company.ALONE]


class GoldenStreams(Protocol):
    KIND: str

    def run(self, folder: Path, company: Company) -> Iterator[Outcome]: ...


@pytest.mark.parametrize("kind", sorted(path.name for path in GOLDEN.iterdir()))
def test_every_case_of_the_golden_folder_passes(kind: str) -> None:
    outcomes = list(run_folder(GOLDEN / kind))
    assert outcomes
    assert {outcome.kind for outcome in outcomes} == {kind}
    assert [outcome.line() for outcome in outcomes if not outcome.is_pass] == []


@pytest.mark.parametrize("company", IN_COMPANY, ids=lambda company: company.name.lower())
@pytest.mark.parametrize("kind", [code2wav, causal], ids=["1.0.5", "1.0.7"])
def test_the_vocoders_golden_streams_pass_in_any_company(kind: GoldenStreams, company: Company) -> None:
    with torch.inference_mode():
        outcomes = list(kind.run(GOLDEN / kind.KIND, company))
    assert outcomes
    assert [outcome.line() for outcome in outcomes if not outcome.is_pass] == []


def test_the_command_prints_a_verdict_per_case_and_succeeds() -> None:
    done = _golden(str(GOLDEN / "vision"))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) > 5
    assert all(line.startswith("PASS vision.") and len(line.split()) == 4 for line in lines)


def test_the_command_fails_on_a_folder_that_is_no_golden_folder(tmp_path: Path) -> None:
    done = _golden(str(tmp_path))
    assert done.returncode == 1
    assert done.stdout.startswith("FAIL ")
    assert str(tmp_path) in done.stdout


def _golden(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(GOLDEN.parent / "golden.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
