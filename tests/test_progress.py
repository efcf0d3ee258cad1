"""How far a preparation is."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from antiphon.progress import follow


def test_a_terminal_sees_a_bar() -> None:
    seen = io.StringIO()
    follow("recording the thinker", iter((2, 1, 0)), Console(file=seen, force_terminal=True, width=80))
    assert "recording the thinker" in seen.getvalue()
    assert "3/3" in seen.getvalue()


def test_a_log_has_a_line_for_each_part(caplog: pytest.LogCaptureFixture) -> None:
    seen = io.StringIO()
    with caplog.at_level(logging.INFO):
        follow("recording the thinker", iter((1, 0)), Console(file=seen, force_terminal=False))
    assert caplog.messages == ["recording the thinker: 1 of 2", "recording the thinker: 2 of 2"]
    assert not seen.getvalue().strip()


def test_nothing_to_do_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        follow("recording the thinker", iter(()), Console(file=io.StringIO(), force_terminal=False))
    assert not caplog.messages
