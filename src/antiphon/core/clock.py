"""Where time comes from: injected, so that tests run in virtual time."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic time; only differences mean something."""
