"""vLLM-Omni's events: what its clients say and are told, and that nobody else is told any of it."""

from __future__ import annotations

import pytest

from antiphon.server.events.server import OFFICIAL_SERVER_EVENTS, AudioDelta
from antiphon.server.events.vendor import (
    CallChanged,
    CallOpened,
    OutputCleared,
    PlaybackAcknowledged,
    ResponseListen,
    ResponseSpeak,
    SessionClosed,
    TimedAudioDelta,
    UnitCosts,
    UnitReport,
    WindowSlid,
)
from server.lifecycle import Answer, check, session
from server.raw_client import RawClient, sound, talk

VENDOR = "?vendor_events=1"
SLIDING = {"force_listen_count": 1000, "context_max_units": 2, "sliding_window_mode": "context"}


async def spoken(client: RawClient) -> Answer:
    """An answer under way of which something was sent."""
    await client.says(1)
    await client.asks()
    await client.until("response.output_audio.delta")
    return check(client.got).answers[-1]


def test_an_official_client_is_told_nothing_that_it_does_not_know(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, extra_body=SLIDING) as client:
            await client.says(5)
            await spoken(client)
            await client.send("response.cancel")
            await client.until("response.done")
        told = check(client.got)
        assert {type(event) for event in told.events} <= set(OFFICIAL_SERVER_EVENTS)
        assert not any("server_event_seq" in event.fields for event in client.got)

    talk(conversation)


@pytest.mark.parametrize("way", ["?vendor_events=1", "?vendor_events=true", "?duplex=on", "session.update"])
def test_who_asks_is_told_what_the_model_does_and_every_event_has_a_number(realtime: str, way: str) -> None:
    async def conversation() -> None:
        query, asked = ("", {"vendor_events": True}) if way == "session.update" else (way, {})
        async with session(realtime, query, settings={**asked, "extra_body": SLIDING}) as client:
            await client.says(5)
            await client.until("session.window_slid")
            await spoken(client)
            await client.send("response.cancel")
            await client.until("response.done")
        told = check(client.got)
        listened = [event.response.metadata.unit for event in told.all(ResponseListen)]
        assert listened[:2] == [0, 1]
        assert told.all(WindowSlid)[0].dropped_units >= 1
        assert len(told.all(ResponseSpeak)) == 1
        deltas = told.all(AudioDelta)
        assert deltas
        assert all(isinstance(delta, TimedAudioDelta) for delta in deltas)

    talk(conversation)


def test_who_wants_to_see_inside_is_told_what_every_second_came_to(realtime: str) -> None:
    async def conversation() -> None:
        asked = {"extra_body": {**SLIDING, "report_units": True}}
        async with session(realtime, VENDOR, settings=asked) as client:
            await client.says(4)
            await client.until("session.window_slid")
            await client.send("session.update", session={"type": "realtime", "instructions": "Other ones."})
            await client.says(2)
            await client.until("session.call_changed")
        told = check(client.got)
        (opened,) = told.all(CallOpened)
        decided, finished = told.all(UnitReport), told.all(UnitCosts)
        assert [report.unit for report in decided[:3]] == [0, 1, 2]
        assert [costs.unit for costs in finished[:3]] == [0, 1, 2]
        assert all(report.is_listen for report in decided)
        assert opened.prompt_tokens < decided[0].context_tokens <= opened.max_context_tokens
        assert max(report.retained_units for report in decided) == 2
        assert told.all(CallChanged)[0].context_tokens > 0

    talk(conversation)


def test_nobody_else_is_told_what_a_second_came_to(realtime: str) -> None:
    async def conversation() -> None:
        for query, asked in ((VENDOR, {}), ("", {"extra_body": {"report_units": True}})):
            async with session(realtime, query, settings=asked) as client:
                await spoken(client)
            assert not check(client.got).all(UnitReport)

    talk(conversation)


def test_deltas_say_how_long_they_are_and_which_words_they_end(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, VENDOR) as client:
            await spoken(client)
            await client.until("response.done")
        told = check(client.got)
        (answer,) = told.answers
        deltas = told.all(TimedAudioDelta)
        assert {(delta.format, delta.sample_rate_hz) for delta in deltas} == {("pcm16", 24_000)}
        assert sum(delta.metadata.audio_duration_ms for delta in deltas) == len(answer.audio) // 48
        assert [delta.metadata.end_of_turn for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        marks = [mark for delta in deltas for mark in delta.metadata.audio_text_marks]
        assert [mark.text_chars for mark in marks] == sorted(mark.text_chars for mark in marks)
        assert marks[-1].text_chars == len(answer.words)
        assert marks[-1].audio_end_ms == len(answer.audio) // 48

    talk(conversation)


def test_a_heartbeat_is_acknowledged_whoever_sends_it(realtime: str) -> None:
    async def conversation() -> None:
        for query in ("", VENDOR):
            async with session(realtime, query) as client:
                await client.send("session.heartbeat")
                ack = await client.until("session.heartbeat_ack")
                assert ack.text("session_id") == client.got[0].text("session", "id")

    talk(conversation)


@pytest.mark.parametrize("kind", ["session.close", "close_session", "close"])
def test_a_client_may_close_its_session_and_say_why(realtime: str, kind: str) -> None:
    async def conversation() -> None:
        async with session(realtime, VENDOR) as client:
            await spoken(client)
            await client.send(kind, reason="enough")
            assert await client.closed() == 1000
        told = check(client.got)
        assert isinstance(told.events[-1], SessionClosed)
        assert told.one(SessionClosed).reason == "enough"

    talk(conversation)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("barge_in", {}),
        ("turn.signal", {"event": "barge_in", "payload": {"why": "button"}}),
        ("signal_turn", {"event": "interrupt"}),
        ("turn.signal", {"event": "cancel"}),
    ],
)
def test_a_signal_stops_an_answer_and_without_one_does_nothing(
    realtime: str, kind: str, fields: dict[str, object]
) -> None:
    async def conversation() -> None:
        async with session(realtime, VENDOR) as client:
            await client.send(kind, **fields)
            await spoken(client)
            await client.send(kind, **fields)
            await client.until("response.done")
        (answer,) = check(client.got).answers
        assert (answer.status, answer.reason) == ("cancelled", "client_cancelled")

    talk(conversation)


def test_an_acknowledgement_is_answered_with_what_is_known_of_the_answer(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, VENDOR) as client:
            answer = await spoken(client)
            await client.send("playback.ack", played_ms=100, item_id=answer.item_id)
            await client.until("playback.acknowledged")
            await client.send("audio.playback_ack", played_ms=40, response_id=answer.response.id)
            await client.until("playback.acknowledged")
            await client.send("playback.ack", played_ms=100, truncate=True)
            await client.until("playback.acknowledged")
        told = check(client.got)
        one, two, three = (event.event for event in told.all(PlaybackAcknowledged))
        assert (one.item_id, one.response_id) == (answer.item_id, answer.response.id)
        assert (one.played_ms, one.committed_ms, one.history_committed) == (100, 100, False)
        assert 100 <= one.sent_ms <= one.generated_ms
        # What was heard is not unheard by an older message.
        assert two.played_ms == 100
        assert (three.played_ms, three.history_committed) == (100, True)
        assert told.answers[0].status == "cancelled"

    talk(conversation)


def test_a_loudspeaker_that_is_cleared_stops_the_answer(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, VENDOR) as client:
            answer = await spoken(client)
            await client.send("output_audio_buffer.clear")
            await client.until("output_audio_buffer.cleared")
            await client.send("output_audio_buffer.clear", response_id=answer.response.id)
            await client.until("output_audio_buffer.cleared")
        told = check(client.got)
        assert [event.response_id for event in told.all(OutputCleared)] == [answer.response.id] * 2
        assert told.answers[0].status == "cancelled"

    talk(conversation)


@pytest.mark.parametrize("kind", ["input.text.append", "input_text.append", "push_text"])
def test_typed_words_are_read_and_may_be_answered(realtime: str, kind: str) -> None:
    async def conversation() -> None:
        async with session(realtime, output_modalities=["text"]) as client:
            await client.send(kind, text="Hello?")
            await client.asks()
            await client.until("response.done")
        assert check(client.got).answers[0].status == "completed"

    talk(conversation)


def test_sound_that_is_not_heard_yet_can_be_dropped(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, VENDOR) as client:
            await client.says(1)
            await client.send("input.cancel")
            await client.send("input_audio_buffer.commit")
            assert (await client.error()).code == "input_audio_buffer_commit_empty"

    talk(conversation)


def test_a_piece_that_is_to_be_listened_to_is_not_answered(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, VENDOR) as client:
            for second in range(6):
                await client.send("input_audio_buffer.append", audio=sound(second), force_listen=True)
            for _ in range(5):
                await client.until("response.listen")
        assert not check(client.got).answers

    talk(conversation)
