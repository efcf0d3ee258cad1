"""What waits for a client that may be slow."""

from __future__ import annotations

import asyncio

import pytest

from antiphon.server.outbox import Outbox, OutboxLimits, SlowReaderError

LIMITS = OutboxLimits(max_bytes=10, max_age_s=2.0)


def test_messages_leave_in_order_and_room_comes_back() -> None:
    async def main() -> list[str]:
        outbox, got = Outbox(LIMITS), []
        for number in range(20):
            outbox.put(f"{number:05}", now_s=0.0)
            got.append(await outbox.next())
            outbox.sent()
        await outbox.flushed()
        return got

    assert asyncio.run(main()) == [f"{number:05}" for number in range(20)]


def test_too_many_bytes_and_too_long_a_wait_are_the_end() -> None:
    outbox = Outbox(LIMITS)
    outbox.put("x" * 50, now_s=0.0)  # one message may be as large as it is
    with pytest.raises(SlowReaderError, match="10 bytes"):
        outbox.put("x", now_s=1.0)
    late = Outbox(LIMITS)
    late.put("x", now_s=0.0)
    late.put("x", now_s=2.0)
    with pytest.raises(SlowReaderError, match=r"2\.0 s"):
        late.put("x", now_s=2.5)


def test_a_message_that_is_being_sent_still_counts() -> None:
    async def main() -> None:
        outbox = Outbox(LIMITS)
        outbox.put("x" * 8, now_s=0.0)
        await outbox.next()
        with pytest.raises(SlowReaderError):
            outbox.put("x" * 8, now_s=0.0)

    asyncio.run(main())
