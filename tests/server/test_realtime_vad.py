"""Turns that the server detects: when they are told to begin and end, what becomes of them, and when they interrupt."""

from __future__ import annotations

import base64

import numpy as np

from antiphon.server.events.server import AudioCommitted, SpeechStarted, SpeechStopped, TimeoutTriggered
from antiphon.server.vad.speech import WINDOW_SAMPLES
from antiphon.units import INPUT_RATE_HZ
from server.lifecycle import check, session
from server.raw_client import RawClient, talk

WINDOW_MS = 1000 * WINDOW_SAMPLES // INPUT_RATE_HZ
SILENCE, SPEECH = 0.0, 0.1


def detecting(*, modality: str = "text", **vad: object) -> dict[str, object]:
    """Settings of a session that detects turns in sound which nothing resamples."""
    sound = {"format": {"type": "pcm_f32le", "rate": INPUT_RATE_HZ}, "turn_detection": {"type": "server_vad", **vad}}
    return {"output_modalities": [modality], "audio": {"input": sound}}


async def hear(client: RawClient, *pieces: tuple[float, float]) -> None:
    """pieces: how loud, and how many seconds; in messages of a tenth of a second."""
    rng = np.random.default_rng(3)
    for loudness, seconds in pieces:
        samples = (loudness * rng.standard_normal(round(seconds * INPUT_RATE_HZ))).astype("<f4")
        for part in np.split(samples, range(1600, len(samples), 1600)):
            await client.send("input_audio_buffer.append", audio=base64.b64encode(part.tobytes()).decode())


def test_a_turn_is_told_with_its_times_committed_and_answered(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, settings=detecting()) as client:
            await hear(client, (SILENCE, 1), (SPEECH, 1), (SILENCE, 8))
            await client.until("response.done")
        told = check(client.got)
        started, stopped = told.one(SpeechStarted), told.one(SpeechStopped)
        # From 300 ms before the first loud window to 500 ms after the last one.
        assert 700 - WINDOW_MS <= started.audio_start_ms <= 700
        assert 2500 <= stopped.audio_end_ms <= 2500 + 2 * WINDOW_MS
        assert started.item_id == stopped.item_id == told.one(AudioCommitted).item_id
        (answer,) = told.answers
        assert answer.status == "completed"
        assert told.items == [started.item_id, answer.item_id]

    talk(conversation)


def test_times_follow_the_numbers_that_were_asked_for(realtime: str) -> None:
    async def conversation() -> None:
        vad = detecting(prefix_padding_ms=100, silence_duration_ms=200, create_response=False)
        async with session(realtime, settings=vad) as client:
            await hear(client, (SILENCE, 1), (SPEECH, 1), (SILENCE, 1))
            await client.until("conversation.item.done")
        told = check(client.got)
        assert 900 - WINDOW_MS <= told.one(SpeechStarted).audio_start_ms <= 900
        assert 2200 <= told.one(SpeechStopped).audio_end_ms <= 2200 + 2 * WINDOW_MS
        assert not told.answers

    talk(conversation)


def test_a_turn_need_not_be_answered(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, settings=detecting(create_response=False)) as client:
            await hear(client, (SILENCE, 1), (SPEECH, 1), (SILENCE, 3), (SPEECH, 1), (SILENCE, 3))
            for _ in range(2):
                await client.until("conversation.item.done")
            assert "response.created" not in client.kinds()
            await client.send("response.create")
            await hear(client, (SILENCE, 8))
            await client.until("response.done")
        told = check(client.got)
        assert len(told.answers) == 1
        assert len(told.all(AudioCommitted)) == 2

    talk(conversation)


async def interrupted(client: RawClient) -> None:
    """Speak while an answer is spoken."""
    await hear(client, (SILENCE, 1), (SPEECH, 1), (SILENCE, 4))
    await client.until("response.output_audio.delta")
    await hear(client, (SPEECH, 1), (SILENCE, 1))


def test_who_speaks_while_an_answer_is_spoken_interrupts_it_and_is_answered(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, settings=detecting(modality="audio")) as client:
            await interrupted(client)
            await client.until("response.done")
            await client.until("response.created")
            await client.send("response.cancel")
            await client.until("response.done")
        told = check(client.got)
        first, second = told.answers
        assert (first.status, first.reason) == ("cancelled", "turn_detected")
        assert second.status == "cancelled"
        kinds = client.kinds()
        # The speech is told first, then the end of the answer; the answer to it comes after its item.
        second_start = [place for place, kind in enumerate(kinds) if kind.endswith("speech_started")][1]
        assert "response.done" not in kinds[:second_start]
        assert kinds.index("response.done") < len(kinds) - 1 - kinds[::-1].index("input_audio_buffer.committed")

    talk(conversation)


def test_who_speaks_need_not_interrupt(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, settings=detecting(modality="audio", interrupt_response=False)) as client:
            await interrupted(client)
            await client.until("input_audio_buffer.committed")
            assert "response.done" not in client.kinds()
            await client.until("response.done")
        told = check(client.got)
        (answer,) = told.answers
        assert answer.status == "completed"
        assert len(told.all(AudioCommitted)) == 2

    talk(conversation)


def test_when_nobody_speaks_for_too_long_after_an_answer_the_model_goes_on(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, settings=detecting(idle_timeout_ms=5000)) as client:
            await hear(client, (SILENCE, 1), (SPEECH, 1), (SILENCE, 6))
            await client.until("response.done")
            await hear(client, (SILENCE, 14))
            await client.until("response.created")
            await client.until("response.done")
        told = check(client.got)
        timeout = told.one(TimeoutTriggered)
        waited_ms = timeout.audio_end_ms - timeout.audio_start_ms
        assert 5000 <= waited_ms <= 5000 + WINDOW_MS
        assert len(told.answers) == 2
        assert told.items[1:3] == [told.answers[0].item_id, timeout.item_id]

    talk(conversation)


def test_a_turn_that_the_client_commits_is_told_no_end(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, settings=detecting(create_response=False)) as client:
            await hear(client, (SILENCE, 1), (SPEECH, 1))
            await client.until("input_audio_buffer.speech_started")
            await client.send("input_audio_buffer.commit")
            await client.until("conversation.item.done")
            await hear(client, (SILENCE, 1), (SPEECH, 1), (SILENCE, 1))
            await client.until("input_audio_buffer.speech_stopped")
            await client.until("conversation.item.done")
        told = check(client.got)
        first, second = told.all(SpeechStarted)
        assert first.item_id == told.all(AudioCommitted)[0].item_id
        assert told.one(SpeechStopped).item_id == second.item_id
        assert second.audio_start_ms >= 2000

    talk(conversation)


def test_sound_before_turns_were_detected_counts_in_their_times(realtime: str) -> None:
    async def conversation() -> None:
        sound = {"format": {"type": "pcm_f32le", "rate": INPUT_RATE_HZ}, "turn_detection": None}
        async with session(realtime, audio={"input": sound}) as client:
            await hear(client, (SILENCE, 2))
            await client.send("session.update", session={"type": "realtime", **detecting(create_response=False)})
            await client.until("session.updated")
            await hear(client, (SILENCE, 1), (SPEECH, 1), (SILENCE, 1))
            await client.until("conversation.item.done")
        assert 2700 - WINDOW_MS <= check(client.got).one(SpeechStarted).audio_start_ms <= 2700

    talk(conversation)
