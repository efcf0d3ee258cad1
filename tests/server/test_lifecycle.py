"""The checker of sessions finds whatever is missing, comes twice, or comes too early."""

from __future__ import annotations

import pytest

from server.lifecycle import check, session
from server.raw_client import Event, RawClient, talk

VAD = {"type": "server_vad", "create_response": False}
FREE_TO_MISS = {
    "session.updated",
    "response.output_audio.delta",
    "input_audio_buffer.committed",  # the client may have made the item
    "input_audio_buffer.speech_stopped",  # the client may have ended the turn
}
"""Nobody can know that one of them should be there."""


@pytest.fixture(scope="module")
def told(realtime: str) -> list[Event]:
    """An item is said, an answer is cancelled in its middle, a turn is detected, and an answer does not begin."""
    got: list[Event] = []

    async def speak(client: RawClient) -> None:
        await client.says(1)
        await client.send("input_audio_buffer.commit")
        await client.asks()
        for _ in range(3):
            await client.until("response.output_audio.delta")
        await client.send("response.cancel")
        await client.until("response.done")
        await client.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": VAD}}})
        await client.says(1)
        await client.waits(1)
        await client.until("conversation.item.done")
        await client.send("response.create")
        await client.send("response.cancel")
        await client.until("response.done")

    async def conversation() -> None:
        async with session(realtime) as client:
            await speak(client)
        got.extend(client.got)

    talk(conversation)
    return got


def test_what_was_told_in_order_is_found_in_order(told: list[Event]) -> None:
    checked = check(told)
    assert len(checked.answers) == 2
    assert len(checked.items) == 3
    assert len(checked.events) == len(told)


def test_an_event_that_is_missing_is_missed(told: list[Event]) -> None:
    for place, event in enumerate(told[:-1]):
        if event.kind not in FREE_TO_MISS:
            with pytest.raises(AssertionError):
                check(told[:place] + told[place + 1 :])


def test_an_event_that_comes_twice_is_noticed(told: list[Event]) -> None:
    for place in range(len(told)):
        with pytest.raises(AssertionError):
            check(told[: place + 1] + told[place:])


def test_an_event_that_comes_early_is_noticed(told: list[Event]) -> None:
    for place in range(1, len(told)):
        one, other = told[place - 1], told[place]
        if one.kind.endswith(".delta") and other.kind.endswith(".delta"):
            continue
        if other.kind == "session.updated" or one.kind == "session.updated":
            continue
        with pytest.raises(AssertionError):
            check([*told[: place - 1], other, one, *told[place + 1 :]])
