"""What clients do with the items of a conversation, over a socket: keep, show, delete and repeat them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from antiphon.server.app import build_app
from server.raw_client import RawClient, connected, talk
from server.servers import RunningServer, StartServer


@pytest.fixture
def running(start_server: StartServer) -> Iterator[RunningServer]:
    with start_server(lambda host: build_app(host, draw_seed=lambda: 0)) as running:
        yield running


async def create(client: RawClient, item_id: str, **fields: object) -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello?"}]}
    await client.send("conversation.item.create", item=item | fields | {"id": item_id}, event_id=f"create_{item_id}")


async def ask(client: RawClient) -> None:
    """In a second of sound, and one more for the answer to be spoken in."""
    await client.says(1)
    await client.send("response.create")
    await client.says(1)


@pytest.mark.parametrize("what", ["retrieve", "delete", "truncate"])
def test_an_item_that_is_not_there_is_told_by_what_was_to_be_done_with_it(running: RunningServer, what: str) -> None:
    async def conversation() -> None:
        async with connected(running.url) as client:
            cut = {"content_index": 0, "audio_end_ms": 0} if what == "truncate" else {}
            await client.send(f"conversation.item.{what}", item_id="no", event_id="mine", **cut)
            error = await client.error()
            assert error.code == f"item_{what}_invalid_item_id"
            assert (error.text("error", "event_id"), error.text("error", "param")) == ("mine", "item_id")

    talk(conversation)


def test_an_item_of_a_name_that_is_there_is_a_duplicate(running: RunningServer) -> None:
    async def conversation() -> None:
        async with connected(running.url) as client:
            await create(client, "one")
            await client.until("conversation.item.done")
            await create(client, "one")
            error = await client.error()
            assert error.code == "item_create_duplicate_item_id"
            assert error.text("error", "event_id") == "create_one"

    talk(conversation)


def test_an_answer_whose_item_is_deleted_is_not_said_any_further(running: RunningServer) -> None:
    async def conversation() -> None:
        async with connected(running.url) as client:
            await ask(client)
            item_id = (await client.until("response.output_audio.delta")).text("item_id")
            await client.send("conversation.item.delete", item_id=item_id)
            done = await client.until("response.done")
            assert done.text("response", "status") == "cancelled"
            assert (await client.until("conversation.item.deleted")).text("item_id") == item_id
            await client.send("conversation.item.retrieve", item_id=item_id)
            assert (await client.error()).code == "item_retrieve_invalid_item_id"
            await ask(client)
            assert (await client.until("response.output_audio.delta")).text("item_id") != item_id

    talk(conversation)


@pytest.mark.parametrize("kind", ["output_text", "text", "input_text"])
def test_an_answer_that_a_client_writes_may_be_called_text_of_any_kind(running: RunningServer, kind: str) -> None:
    async def conversation() -> None:
        async with connected(running.url) as client:
            await create(client, "one", role="assistant", content=[{"type": kind, "text": "Until six."}])
            assert (await client.until("conversation.item.done")).text("item", "role") == "assistant"

    talk(conversation)


def test_calls_of_tools_in_a_history_keep_their_place(running: RunningServer) -> None:
    async def conversation() -> None:
        async with connected(running.url) as client:
            call = {"type": "function_call", "id": "call", "call_id": "c", "name": "hours", "arguments": "{}"}
            found = {"type": "function_call_output", "id": "found", "call_id": "c", "output": "Until six."}
            for item in (call, found):
                await client.send("conversation.item.create", item=item)
            added = [await client.until("conversation.item.added") for _ in range(2)]
            assert [event.text("item", "type") for event in added] == ["function_call", "function_call_output"]
            assert added[1].text("previous_item_id") == "call"

    talk(conversation)


TOOL = {"type": "function", "name": "hours", "parameters": {"type": "object", "properties": {}}}


def test_tools_may_be_offered_and_the_session_says_that_it_has_none(running: RunningServer) -> None:
    async def conversation() -> None:
        async with connected(running.url) as client:
            await client.send("session.update", session={"type": "realtime", "tools": [TOOL], "tool_choice": "auto"})
            session = (await client.until("session.updated")).fields["session"]
            assert isinstance(session, dict)
            assert session["tools"] == []
            await client.send("response.create", response={"tools": [TOOL], "tool_choice": "none"})
            await client.until("response.created")

    talk(conversation)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "hours"}])
def test_a_tool_that_has_to_be_called_is_refused(running: RunningServer, choice: object) -> None:
    async def conversation() -> None:
        async with connected(running.url) as client:
            await client.send("session.update", session={"type": "realtime", "tool_choice": choice})
            assert (await client.error()).code == "tools_unsupported"
            await client.send("response.create", response={"tool_choice": choice})
            assert (await client.error()).text("error", "param") == "response.tool_choice"

    talk(conversation)
