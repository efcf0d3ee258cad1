"""A call on the same server as whatever else goes on there: it must hear what it hears alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from server.raw_client import connected

LIMIT_S = 120.0


class Neighbour:
    """Calls that are always the same, one after the other, in a thread. heard: the sound of each answer."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._key = key
        self._is_enough = threading.Event()
        self._thread = threading.Thread(target=self._call_for_a_while, name="neighbour")
        self.heard: list[bytes] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """When the call that goes on now is over."""
        self._is_enough.set()
        self._thread.join()

    async def call(self) -> bytes:
        async with asyncio.timeout(LIMIT_S), connected(self._url, key=self._key) as client:
            await client.until("session.created")
            await client.says(2)
            await client.send("response.create")
            await client.until("response.done")
            return client.audio()

    def _call_for_a_while(self) -> None:
        while not self._is_enough.is_set():
            self.heard.append(asyncio.run(self.call()))


@contextmanager
def undisturbed_neighbour(url: str, key: str) -> Iterator[None]:
    """Somebody calls all the time inside, and hears what was heard before."""
    neighbour = Neighbour(url, key)
    alone = asyncio.run(neighbour.call())
    assert len(alone) > 48_000, "a second of answer at least"
    neighbour.start()
    try:
        yield
    finally:
        neighbour.stop()
    assert neighbour.heard
    assert set(neighbour.heard) == {alone}
