"""A clock that stands still until it is set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class HandClock:
    """time_s: what it shows."""

    time_s: float = 0.0

    def now_s(self) -> float:
        return self.time_s
