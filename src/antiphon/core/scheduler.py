"""Which rows a step takes. Pure: the same rows and budget give the same step.

Knows tokens and deadlines; no model, no session state. Shown by tests/core/test_scheduler.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """A row that could run now.

    deadline_s: when the audio that depends on it must exist, on the engine's clock.
    order: breaks ties; earlier first.
    """

    num_tokens: int
    deadline_s: float
    order: int


def schedule(waiting: Sequence[Waiting], max_tokens: int) -> tuple[int, ...]:
    """Indices of the rows that run in the next step, most urgent first.

    A row that does not fit into what is left of the budget waits, and smaller ones behind it may go before it; the
    most urgent row always runs, whatever its size, so that none waits for ever.
    """
    by_urgency = sorted(range(len(waiting)), key=lambda i: (waiting[i].deadline_s, waiting[i].order))
    chosen: list[int] = []
    num_left = max_tokens
    for index in by_urgency:
        if not chosen or waiting[index].num_tokens <= num_left:
            chosen.append(index)
            num_left -= waiting[index].num_tokens
    return tuple(chosen)
