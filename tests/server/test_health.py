"""What a server says of itself, with an engine that answers, hangs, fails or is full."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import httpx
from fastapi import FastAPI

from antiphon.counts import EngineCounts
from antiphon.errors import EngineStopped
from antiphon.server.auth import Access, KeyLimits
from antiphon.server.door import Door
from antiphon.server.health import Surveyor, operations_routes
from antiphon.server.metrics import Metrics
from fakes.clock import HandClock
from server.calls import counts

MAX_CALLS = 3


@dataclass(slots=True)
class Asked:
    """What the engine is asked. num_asked: how often it was. released: it answers only after that."""

    answer: EngineCounts | EngineStopped
    num_asked: int = 0
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def survey(self) -> EngineCounts:
        self.num_asked += 1
        await self.released.wait()
        if isinstance(self.answer, EngineStopped):
            raise self.answer
        return self.answer


class Site:
    """The operator's routes in front of an engine."""

    def __init__(self, engine: Asked, *, answers: bool) -> None:
        if answers:
            engine.released.set()
        metrics = Metrics(HandClock())
        self.door = Door(Access(None, ()), KeyLimits(MAX_CALLS), metrics)
        app = FastAPI()
        app.include_router(operations_routes(Surveyor(engine.survey, 0.01), self.door, metrics, MAX_CALLS))
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")

    async def get(self, path: str) -> tuple[int, list[str]]:
        """Status and reasons."""
        answer = await self._client.get(path)
        return answer.status_code, answer.json()["reasons"]

    async def metrics(self) -> str:
        return (await self._client.get("/metrics")).text


def test_a_server_with_room_is_ready() -> None:
    async def look() -> None:
        site = Site(Asked(counts(MAX_CALLS - 1)), answers=True)
        assert await site.get("/health") == (200, [])
        assert await site.get("/ready") == (200, [])

    asyncio.run(look())


def test_a_full_server_is_healthy_and_not_ready() -> None:
    async def look() -> None:
        site = Site(Asked(counts(MAX_CALLS)), answers=True)
        assert await site.get("/health") == (200, [])
        assert await site.get("/ready") == (503, ["all 3 calls are taken"])

    asyncio.run(look())


def test_a_stopping_server_is_healthy_and_not_ready() -> None:
    async def look() -> None:
        site = Site(Asked(counts(0)), answers=True)
        site.door.closed.set()
        assert await site.get("/health") == (200, [])
        assert await site.get("/ready") == (503, ["the server is stopping"])

    asyncio.run(look())


def test_an_engine_that_stopped_says_why() -> None:
    async def look() -> None:
        site = Site(Asked(EngineStopped("the engine was stopped")), answers=True)
        assert await site.get("/health") == (503, ["the engine was stopped"])
        assert await site.get("/ready") == (503, ["the engine was stopped"])

    asyncio.run(look())


def test_an_engine_that_hangs_is_asked_once_and_found_out_each_time() -> None:
    async def look() -> None:
        engine = Asked(counts(0))
        site = Site(engine, answers=False)
        late = (503, ["the engine has not answered within 0.01 s"])
        assert await site.get("/health") == late
        assert await site.get("/ready") == late
        assert "antiphon_engine_up 0.0" in await site.metrics()
        assert engine.num_asked == 1
        engine.released.set()
        assert await site.get("/health") == (200, [])
        assert "antiphon_engine_up 1.0" in await site.metrics()

    asyncio.run(look())
