"""The official Python client on a real socket: speaks, hears an answer, interrupts it, cuts what it did not hear."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterator

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from openai.types.realtime import RealtimeServerEvent
from websockets.exceptions import InvalidStatus

from antiphon.server.app import build_app
from server import raw_client
from server.raw_client import connected
from server.servers import StartServer

Talk = Callable[[AsyncRealtimeConnection], Awaitable[None]]


@pytest.fixture
def address(start_server: StartServer) -> Iterator[str]:
    with start_server(lambda host: build_app(host, draw_seed=lambda: 0)) as running:
        yield running.url.removeprefix("http://")


def run(address: str, talk: Talk) -> None:
    async def main() -> None:
        client = AsyncOpenAI(base_url=f"http://{address}/v1", api_key="nobody asks yet")
        async with asyncio.timeout(60), client.realtime.connect(model="minicpm-o-4_5") as connection:
            assert (await connection.recv()).type == "session.created"
            await talk(connection)

    asyncio.run(main())


def sound(seed: int) -> str:
    """A second of 24 kHz PCM16."""
    noise = 0.05 * np.random.default_rng(seed).standard_normal(24_000)
    return base64.b64encode((noise * 32767).astype("<i2").tobytes()).decode()


async def until(connection: AsyncRealtimeConnection, kind: str) -> list[RealtimeServerEvent]:
    """Everything up to the next event of this kind."""
    got: list[RealtimeServerEvent] = []
    while not got or got[-1].type != kind:
        got.append(await connection.recv())
        assert got[-1].type != "error", got[-1]
    return got


def heard(events: list[RealtimeServerEvent]) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    deltas = [event.delta for event in events if event.type == "response.output_audio.delta"]
    return np.frombuffer(b"".join(map(base64.b64decode, deltas)), "<i2")


def test_a_response_that_is_asked_for_comes_whole_and_in_order(address: str) -> None:
    async def talk(connection: AsyncRealtimeConnection) -> None:
        await connection.session.update(session={"type": "realtime", "instructions": "Be brief."})
        (updated,) = await until(connection, "session.updated")
        assert updated.type == "session.updated"
        assert updated.session.type == "realtime"
        assert updated.session.instructions == "Be brief."
        await connection.input_audio_buffer.append(audio=sound(1))
        await connection.input_audio_buffer.commit()
        committed = await until(connection, "conversation.item.done")
        assert [event.type for event in committed] == [
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
        ]
        await connection.response.create(response={"metadata": {"client_event_id": "mine"}})
        events = await until(connection, "response.done")
        kinds = [event.type for event in events]
        assert kinds[:4] == [
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
        ]
        assert kinds[-6:] == [
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]
        done = events[-1]
        assert done.type == "response.done"
        assert done.response.status == "completed"
        assert done.response.metadata == {"client_event_id": "mine"}
        samples = heard(events)
        assert len(samples) >= 24_000
        assert np.abs(samples).max() > 100
        assert done.response.usage is not None
        details = done.response.usage.output_token_details
        assert details is not None
        assert details.audio_tokens == len(samples) * 1000 // 24_000 // 50
        words = "".join(event.delta for event in events if event.type == "response.output_audio_transcript.delta")
        whole = next(event for event in events if event.type == "response.output_audio_transcript.done")
        assert whole.type == "response.output_audio_transcript.done"
        assert whole.transcript == words != ""

    run(address, talk)


def test_the_model_answers_by_itself_and_can_be_cancelled_and_cut(address: str) -> None:
    async def talk(connection: AsyncRealtimeConnection) -> None:
        feeding = asyncio.create_task(feed(connection))
        events = await until(connection, "response.output_audio.delta")
        added = next(event for event in events if event.type == "response.output_item.added")
        assert added.type == "response.output_item.added"
        assert added.item.id is not None
        await connection.response.cancel()
        events += await until(connection, "response.done")
        feeding.cancel()
        done = events[-1]
        assert done.type == "response.done"
        assert done.response.status == "cancelled"
        sent_ms = len(heard(events)) * 1000 // 24_000
        assert sent_ms > 0
        item_id = added.item.id
        await connection.conversation.item.truncate(item_id=item_id, content_index=0, audio_end_ms=sent_ms // 2)
        (truncated,) = [
            event for event in await until(connection, "conversation.item.truncated") if "truncated" in event.type
        ]
        assert truncated.type == "conversation.item.truncated"
        assert truncated.audio_end_ms == sent_ms // 2
        await connection.response.create()
        again = await until(connection, "response.done")
        assert len(heard(again)) > 0

    async def feed(connection: AsyncRealtimeConnection) -> None:
        for seed in range(60):
            await connection.input_audio_buffer.append(audio=sound(seed))
            await asyncio.sleep(0.05)

    run(address, talk)


def test_text_comes_in_and_out(address: str) -> None:
    async def talk(connection: AsyncRealtimeConnection) -> None:
        await connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
        await until(connection, "session.updated")
        await connection.conversation.item.create(
            item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello?"}]}
        )
        created = await until(connection, "conversation.item.done")
        assert [event.type for event in created] == ["conversation.item.added", "conversation.item.done"]
        await connection.response.create()
        events = await until(connection, "response.done")
        # A short answer of the tiny checkpoint may have no words; it has their end, and no sound.
        assert "response.output_text.done" in {event.type for event in events}
        assert not any("audio" in event.type for event in events)

    run(address, talk)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"type": "response.cancel"}, "response_cancel_not_active"),
        ({"type": "input_audio_buffer.commit"}, "input_audio_buffer_commit_empty"),
        ({"type": "conversation.item.delete", "item_id": "item_no"}, "item_delete_invalid_item_id"),
        (
            {"type": "conversation.item.truncate", "item_id": "no", "content_index": 0, "audio_end_ms": 0},
            "item_truncate_invalid_item_id",
        ),
        ({"type": "input_audio_buffer.append", "audio": "?"}, "invalid_base64"),
        ({"type": "sing"}, "unknown_event"),
        ({"type": "session.update", "session": {"type": "realtime", "nonsense": 1}}, "invalid_event"),
    ],
)
def test_a_bad_request_is_answered_and_the_session_goes_on(address: str, message: dict[str, object], code: str) -> None:
    async def talk(connection: AsyncRealtimeConnection) -> None:
        await connection.send(message | {"event_id": "mine"})  # type: ignore[arg-type]  # that is what is tested
        error = await connection.recv()
        assert error.type == "error"
        assert error.error.code == code
        assert error.error.event_id == "mine"
        await connection.input_audio_buffer.append(audio=sound(1))
        await connection.response.create()
        assert (await until(connection, "response.done"))[-1].type == "response.done"

    run(address, talk)


def test_places_are_free_as_soon_as_clients_have_gone(address: str) -> None:
    async def talk(connection: AsyncRealtimeConnection) -> None:
        await connection.input_audio_buffer.append(audio=base64.b64encode(bytes(48_000)).decode())
        await connection.response.create()
        await until(connection, "response.created")

    for _ in range(6):
        run(address, talk)


def test_a_call_whose_client_leaves_is_counted_as_ended_before_another_one_has_its_place(
    start_server: StartServer,
) -> None:
    async def once(url: str) -> None:
        async with connected(url) as client:
            await client.until("session.created")
            await client.says(2)
            await client.send("response.create")
            await client.until("response.output_audio.delta")

    async def conversation(url: str) -> None:
        await once(url)
        while True:
            try:
                await once(url)
            except InvalidStatus:
                continue
            break

    with start_server(build_app, max_calls="1") as running:
        raw_client.talk(lambda: conversation(running.url))
        ended = [line for line in httpx.get(f"{running.url}/metrics").text.splitlines() if "calls_ended_total{" in line]
    assert len(ended) == 1
    assert ended[0].startswith('antiphon_calls_ended_total{code="completed"}')
