"""More than a server wants: of messages, sound, words, calls. Each has a rule, and the others notice nothing."""

from __future__ import annotations

import asyncio
import json

import pytest
from websockets.exceptions import InvalidStatus

from server.abuse.conftest import KEY, NEIGHBOUR_KEY, StartWatched
from server.abuse.messages import MIB
from server.abuse.neighbour import undisturbed_neighbour
from server.abuse.watching import resident_bytes
from server.raw_client import RawClient, connected, sound

LIMIT_S = 60.0


async def reads_until_told(client: RawClient, kind: str, num: int) -> None:
    while client.kinds().count(kind) < num:
        await client.recv()


def test_a_flood_of_messages_waits_in_the_network_and_is_answered_whole(
    start_watched: StartWatched, two_keys: str
) -> None:
    num_messages = 1000

    async def flood(url: str) -> None:
        async with connected(url, key=KEY) as client:
            reading = asyncio.create_task(reads_until_told(client, "session.heartbeat_ack", num_messages))
            for _ in range(num_messages):
                await client.send("session.heartbeat")
            await reading

    with start_watched(api_keys_file=two_keys) as watched, undisturbed_neighbour(watched.url, NEIGHBOUR_KEY):
        asyncio.run(asyncio.wait_for(flood(watched.url), LIMIT_S))


def test_sound_that_comes_faster_than_it_is_spoken_is_refused_at_the_limit(
    start_watched: StartWatched, two_keys: str
) -> None:
    async def flood(url: str) -> None:
        async with connected(url, key=KEY) as client:
            for second in range(30):
                await client.send("input_audio_buffer.append", audio=sound(second), event_id=f"second {second}")
            await client.send("conversation.item.retrieve", item_id="the end")
            while (error := await client.error()).code == "input_backpressure":
                pass
            assert error.code == "item_retrieve_invalid_item_id"
            refused = [
                event.text("error", "event_id") for event in client.got if event.kind == "error" and event is not error
            ]
            assert refused
            # Some are decided on while the others come.
            assert len(refused) <= 30 - 5
            await client.send("input_audio_buffer.clear")
            await client.until("input_audio_buffer.cleared")
            await client.send("response.create")
            await client.until("response.output_audio.delta")

    limits = {"max_input_queue_s": "5", "api_keys_file": two_keys}
    with start_watched(**limits) as watched, undisturbed_neighbour(watched.url, NEIGHBOUR_KEY):
        asyncio.run(asyncio.wait_for(flood(watched.url), LIMIT_S))


def test_a_conversation_of_endless_words_forgets_the_oldest(start_watched: StartWatched) -> None:
    words = "w" * (MIB // 4)

    async def flood(url: str) -> None:
        async with connected(url) as client:
            for number in range(200):
                part = {"type": "output_text", "text": words}
                item = {"type": "message", "role": "assistant", "id": f"item {number}", "content": [part]}
                await client.send("conversation.item.create", item=item)
                await client.until("conversation.item.done")
                client.got.clear()
            await client.send("conversation.item.retrieve", item_id="item 199")
            await client.until("conversation.item.retrieved")
            await client.send("conversation.item.retrieve", item_id="item 100")
            assert (await client.error()).code == "item_retrieve_invalid_item_id"

    with start_watched() as watched:
        before_bytes = resident_bytes()
        asyncio.run(asyncio.wait_for(flood(watched.url), LIMIT_S))
        assert resident_bytes() - before_bytes < 64 * MIB


def test_long_words_are_refused_before_anybody_counts_their_tokens(start_watched: StartWatched) -> None:
    async def conversation(url: str) -> None:
        async with connected(url) as client:
            await client.send("input.text.append", text="a" * (2**16 + 1))
            assert "65537 characters" in (await client.error()).text("error", "message")
            await client.send("input.text.append", text="a")
            await client.send("session.heartbeat")
            await client.until("session.heartbeat_ack")

    with start_watched() as watched:
        asyncio.run(asyncio.wait_for(conversation(watched.url), LIMIT_S))


@pytest.mark.parametrize("path", ["", "?vendor_events=1"])
def test_a_message_over_the_limit_ends_its_connection_with_1009(start_watched: StartWatched, path: str) -> None:
    async def conversation(url: str) -> None:
        async with connected(url, path) as client:
            await client.until("session.created")
            head, tail = '{"type": "push_text", "text": "', '"}'
            await client.socket.send(head + "a" * (MIB - len(head) - len(tail)) + tail)
            assert (await client.error()).code == "invalid_input"
            await client.socket.send(head + "a" * MIB + tail)
            assert await client.closed() == 1009

    with start_watched(max_message_bytes=str(MIB), resume_s="0.2") as watched:
        asyncio.run(asyncio.wait_for(conversation(watched.url), LIMIT_S))


def test_a_key_has_so_many_calls_and_another_key_has_its_own(start_watched: StartWatched, two_keys: str) -> None:
    async def refused(url: str) -> None:
        with pytest.raises(InvalidStatus, match="503") as refusal:
            async with connected(url, key=KEY):
                pass
        body = refusal.value.response.body
        assert body is not None
        assert json.loads(body)["error"]["code"] == "too_many_calls"

    async def conversation(url: str) -> None:
        async with connected(url, key=KEY) as first, connected(url, key=KEY) as second:
            for client in (first, second):
                await client.until("session.created")
            for _ in range(20):
                await refused(url)
            async with connected(url, key=NEIGHBOUR_KEY) as other:
                await other.until("session.created")
            await first.send("session.close")
            assert await first.closed() == 1000
            while True:
                try:
                    async with connected(url, key=KEY) as third:
                        await third.until("session.created")
                        return
                except InvalidStatus:
                    continue

    with start_watched(max_calls_per_key="2", api_keys_file=two_keys) as watched:
        asyncio.run(asyncio.wait_for(conversation(watched.url), LIMIT_S))
