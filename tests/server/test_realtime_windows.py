"""What a session forgets: vLLM-Omni's names of the windows, and that each of them slides as it was asked to."""

from __future__ import annotations

import pytest

from antiphon.server.app import build_app
from server.lifecycle import check, session
from server.raw_client import RawClient, talk
from server.servers import StartServer


async def listen(client: RawClient, seconds: int) -> None:
    """Say a little more than so much, and wait until so much was decided on."""
    await client.says(seconds)
    await client.waits(1)
    while client.kinds().count("response.listen") < seconds:
        await client.recv()


def quiet(**window: object) -> dict[str, object]:
    """Settings of a session in which the model only listens, as long as the test speaks."""
    return {"vendor_events": True, "extra_body": {"force_listen_count": 1000, **window}}


def test_a_basic_window_slides_by_the_tokens_that_were_asked_for(realtime: str) -> None:
    async def conversation() -> None:
        settings = quiet(sliding_window_mode="basic", basic_window_high_tokens=150, basic_window_low_tokens=100)
        async with session(realtime, settings=settings) as client:
            await listen(client, 24)
        slides = [event for event in client.got if event.kind == "session.window_slid"]
        assert len(slides) >= 2
        for slide in slides:
            assert slide.number("context_tokens") <= 100
            assert slide.number("dropped_units") >= 1
            assert slide.number("previous_tokens") == 0

    talk(conversation)


def test_a_context_window_slides_by_the_units_that_were_asked_for(realtime: str) -> None:
    async def conversation() -> None:
        settings = quiet(sliding_window_mode="context", context_max_units=6, context_previous_max_tokens=20)
        async with session(realtime, settings=settings) as client:
            await listen(client, 12)
        slides = [event for event in client.got if event.kind == "session.window_slid"]
        # One unit leaves for each that comes when there are six.
        assert {slide.number("dropped_units") for slide in slides} == {1}
        assert [slide.number("unit") for slide in slides][:5] == [6, 7, 8, 9, 10]

    talk(conversation)


@pytest.mark.parametrize("window", [{"basic_window_low_tokens": 100}, {"context_max_units": 6}])
def test_a_part_of_a_window_is_the_operators_kind_of_window_with_that_part(
    realtime: str, window: dict[str, object]
) -> None:
    async def conversation() -> None:
        async with session(realtime, settings=quiet(**window)) as client:
            await listen(client, 1)

    talk(conversation)


def test_without_a_window_the_session_ends_when_its_context_is_full(start_server: StartServer) -> None:
    async def conversation(url: str) -> None:
        async with session(url, settings=quiet(sliding_window_mode="off")) as client:
            await client.says(100)
            error = await client.error()
            assert error.code == "context_length_exceeded"
            assert await client.closed() == 1000
        assert not any(event.kind == "session.window_slid" for event in client.got)
        assert check(client.got).errors[-1].type == "server_error"

    with start_server(build_app, window_max_tokens="300") as running:
        talk(lambda: conversation(running.url))
