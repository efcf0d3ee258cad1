"""What a context remembers of its closed units. Knows nothing of blocks. Shown by tests/core/test_unit_records.py."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """A closed unit in the ring. spoken: the text ids that `previous` takes over when it is dropped."""

    unit: int
    num_tokens: int
    spoken: tuple[int, ...]


def _numbers() -> array[int]:
    return array("q")


@dataclass(slots=True, eq=False)
class UnitRecords:
    """Closed units, oldest first, written to by who made it only. A `UnitRecord` of one is made when it is asked for.

    A call holds thousands of units and drops hundreds at once: in columns, that costs hardly more than to drop one.

    numbers: of the units. token_ends: where each ends, in tokens. words: what they said; word_ends: where each's end.
    num_tokens_before, num_words_before: where the first begins; ends stay as they are when units leave.
    """

    numbers: array[int] = field(default_factory=_numbers)
    token_ends: array[int] = field(default_factory=_numbers)
    words: array[int] = field(default_factory=_numbers)
    word_ends: array[int] = field(default_factory=_numbers)
    num_tokens_before: int = 0
    num_words_before: int = 0

    @staticmethod
    def of(records: Iterable[UnitRecord]) -> UnitRecords:
        units = UnitRecords()
        for record in records:
            units.append(record)
        return units

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[UnitRecord]:
        token_start, word_start = self.num_tokens_before, 0
        for number, token_end, word_end in zip(self.numbers, self.token_ends, self.word_ends, strict=True):
            spoken = tuple(self.words[word_start : word_end - self.num_words_before])
            yield UnitRecord(number, token_end - token_start, spoken)
            token_start, word_start = token_end, word_end - self.num_words_before

    def __eq__(self, other: object) -> bool:
        """Whether they are the same units, whatever stood before them."""
        return isinstance(other, UnitRecords) and [*self] == [*other]

    @property
    def num_tokens(self) -> int:
        """Of all units."""
        return self.num_tokens_of(len(self))

    def num_tokens_of(self, num_units: int) -> int:
        """Of so many oldest units."""
        return self.token_ends[num_units - 1] - self.num_tokens_before if num_units else 0

    def num_units_of(self, num_tokens: int) -> int:
        """The fewest oldest units that have so many tokens, at least 1; all units if even they have fewer."""
        assert num_tokens > 0, f"no unit is needed for {num_tokens} tokens"
        return min(bisect_left(self.token_ends, self.num_tokens_before + num_tokens) + 1, len(self))

    def spoken_by(self, num_units: int) -> tuple[int, ...]:
        """What so many oldest units said."""
        return tuple(self.words[: self._num_words_of(num_units)])

    def append(self, record: UnitRecord) -> None:
        self.token_ends.append(self.num_tokens_before + self.num_tokens + record.num_tokens)
        self.numbers.append(record.unit)
        self.words.extend(record.spoken)
        self.word_ends.append(self.num_words_before + len(self.words))

    def take(self, num_units: int) -> UnitRecords:
        """Remove so many oldest units. Returns them."""
        num_tokens, num_words = self.num_tokens_of(num_units), self._num_words_of(num_units)
        taken = UnitRecords(
            self.numbers[:num_units],
            self.token_ends[:num_units],
            self.words[:num_words],
            self.word_ends[:num_units],
            self.num_tokens_before,
            self.num_words_before,
        )
        del self.numbers[:num_units], self.token_ends[:num_units], self.words[:num_words], self.word_ends[:num_units]
        self.num_tokens_before += num_tokens
        self.num_words_before += num_words
        return taken

    def check(self) -> None:
        """Assert what must hold after every action."""
        for ends, before, num in (
            (self.token_ends, self.num_tokens_before, self.num_tokens),
            (self.word_ends, self.num_words_before, len(self.words)),
        ):
            assert len(ends) == len(self.numbers), f"{len(ends)} ends of {len(self.numbers)} units"
            in_order = [before, *ends]
            assert in_order == sorted(in_order), f"ends fall: {in_order}"
            assert in_order[-1] - before == num, f"{num} are counted, they end at {in_order}"

    def _num_words_of(self, num_units: int) -> int:
        return self.word_ends[num_units - 1] - self.num_words_before if num_units else 0
