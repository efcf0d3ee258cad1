"""Is the server alive, may it be sent calls, and what has it counted: /health, /ready, /metrics. No keys asked.

Shown by tests/server/test_health.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from antiphon.counts import EngineCounts
from antiphon.errors import AntiphonError
from antiphon.server.door import Door
from antiphon.server.metrics import Metrics


class Surveyor:
    """Owns the one question to the engine that is under way; whoever asks meanwhile waits for the same answer.

    An engine that hangs is asked once, however often its health is.
    """

    def __init__(self, survey: Callable[[], Awaitable[EngineCounts]], limit_s: float) -> None:
        self._survey = survey
        self._limit_s = limit_s
        self._asking: asyncio.Task[EngineCounts | str] | None = None

    async def counts(self) -> EngineCounts | str:
        """How things stand in the engine, or why it does not say."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name="survey")
        await asyncio.wait((self._asking,), timeout=self._limit_s)
        if not self._asking.done():
            return f"the engine has not answered within {self._limit_s} s"
        return self._asking.result()

    async def _ask(self) -> EngineCounts | str:
        try:
            return await self._survey()
        except AntiphonError as error:
            return str(error)


@dataclass(frozen=True, slots=True)
class Readiness:
    """reasons: why no call should be sent here; none if one may."""

    num_calls: int
    max_calls: int
    reasons: tuple[str, ...]


def readiness(counts: EngineCounts | str, door: Door, max_calls: int) -> Readiness:
    """counts: of the engine, or why it says nothing. max_calls: those that the engine's caches are sized for."""
    reasons = ["the server is stopping"] if door.closed.is_set() else []
    if isinstance(counts, str):
        return Readiness(door.num_inside, max_calls, (*reasons, counts))
    num_calls = counts.thinker.num_sessions
    if num_calls >= max_calls:
        reasons.append(f"all {max_calls} calls are taken")
    return Readiness(num_calls, max_calls, tuple(reasons))


def operations_routes(surveyor: Surveyor, door: Door, metrics: Metrics, max_calls: int) -> APIRouter:
    """max_calls: as for `readiness`."""
    router = APIRouter()

    async def health() -> JSONResponse:
        counts = await surveyor.counts()
        if isinstance(counts, str):
            return JSONResponse({"status": "failing", "reasons": [counts]}, 503)
        return JSONResponse({"status": "ok", "reasons": []})

    async def ready() -> JSONResponse:
        state = readiness(await surveyor.counts(), door, max_calls)
        calls = {"now": state.num_calls, "most": state.max_calls}
        status = "not_ready" if state.reasons else "ready"
        return JSONResponse(
            {"status": status, "reasons": list(state.reasons), "calls": calls}, 503 if state.reasons else 200
        )

    async def render() -> Response:
        counts = await surveyor.counts()
        return Response(
            metrics.render(None if isinstance(counts, str) else counts), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    for path, answer in (("/health", health), ("/ready", ready), ("/metrics", render)):
        router.add_api_route(path, answer)
    return router
