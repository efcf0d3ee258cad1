"""The sizes that a batch and its rows may have, so that what is prepared per size is little. Pure arithmetic.

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
        """So many sessions as the fewest batches, the largest first; each is filled up to a size of the grid.

        A batch takes little longer than one of half its size, so to fill it up costs less than to run another one.
        """
        full, rest = divmod(number, self.largest)
        return [self.largest] * full + [rest] * (rest > 0)

    def doubt(self, max_sessions: int) -> str:
        """Why the grid saves nothing where at most so many sessions come together; "" if it does."""
        useful = [size for size in self.sizes if 1 < size <= max_sessions]
        if useful or max_sessions == 1:
            return ""
        return (
            f"batch sizes {self.sizes} let {max_sessions} sessions share nothing: they are served one after the other"
        )


@dataclass(frozen=True, slots=True)
class LengthGrid:
    """Lengths that rows are filled up to. sizes: ascending, from above 0. Raises: ConfigError if they are not."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1 or list(self.sizes) != sorted({*self.sizes}):
            raise ConfigError(
                f"lengths must ascend from above 0, so that every row is filled up to the nearest; got {self.sizes}; "
                "give for example 10, 25, 28"
            )

    def doubt(self, usual: int, longest: int) -> str:
        """Why the grid saves nothing for rows of a usual length, or has more than is needed; "" if neither is so."""
        if self.sizes[-1] < usual:
            return f"lengths {self.sizes} hold no row of {usual}: what is usual is not prepared"
        enough = min((size for size in self.sizes if size >= longest), default=longest)
        useless = [size for size in self.sizes if size > enough]
        return f"no row is longer than {longest}: lengths {useless} are prepared for nothing" if useless else ""
