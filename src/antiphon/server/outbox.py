"""Messages on their way to one client, bounded in bytes and in time: who does not read loses the connection, alone.

Shown by tests/server/test_outbox.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from antiphon.errors import AntiphonError


class SlowReaderError(AntiphonError):
    """code: for the metrics; the client has been told enough that it did not read."""

    code = "slow_reader"


@dataclass(frozen=True, slots=True)
class OutboxLimits:
    """max_bytes: of messages that wait. max_age_s: of the oldest of them."""

    max_bytes: int
    max_age_s: float


class Outbox:
    """Owns what waits for one client. For one writer and one reader in one event loop."""

    def __init__(self, limits: OutboxLimits) -> None:
        self._limits = limits
        self._waiting: deque[tuple[float, str]] = deque()
        self._num_bytes = 0
        self._has_some = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def put(self, text: str, now_s: float) -> None:
        """Raises: SlowReaderError if too much waits, or has waited for too long."""
        if self._waiting and now_s - self._waiting[0][0] > self._limits.max_age_s:
            raise SlowReaderError(f"messages wait for more than {self._limits.max_age_s} s")
        if self._waiting and self._num_bytes + len(text) > self._limits.max_bytes:
            raise SlowReaderError(f"messages of more than {self._limits.max_bytes} bytes wait")
        self._waiting.append((now_s, text))
        self._num_bytes += len(text)
        self._has_some.set()
        self._is_empty.clear()

    async def next(self) -> str:
        """The oldest message, waiting for one; it waits until `sent`."""
        await self._has_some.wait()
        return self._waiting[0][1]

    def sent(self) -> None:
        """The oldest message has gone."""
        _, text = self._waiting.popleft()
        self._num_bytes -= len(text)
        if not self._waiting:
            self._has_some.clear()
            self._is_empty.set()

    async def flushed(self) -> None:
        """Wait until nothing waits."""
        await self._is_empty.wait()
