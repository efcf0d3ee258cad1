"""A cut connection: its client comes back, hears the rest of the sentence, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus

from antiphon.server.app import build_app
from server.raw_client import Event, RawClient, audio_of, connected, talk
from server.servers import RunningServer, StartServer


@pytest.fixture
def running(start_server: StartServer) -> Iterator[RunningServer]:
    with start_server(lambda host: build_app(host, draw_seed=lambda: 0), max_calls="4") as running:
        yield running


async def begin(client: RawClient) -> Event:
    """Ask for an answer. Returns the session's first event."""
    created = await client.until("session.created")
    await client.says(2)
    await client.send("response.create")
    return created


async def resume(client: RawClient, created: Event, token: str, last_seq: int) -> None:
    await client.send(
        "session.resume",
        session_id=created.text("session", "id"),
        resume_token=token,
        last_received_server_event_seq=last_seq,
    )


async def whole_answer(url: str) -> bytes:
    async with connected(url) as client:
        await begin(client)
        await client.until("response.done")
        return client.audio()


@pytest.mark.parametrize("num_deltas", [0, 1, 3])
def test_no_sound_comes_twice_and_none_is_missing_wherever_the_connection_is_cut(
    running: RunningServer, num_deltas: int
) -> None:
    async def conversation() -> None:
        wanted = await whole_answer(running.url)
        async with connected(running.url, "?vendor_events=1") as first:
            created = await begin(first)
            for _ in range(num_deltas):
                await first.until("response.output_audio.delta")
            first.cut()
        seqs = [event.number("server_event_seq") for event in first.got]
        async with connected(running.url, "?resume=1") as second:
            await resume(second, created, created.text("resume_token"), seqs[-1])
            resumed = await second.recv()
            assert resumed.kind == "session.resumed"
            assert resumed.number("attachment_generation") == 2
            assert resumed.text("resume_token") != created.text("resume_token")
            await second.until("response.done")
        events = [*first.got, *second.got[1:]]
        assert [event.number("server_event_seq") for event in events] == list(range(1, len(events) + 1))
        assert audio_of(events) == wanted
        assert len(wanted) > 48_000

    talk(conversation)


def test_a_second_socket_takes_over_and_the_first_is_told_so(running: RunningServer) -> None:
    async def conversation() -> None:
        async with connected(running.url, "?vendor_events=1") as first:
            created = await first.until("session.created")
            async with connected(running.url, "?resume=1") as second:
                await resume(second, created, created.text("resume_token"), 1)
                await second.until("session.resumed")
                assert await first.closed() == 1000
                assert first.got[-1].kind == "session.replaced"
                await second.send("session.heartbeat")
                ack = await second.until("session.heartbeat_ack")
                assert ack.number("server_event_seq") == 2

    talk(conversation)


def test_who_comes_back_is_told_how_many_of_its_messages_were_taken(running: RunningServer) -> None:
    async def conversation() -> None:
        async with connected(running.url, "?vendor_events=1") as first:
            created = await first.until("session.created")
            await first.send("session.heartbeat")
            await first.send("nonsense")
            await first.error()
            await first.send("session.heartbeat")
            acks = [await first.until("session.heartbeat_ack")]
            first.cut()
        async with connected(running.url, "?resume=1") as second:
            await resume(second, created, created.text("resume_token"), first.got[-1].number("server_event_seq"))
            resumed = await second.until("session.resumed")
            await second.send("session.heartbeat")
            acks.append(await second.until("session.heartbeat_ack"))
        assert resumed.number("received_client_events") == 3
        assert [ack.number("received_client_events") for ack in acks] == [3, 4]

    talk(conversation)


def test_a_token_is_good_once_and_only_for_its_session(running: RunningServer) -> None:
    async def refused(created: Event, token: str, code: str) -> None:
        async with connected(running.url, "?resume=1") as client:
            await resume(client, created, token, 1)
            assert (await client.error()).code == code
            assert await client.closed() == 1008

    async def conversation() -> None:
        async with connected(running.url, "?vendor_events=1") as client:
            created = await client.until("session.created")
            await refused(created, "guessed", "invalid_resume_token")
            await refused(Event({"session": {"id": "sess_no"}}), created.text("resume_token"), "unknown_session")
            async with connected(running.url, "?resume=1") as again:
                await resume(again, created, created.text("resume_token"), 1)
                await again.until("session.resumed")
                await refused(created, created.text("resume_token"), "invalid_resume_token")
                await again.send("session.heartbeat")
                await again.until("session.heartbeat_ack")

    talk(conversation)


def test_who_missed_more_than_is_kept_has_to_start_again(running: RunningServer) -> None:
    async def conversation() -> None:
        async with connected(running.url, "?vendor_events=1") as first:
            created = await first.until("session.created")
            await first.send("session.heartbeat")
            await first.until("session.heartbeat_ack")
            await first.send("session.event_ack", server_event_seq=2)
            await first.send("session.heartbeat")
            await first.until("session.heartbeat_ack")
            first.cut()
        async with connected(running.url, "?resume=1") as second:
            await resume(second, created, created.text("resume_token"), 1)
            assert (await second.recv()).text("reason") == "journal_overflow"
            assert await second.closed() == 1000

    talk(conversation)


def test_a_socket_that_resumes_says_so_first(running: RunningServer) -> None:
    async def conversation() -> None:
        async with connected(running.url, "?resume=1") as client:
            await client.send("session.heartbeat")
            assert (await client.error()).code == "invalid_session_resume"
            assert await client.closed() == 1008
        async with connected(running.url) as client:
            await client.until("session.created")
            await client.send("session.event_ack", server_event_seq=1)
            assert (await client.error()).code == "unsupported_session_resume"

    talk(conversation)


def test_who_does_not_come_back_in_time_leaves_the_place(start_server: StartServer) -> None:
    async def conversation(url: str) -> None:
        async with connected(url, "?vendor_events=1") as client:
            await client.until("session.created")
            with pytest.raises(InvalidStatus, match="503"):
                async with connected(url):
                    pass
            client.cut()
        while True:
            try:
                async with connected(url) as other:
                    await other.until("session.created")
                    return
            except InvalidStatus:
                continue

    with start_server(build_app, max_calls="1", max_calls_per_key="1", resume_s="0.2") as running:
        talk(lambda: conversation(running.url))


def test_a_server_that_stops_keeps_no_place_for_who_is_away(start_server: StartServer) -> None:
    async def conversation(running: RunningServer) -> None:
        async with connected(running.url, "?vendor_events=1") as client:
            await client.until("session.created")
            running.stop()
            client.cut()

    with start_server(build_app, drain_s="60", resume_s="60") as running:
        talk(lambda: conversation(running))


def test_a_client_of_another_key_may_not_take_a_session_over(start_server: StartServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key one\nkey two\n")

    async def conversation(url: str) -> None:
        with pytest.raises(InvalidStatus, match="401"):
            async with connected(url, "?resume=1"):
                pass
        async with connected(url, "?vendor_events=1", key="key one") as client:
            created = await client.until("session.created")
            async with connected(url, "?resume=1", key="key two") as stranger:
                await resume(stranger, created, created.text("resume_token"), 1)
                assert (await stranger.error()).code == "invalid_resume_token"

    with start_server(build_app, api_keys_file=str(keys)) as running:
        talk(lambda: conversation(running.url))


def test_clients_of_vllm_omni_find_their_address_and_what_they_know(running: RunningServer) -> None:
    async def conversation() -> None:
        async with connected(running.url, path="/v1/duplex") as first:
            created = await begin(first)
            await first.until("response.output_audio.delta")
            first.cut()
        last_seq = first.got[-1].number("server_event_seq")
        async with connected(running.url, "?resume=1", path="/v1/duplex") as second:
            await resume(second, created, created.text("resume_token"), last_seq)
            assert (await second.recv()).kind == "session.resumed"
            await second.until("response.done")

    talk(conversation)


def test_who_comes_back_and_does_not_say_to_which_session_is_told_and_closed(start_server: StartServer) -> None:
    async def conversation(url: str) -> None:
        async with connected(url, "?resume=1") as client:
            assert (await client.error()).code == "config_timeout"
            assert await client.closed() == 1008

    with start_server(build_app, first_message_s="0.05") as running:
        talk(lambda: conversation(running.url))
