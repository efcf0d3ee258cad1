"""What the device remembers of each session's draws, so that a drawn id is the next input without the host.

A slot belongs to one session. Its newest draw becomes part of the penalty history when the next one says that it was
taken: a draw that turns out void leaves no trace. Rules are in kernels/sampling. Shown by
tests/stages/test_draw_table.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.draw_history.contract import NewDraws, Remembered
from antiphon.kernels.draw_history.op import draw_history, record_draws
from antiphon.kernels.transfer import upload


@dataclass(frozen=True, slots=True, eq=False)
class DrawSlot:
    """A session's row of the table; known by identity, so that an old one never means its successor."""

    row: int


class Newest(Enum):
    """What a slot's newest draw is to the one after it."""

    TAKEN = "taken"
    VOID = "void"
    """It never happened."""
    FORGOTTEN = "forgotten"
    """Neither it nor anything before it: the history begins anew."""


class DrawPlace(NamedTuple):
    """Where a draw stands. window_tokens: ids that its history remembers. A tuple, because every draw makes one."""

    slot: DrawSlot
    newest: Newest
    window_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """What R draws, no slot twice, come after.

    history: [R, W] int64, the newest ids of each in any order; -1 for empty places.
    last: [R] int64, each slot's newest draw, void ones too.
    places: [4, R] int64, what `DrawTable.past` was given; for `DrawTable.record`.
    """

    history: Tensor
    last: Tensor
    places: Tensor


def place_columns(places: Sequence[DrawPlace]) -> list[list[int]]:
    """Row, window, whether the newest draw was taken, whether the history begins anew: R each."""
    taken, forgotten = Newest.TAKEN, Newest.FORGOTTEN  # to look one up takes as long as three columns of a draw
    newest = [place.newest for place in places]
    return [
        [place.slot.row for place in places],
        [place.window_tokens for place in places],
        [one is taken for one in newest],
        [one is forgotten for one in newest],
    ]


NOBODY = 0
"""The row of the table that is no session's: what is drawn there is padding."""


class DrawTable:
    """Owns the slots and what stands in them. S rows, by doubling, of W history places, the largest window.

    version: grows when the tensors are others than before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.version = 0
        self._held: set[DrawSlot] = set()
        self._free: list[int] = []
        numbers = partial(torch.zeros, dtype=torch.int64, device=device)
        is_recorded = torch.zeros(1, dtype=torch.bool, device=device)
        self._remembered = Remembered(numbers(1), numbers(1), is_recorded, numbers(1), numbers((1, 1)))

    @property
    def num_held(self) -> int:
        return len(self._held)

    def take(self, window_tokens: int) -> DrawSlot:
        """A slot for a session whose history remembers so many ids. Its first draw comes after Newest.FORGOTTEN."""
        num_rows, width = self._remembered.ring.shape
        if not self._free:
            self._resize(2 * num_rows, width)
        self._resize(self._remembered.ring.shape[0], max(width, window_tokens))
        slot = DrawSlot(self._free.pop())
        self._held.add(slot)
        return slot

    def give_back(self, slot: DrawSlot) -> None:
        """End a slot's use, whatever is still on its way; idempotent."""
        if slot in self._held:
            self._held.remove(slot)
            self._free.append(slot.row)

    def reserve(self, num_slots: int, window_tokens: int) -> None:
        """Make room for so many slots with histories so long, so that the tensors stay where they are until then."""
        num_rows, width = self._remembered.ring.shape
        self._resize(max(num_rows, 1 + num_slots), max(width, window_tokens))

    def past(self, columns: Tensor) -> Past:
        """What the next draw of each slot sees; changes nothing. columns: [4, R] int64, `columns` on the device."""
        return Past(*draw_history(self._remembered, columns), columns)

    def record(self, past: Past, ids: Tensor, is_recorded: Tensor, fed: Tensor) -> None:
        """Make these draws the newest of their slots, and what they came after final.

        ids, fed: [R] int64; is_recorded: [R] bool; one per row of `past`.
        """
        record_draws(self._remembered, past.places, NewDraws(ids, is_recorded, fed))

    def fed(self, slots: Sequence[DrawSlot]) -> Tensor:
        """What the network is given for each slot's newest draw, [len(slots)] int64."""
        assert self._held.issuperset(slots), "a slot was given back and is still fed from"
        rows = torch.tensor([slot.row for slot in slots], dtype=torch.int64)
        return self.fed_at(upload(rows, self.device))

    def fed_at(self, rows: Tensor) -> Tensor:
        """The same of rows that are on the device, [R] int64."""
        return self._remembered.fed[rows]

    def recall(self, place: DrawPlace) -> tuple[int, ...]:
        """The history that a slot's next draw would see, oldest first. Waits for the device."""
        row, window, all_of = place.slot.row, place.window_tokens, self._remembered
        ring = all_of.ring[row, :window].tolist()
        num_recorded = 0 if place.newest is Newest.FORGOTTEN else int(all_of.num_recorded[row])
        if place.newest is Newest.TAKEN and all_of.is_recorded[row]:
            ring[num_recorded % window] = int(all_of.last[row])
            num_recorded += 1
        start = num_recorded % window if num_recorded > window else 0
        return tuple((ring[start:] + ring[:start])[: min(num_recorded, window)])

    def restore(self, slot: DrawSlot, history: tuple[int, ...]) -> None:
        """Let a new slot have a history, oldest first, no longer than its window. Its first draw comes after VOID."""
        ids = upload(torch.tensor(history, dtype=torch.int64), self.device)
        self._remembered.ring[slot.row, : len(history)] = ids
        self._remembered.num_recorded[slot.row] = len(history)

    def columns(self, places: Sequence[DrawPlace]) -> list[list[int]]:
        """`place_columns` of slots that are held."""
        assert self._held.issuperset([place.slot for place in places]), "a slot was given back and still draws"
        columns = place_columns(places)
        assert len({*columns[0]}) == len(places), f"a slot draws twice in one step: {columns[0]}"
        return columns

    def _resize(self, num_rows: int, width: int) -> None:
        """Make room; what is there keeps its place, as a session's ring uses the first places of its row only."""
        before = self._remembered
        first, first_width = before.ring.shape
        num_more, num_wider = num_rows - first, width - first_width
        if not num_more and not num_wider:
            return
        self.version += 1
        self._free += range(first, num_rows)
        self._remembered = Remembered(
            last=F.pad(before.last, (0, num_more)),
            fed=F.pad(before.fed, (0, num_more)),
            is_recorded=F.pad(before.is_recorded, (0, num_more)),
            num_recorded=F.pad(before.num_recorded, (0, num_more)),
            ring=F.pad(before.ring, (0, num_wider, 0, num_more)),
        )
