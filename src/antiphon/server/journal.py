"""What a session told its client, for a client that comes back: numbered, and bounded in bytes and in time.

Shown by tests/server/test_journal.py.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JournalConfig:
    max_bytes: int = 8 * 2**20
    max_age_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Told:
    """seq: numbers what a session tells, from 1. text: as it went over the wire."""

    seq: int
    at_s: float
    text: str


class Journal:
    """Owns the newest things that one session told."""

    def __init__(self, config: JournalConfig) -> None:
        self._config = config
        self._told: deque[Told] = deque()
        self._num_bytes = 0
        self.last_seq = 0

    def next_seq(self) -> int:
        """The number of what is told next; it must be told then."""
        return self.last_seq + 1

    def tell(self, text: str, now_s: float) -> None:
        self.last_seq += 1
        self._told.append(Told(self.last_seq, now_s, text))
        self._num_bytes += len(text)
        while self._told and (
            self._num_bytes > self._config.max_bytes or now_s - self._told[0].at_s > self._config.max_age_s
        ):
            self._num_bytes -= len(self._told.popleft().text)

    def after(self, seq: int) -> tuple[Told, ...] | None:
        """All that was told after `seq`, or None if some of it is gone or `seq` was never told."""
        if not 0 <= seq <= self.last_seq:
            return None
        kept = tuple(told for told in self._told if told.seq > seq)
        return kept if len(kept) == self.last_seq - seq else None

    def forget(self, seq: int) -> None:
        """The client has all up to `seq`."""
        while self._told and self._told[0].seq <= seq:
            self._num_bytes -= len(self._told.popleft().text)


class ResumeToken:
    """What a client shows to come back; only its digest is kept, and every use makes a new one."""

    def __init__(self) -> None:
        self._digest = b""

    def rotate(self) -> str:
        """A new token; the one before it is void."""
        token = secrets.token_urlsafe(32)
        self._digest = _digest(token)
        return token

    def fits(self, token: str) -> bool:
        return hmac.compare_digest(self._digest, _digest(token))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
