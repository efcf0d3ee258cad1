"""Exactly once and in order: which messages of one session's stream a stage obeys. Pure; moves no work.

A repeat is ignored, an old epoch is dropped, a gap makes the rest of its epoch void: whoever watches then starts a
new epoch, so that a broken stream costs one answer and nothing of it mixes into the next. Shown by
tests/core/test_inlet.py.
"""

from __future__ import annotations

from antiphon.core.messages import Address, Fault


class Inlet:
    """Owned by one stage for one session. Neither `epoch` nor the number expected in it ever falls."""

    def __init__(self) -> None:
        self.epoch = 0
        self._next_seq = 0
        self._is_broken = False

    def judge(self, address: Address) -> Fault | None:
        """Take note of a message; None to obey it. One of a later epoch must be announced by `enter` first."""
        if address.epoch < self.epoch:
            return Fault.STALE
        assert address.epoch == self.epoch, f"{address} comes before its epoch; this one is {self.epoch}"
        if address.seq < self._next_seq:
            return Fault.REPEATED
        is_gap = address.seq > self._next_seq
        self._next_seq = address.seq + 1
        if self._is_broken:
            return Fault.VOID
        if is_gap:
            self._is_broken = True
            return Fault.GAP
        return None

    def enter(self, epoch: int) -> bool:
        """Begin an epoch. Returns whether it is a new one."""
        if epoch <= self.epoch:
            return False
        self.epoch, self._next_seq, self._is_broken = epoch, 0, False
        return True

    def break_off(self) -> None:
        """What comes in this epoch from now on is void."""
        self._is_broken = True
