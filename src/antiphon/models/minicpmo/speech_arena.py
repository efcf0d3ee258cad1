"""The memory of all sessions' turns in the flow: preallocated, shared out by places, with seats for who may speak.

A place holds one entry in all layers and Euler steps, or one session's convolution tails. A seat reserves what a turn
can come to hold; beyond the seats there is room for the runs that are under way. Not what is retained:
`flow_membership.py`. Test: tests/models/test_speech_arena.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from antiphon.models.minicpmo.flow_cache import FlowShape, Parts, SpeechState, Writing
from antiphon.models.minicpmo.flow_membership import Listed, Retention, max_speech_frames
from antiphon.models.minicpmo.flow_retention import PINNED_FRAMES, PINNED_TOKENS

WINDOW_TOKENS = 25
"""The most tokens of one run of the flow that are remembered; a turn's last run may be longer and is not."""


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """max_speaking: sessions that may be in a turn at once. max_frames: generated ones that they may remember together.

    max_windows: runs of the flow whose entries are written before what they replace is free.
    """

    max_speaking: int
    max_frames: int
    max_windows: int

    @staticmethod
    def for_turns(retention: Retention, voice_frames: int, max_speaking: int, largest_batch: int) -> ArenaSize:
        """For so many turns with voices of this length, or fewer with longer ones.

        A chunk can bring two windows, if the one before it was short; so there is always room for two.
        """
        max_frames = max_speaking * max_speech_frames(retention, voice_frames)
        return ArenaSize(max_speaking, max_frames, max(2, largest_batch))

    def num_bytes(self, shape: FlowShape, dtype: torch.dtype) -> int:
        """dtype: of the entries."""
        sizes = shape.entries.zip(self.num_places(shape), lambda entry, number: number * entry.entry_bytes(dtype))
        return sum(sizes.all) + self.num_tail_places * shape.tails_bytes

    def num_places(self, shape: FlowShape) -> Parts[int]:
        window_frames = shape.frames_of(WINDOW_TOKENS)
        return Parts(
            PINNED_TOKENS * self.max_speaking + WINDOW_TOKENS * self.max_windows,
            PINNED_FRAMES * self.max_speaking + window_frames * self.max_windows,
            self.max_frames + window_frames * self.max_windows,
        )

    @property
    def num_tail_places(self) -> int:
        """Of tails."""
        return self.max_speaking + self.max_windows


class SpeechArena:
    """Owns what all sessions remember of their turns, and who may be in one. Nothing is allocated later."""

    def __init__(
        self, shape: FlowShape, retention: Retention, size: ArenaSize, dtype: torch.dtype, device: torch.device
    ) -> None:
        """dtype: of the entries, also of voices; the convolutions' tails are float32, as the flow is."""
        self.shape = shape
        self.retention = retention
        self.size = size
        self.dtype = dtype
        num_places = size.num_places(shape)
        self.entries = shape.entries.zip(num_places, lambda entry, number: entry.new(number, dtype, device))
        self.tails = shape.tails(size.num_tail_places, device)
        self._free = num_places.map(lambda number: _Free(range(number)))
        self._free_tails = _Free(range(size.num_tail_places))
        self._seats: list[int] = []

    @property
    def num_bytes(self) -> int:
        return sum(entries.num_bytes for entries in self.entries.all) + self.tails.num_bytes

    @property
    def num_seated(self) -> int:
        return len(self._seats)

    @property
    def num_held(self) -> Parts[int]:
        """Places that are not free."""
        return self.entries.zip(self._free, lambda entries, free: entries.keys.shape[1] - free.num_free)

    def seat_frames(self, voice_frames: int) -> int:
        """What a turn with such a voice reserves."""
        return max_speech_frames(self.retention, voice_frames)

    def num_fitting(self, voices_frames: Sequence[int]) -> int:
        """How many turns with such voices, the first ones, can begin now."""
        room, num_seats = self.size.max_frames - sum(self._seats), self.size.max_speaking - len(self._seats)
        wanted = [*accumulate(map(self.seat_frames, voices_frames))]
        return sum(frames <= room for frames in wanted[:num_seats])

    def seat(self, voice_frames: int) -> int:
        """Reserve all that a turn can come to hold; returns what to `unseat`."""
        assert self.num_fitting([voice_frames]), f"no room for a voice of {voice_frames} frames beside {self._seats}"
        self._seats.append(self.seat_frames(voice_frames))
        return self._seats[-1]

    def unseat(self, num_frames: int) -> None:
        self._seats.remove(num_frames)

    def take(self, num_tokens: int) -> Writing:
        """Free places for a run of the flow. Whoever is seated finds them, for as many runs as the size says."""
        num_frames = self.shape.frames_of(num_tokens)
        places = self._free.zip(Parts(num_tokens, num_frames, num_frames), lambda free, number: free.take(number))
        (tail_place,) = self._free_tails.take(1)
        return Writing(places, tail_place, self.tails.of(tail_place))

    def give_back(self, writing: Writing) -> None:
        """Of a run that failed."""
        self._release(writing.places, [writing.tail_place])

    def keep_only(self, kept: SpeechState, gone: Iterable[SpeechState]) -> None:
        """Free what states that are of no use any more hold and `kept` does not."""
        gone = tuple(gone)
        tail_places = {tail_place for state in gone for tail_place in state.tail_places} - {*kept.tail_places}
        held: Parts[set[int]] = Parts(set(), set(), set())
        for state in gone:
            held.zip(state.held, lambda places, own: places.update(own))
        held.zip(kept.held, lambda places, own: places.difference_update(own))
        self._release(held.map(lambda places: tuple(sorted(places))), sorted(tail_places))

    def forget_unread(self, writing: Writing, after: SpeechState) -> None:
        """Free what a run wrote and the state after it does not read."""
        unread = writing.places.zip(after.held, lambda new, read: tuple(sorted({*new} - {*read})))
        self._release(unread, [])

    def _release(self, places: Parts[Listed], tail_places: Sequence[int]) -> None:
        self._free.zip(places, lambda free, own: free.give_back(own))
        self._free_tails.give_back(tail_places)


class _Free:
    """Numbers that nobody holds. First in, first out: what was read last is written last."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._free = deque(numbers)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, number: int) -> tuple[int, ...]:
        assert number <= len(self._free), f"{number} places wanted, {len(self._free)} are free; nobody was seated"
        return tuple(self._free.popleft() for _ in range(number))

    def give_back(self, numbers: Iterable[int]) -> None:
        self._free.extend(numbers)
