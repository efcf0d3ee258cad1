"""What one golden comparison found. Used by every `golden_kinds` module; printed by `golden.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """One compared case. An exact comparison has tolerance 0, and its error counts differences."""

    kind: str
    case: str
    error: float
    tolerance: float

    @property
    def is_pass(self) -> bool:
        return self.error <= self.tolerance  # NaN fails

    def line(self) -> str:
        verdict = "PASS" if self.is_pass else "FAIL"
        return f"{verdict} {self.kind}.{self.case} {self.error:.3g} {self.tolerance:.3g}"


class Comparison:
    """Collects differences of one case; each `close` or `equal` adds a measured pair, the worst ratio is reported."""

    def __init__(self, kind: str, case: str) -> None:
        self.kind = kind
        self.case = case
        self._worst = Outcome(kind, case, 0.0, 0.0)
        self._num_compared = 0

    def close(self, got: Tensor, want: Tensor, tolerance: float) -> None:
        """Largest absolute difference against `tolerance` (absolute); a wrong shape is an infinite error."""
        if tuple(got.shape) != tuple(want.shape):
            error = math.inf
        elif want.numel() == 0:
            error = 0.0
        else:
            error = (got.detach().cpu().double() - want.double()).abs().max().item()
        self._take(Outcome(self.kind, self.case, error, tolerance))

    def equal(self, got: object, want: object) -> None:
        """Exact equality of lists, tensors or scalars; the error is the number of places that differ."""
        self._take(Outcome(self.kind, self.case, float(_num_differences(got, want)), 0.0))

    def outcome(self) -> Outcome:
        """The worst of all pairs: the first failing one, else the one nearest to its tolerance."""
        if not self._num_compared:
            return Outcome(self.kind, self.case, math.inf, 0.0)
        return self._worst

    def _take(self, found: Outcome) -> None:
        self._num_compared += 1
        if not self._worst.is_pass:
            return
        if not found.is_pass or _ratio(found) >= _ratio(self._worst):
            self._worst = found


def _ratio(found: Outcome) -> float:
    return found.error / found.tolerance if found.tolerance else 0.0


def _num_differences(got: object, want: object) -> int:
    if isinstance(got, Tensor):
        got = got.detach().cpu().tolist()
    if isinstance(want, Tensor):
        want = want.tolist()
    if isinstance(got, Sequence) and isinstance(want, Sequence) and not isinstance(got, str):
        pairs = zip(got, want, strict=False)
        return abs(len(got) - len(want)) + sum(_num_differences(a, b) for a, b in pairs)
    return int(got != want)


def scaled(tolerance: float, want: Tensor) -> float:
    """`tolerance` times the largest magnitude of the expected tensor."""
    return tolerance * want.abs().max().item() if want.numel() else tolerance
