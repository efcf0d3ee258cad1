"""Who is inside, and how the door is closed."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers

from antiphon.server.auth import DRAINING, KEY_IS_BUSY, NO_KEY, Access, ApiKeys, KeyLimits
from antiphon.server.door import Door
from antiphon.server.metrics import Metrics
from fakes.clock import HandClock

NOBODY = Headers({})


def door(keys: ApiKeys | None = None) -> tuple[Door, Metrics]:
    metrics = Metrics(HandClock())
    return Door(Access(keys, ()), KeyLimits(2), metrics), metrics


def test_who_comes_in_is_inside_until_it_leaves() -> None:
    async def come_and_go() -> None:
        entrance, _ = door()
        await entrance.wait_until_empty()
        with entrance.enter(NOBODY) as first, entrance.enter(NOBODY) as second:
            assert (first, second, entrance.num_inside) == (None, None, 2)
            waiting = asyncio.create_task(entrance.wait_until_empty())
            await asyncio.wait((waiting,), timeout=0)
            assert not waiting.done()
        await waiting
        assert entrance.num_inside == 0

    asyncio.run(come_and_go())


def test_whoever_is_refused_is_not_inside_and_is_counted() -> None:
    async def be_refused() -> None:
        entrance, metrics = door()
        with entrance.enter(NOBODY), entrance.enter(NOBODY), entrance.enter(NOBODY) as third:
            assert (third, entrance.num_inside) == (KEY_IS_BUSY, 2)
            entrance.closed.set()
            with entrance.enter(NOBODY) as fourth:
                assert (fourth, entrance.num_inside) == (DRAINING, 2)
        locked, _ = door(ApiKeys(frozenset()))
        # Who has no key is not told how the server stands.
        locked.closed.set()
        with locked.enter(NOBODY) as stranger:
            assert stranger is NO_KEY
        text = metrics.render(None).decode()
        assert 'antiphon_refusals_total{code="too_many_calls"} 1.0' in text
        assert 'antiphon_refusals_total{code="draining"} 1.0' in text

    asyncio.run(be_refused())
