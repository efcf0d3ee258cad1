"""Which units a session keeps: configuration, policies, plans. Moves nothing; `Context.slide` applies a plan.

Token counts are total context lengths. Policies are decided after a unit is closed, as the reference does
(REFERENCE 5). Shown by tests/core/test_window.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from antiphon.core.unit_records import UnitRecords
from antiphon.errors import ConfigError


class SlideMode(Enum):
    """How dropped tokens leave the cache. The first two compute what the reference computes."""

    ROTATE_QUERY = "rotate_query"
    """Keys stay as written; queries are rotated by the session's shift as well. Nothing moves on the device."""
    ROTATE_KEYS = "rotate_keys"
    """Surviving ring keys are rotated in place. For attention back ends that know one origin only."""
    REPREFILL = "reprefill"
    """The surviving units are computed anew from their embeddings: the semantics of a shorter history."""


@dataclass(frozen=True, slots=True)
class SlidePlan:
    """Drop the `num_dropped_units` oldest units; afterwards the `previous` text is exactly `previous`."""

    num_dropped_units: int
    previous: tuple[int, ...]


class WindowPolicy(Protocol):
    """Chosen once per session. keeps_previous: dropped words move in front of the suffix, so it has its own segment."""

    @property
    def keeps_previous(self) -> bool: ...

    def plan(self, num_tokens: int, units: UnitRecords, previous: tuple[int, ...]) -> SlidePlan | None:
        """What to drop now, or None for nothing.

        num_tokens: whole context.
        units: closed units in the ring, oldest first.
        previous: present `previous` ids, marker included; empty before the first.
        """

    def taken_over(self, previous: tuple[int, ...]) -> tuple[int, ...]:
        """What it keeps of the `previous` text of a session that had another window until now."""

    def peak_tokens(self, num_prompt_tokens: int, max_unit_tokens: int) -> int:
        """The most tokens that a context with this prompt ever holds, the unit in progress included."""

    def max_prompt_tokens(self, max_unit_tokens: int, max_context_tokens: int) -> int:
        """The longest prompt that leaves room for units in a context of `max_context_tokens`; negative if none does."""


@dataclass(frozen=True, slots=True)
class OffWindow:
    """Keeps everything; the session ends when the context reaches `max_tokens`."""

    max_tokens: int

    def __str__(self) -> str:
        return f"off (ends at {self.max_tokens} tokens)"

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"the context limit must be positive, got {self.max_tokens} tokens")

    @property
    def keeps_previous(self) -> bool:
        return False

    def plan(self, num_tokens: int, units: UnitRecords, previous: tuple[int, ...]) -> SlidePlan | None:
        return None

    def taken_over(self, previous: tuple[int, ...]) -> tuple[int, ...]:
        return ()

    def peak_tokens(self, num_prompt_tokens: int, max_unit_tokens: int) -> int:
        return self.max_tokens

    def max_prompt_tokens(self, max_unit_tokens: int, max_context_tokens: int) -> int:
        return min(self.max_tokens, max_context_tokens) - max_unit_tokens


@dataclass(frozen=True, slots=True)
class BasicWindow:
    """Over `high_tokens`: whole oldest units go until at most `low_tokens` or no unit is left (REFERENCE 5.2)."""

    high_tokens: int
    low_tokens: int

    def __str__(self) -> str:
        return f"basic (over {self.high_tokens} tokens down to {self.low_tokens})"

    def __post_init__(self) -> None:
        if not 0 <= self.low_tokens < self.high_tokens:
            raise ConfigError(
                f"the window's low limit ({self.low_tokens} tokens) must be below its high limit "
                f"({self.high_tokens} tokens) and not negative"
            )

    @property
    def keeps_previous(self) -> bool:
        return False

    def plan(self, num_tokens: int, units: UnitRecords, previous: tuple[int, ...]) -> SlidePlan | None:
        if num_tokens <= self.high_tokens:
            return None
        num_dropped = units.num_units_of(num_tokens - self.low_tokens)
        return SlidePlan(num_dropped, previous) if num_dropped else None

    def taken_over(self, previous: tuple[int, ...]) -> tuple[int, ...]:
        return ()

    def peak_tokens(self, num_prompt_tokens: int, max_unit_tokens: int) -> int:
        return self.high_tokens + max_unit_tokens

    def max_prompt_tokens(self, max_unit_tokens: int, max_context_tokens: int) -> int:
        return min(self.high_tokens, max_context_tokens - max_unit_tokens)


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """Over `max_units`: the oldest unit goes, its words move to `previous` (REFERENCE 5.3).

    previous_max_tokens: newest ids of `previous` that are kept, the marker not counted.
    marker: ids of the text in front of them.
    """

    max_units: int
    previous_max_tokens: int
    marker: tuple[int, ...]

    def __str__(self) -> str:
        return f"context ({self.max_units} units and {self.previous_max_tokens} tokens of earlier words)"

    def __post_init__(self) -> None:
        if self.max_units < 1:
            raise ConfigError(f"a context window keeps at least 1 unit, got {self.max_units}")
        if self.previous_max_tokens < 0:
            raise ConfigError(f"previous_max_tokens must not be negative, got {self.previous_max_tokens}")

    @property
    def keeps_previous(self) -> bool:
        return True

    def plan(self, num_tokens: int, units: UnitRecords, previous: tuple[int, ...]) -> SlidePlan | None:
        num_dropped = len(units) - self.max_units
        if num_dropped <= 0:
            return None
        spoken = units.spoken_by(num_dropped)
        if spoken:
            previous = self._newest([*previous[len(self.marker) :], *spoken])
        return SlidePlan(num_dropped, previous)

    def taken_over(self, previous: tuple[int, ...]) -> tuple[int, ...]:
        return self._newest(previous[len(self.marker) :]) if previous else ()

    def _newest(self, words: Sequence[int]) -> tuple[int, ...]:
        first_kept = max(0, len(words) - self.previous_max_tokens)
        return (*self.marker, *words[first_kept:])

    def peak_tokens(self, num_prompt_tokens: int, max_unit_tokens: int) -> int:
        num_previous_tokens = len(self.marker) + self.previous_max_tokens
        return num_prompt_tokens + num_previous_tokens + (self.max_units + 1) * max_unit_tokens

    def max_prompt_tokens(self, max_unit_tokens: int, max_context_tokens: int) -> int:
        return max_context_tokens - self.peak_tokens(0, max_unit_tokens)
