"""Who is inside: one way in for every call, whichever protocol it speaks, and the end of that when the server stops.

Not a queue: who cannot come in now is told so. Shown by tests/server/test_door.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers

from antiphon.server.auth import DRAINING, Access, KeyLimits, Refusal
from antiphon.server.metrics import Metrics


class Door:
    """Owns the count of who is inside. For one event loop."""

    def __init__(self, access: Access, limits: KeyLimits, metrics: Metrics) -> None:
        self._access = access
        self._limits = limits
        self._metrics = metrics
        self._num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.closed = asyncio.Event()
        """No more calls come in."""

    @contextmanager
    def enter(self, headers: Headers) -> Iterator[Refusal | None]:
        """One call, inside as long as the context lasts, or why it may not come in. Refusals are counted here."""
        caller = self.identify(headers)
        if isinstance(caller, Refusal):
            yield caller
            return
        if self.closed.is_set():
            yield self._refused(DRAINING)
            return
        with self._limits.one_call(caller) as refusal:
            if refusal is not None:
                yield self._refused(refusal)
                return
            self._num_inside += 1
            self._is_empty.clear()
            try:
                yield None
            finally:
                self._num_inside -= 1
                if not self._num_inside:
                    self._is_empty.set()

    def identify(self, headers: Headers) -> str | Refusal:
        """The caller's name, of one who needs no place. Refusals are counted here."""
        caller = self._access.identify(headers)
        return self._refused(caller) if isinstance(caller, Refusal) else caller

    async def wait_until_empty(self) -> None:
        await self._is_empty.wait()

    @property
    def num_inside(self) -> int:
        return self._num_inside

    def _refused(self, refusal: Refusal) -> Refusal:
        self._metrics.count_refusal(refusal.code)
        return refusal
