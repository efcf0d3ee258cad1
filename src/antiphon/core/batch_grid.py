"""The sizes that a batch may have, so that what is prepared per size is little. Pure arithmetic.

Shown by tests/core/test_batch_grid.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchGrid:
    """sizes: ascending, from 1 on. Raises: ConfigError if they are not."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.sizes[:1] != (1,) or list(self.sizes) != sorted({*self.sizes}):
            raise ConfigError(
                f"batch sizes must ascend from 1, so that every number of sessions can be split; got {self.sizes}; "
                "give for example 1, 2, 4, 8"
            )

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def split(self, number: int) -> list[int]:
        """So many sessions as batches of the grid's sizes, the largest first."""
        batches: list[int] = []
        for size in reversed(self.sizes):
            batches += [size] * (number // size)
            number %= size
        return batches

    def doubt(self, max_sessions: int) -> str:
        """Why the grid saves nothing where at most so many sessions come together; "" if it does."""
        useful = [size for size in self.sizes if 1 < size <= max_sessions]
        if useful or max_sessions == 1:
            return ""
        return (
            f"batch sizes {self.sizes} let {max_sessions} sessions share nothing: they are served one after the other"
        )
