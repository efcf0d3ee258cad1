"""What clients do with the items of a conversation, over a socket: keep, show, delete and repeat them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from antiphon.server.app import build_app
from server.raw_client import RawClient, connected, sound, talk
from server.servers import RunningServer, StartServer


@pytest.fixture
def running(start_server: StartServer) -> Iterator[RunningServer]:
    with start_server(lambda host: build_app(host, draw_seed=lambda: 0)) as running:
        yield running


async def ask(client: RawClient) -> None:
    """In a second of sound, and one more for the answer to be spoken in."""
    await client.says(1)
    await client.send("response.create")
    await client.says(1)


def test_an_answer_whose_item_is_deleted_is_not_said_any_further(running: RunningServer) -> None:
    async def conversation() -> None:
        async with connected(running.url) as client:
            await ask(client)
            item_id = (await client.until("response.output_audio.delta")).text("item_id")
            await client.send("conversation.item.delete", item_id=item_id)
            done = await client.until("response.done")
            assert done.text("response", "status") == "cancelled"
            assert (await client.until("conversation.item.deleted")).text("item_id") == item_id
            await ask(client)
            assert (await client.until("response.output_audio.delta")).text("item_id") != item_id

    talk(conversation)
