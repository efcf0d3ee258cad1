"""Recording without a GPU: what is recorded runs again each time, with what it was told first, in the same places."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


class Rerun:
    """An `antiphon.models.minicpmo.captured.Recorder`."""

    def record(self, run: Callable[[], ResultT]) -> Callable[[], ResultT]:
        return run
