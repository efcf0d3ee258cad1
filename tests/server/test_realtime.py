"""Answers on a real socket: who decides that there is one, how it is told, and that its sound is the engine's."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch

from antiphon.config import SessionConfig
from antiphon.core.events import UnitDecided
from antiphon.happenings import Speech
from antiphon.loading import Running
from antiphon.server.events.server import AudioDelta, ResponseDone, TextDelta, TranscriptDelta
from antiphon.units import UNIT_SAMPLES
from server.lifecycle import check, session
from server.raw_client import RawClient, talk

Samples = np.ndarray[tuple[int], np.dtype[np.float32]]

FLOAT = {
    "input": {"format": {"type": "pcm_f32le", "rate": 16_000}},
    "output": {"format": {"type": "pcm_f32le", "rate": 24_000}},
}
"""What the engine itself hears and says, so that nothing is lost on the way."""


def seconds_of_noise(number: int) -> list[Samples]:
    """16 kHz."""
    rng = np.random.default_rng(7)
    return [(0.05 * rng.standard_normal(UNIT_SAMPLES)).astype(np.float32) for _ in range(number)]


async def send_floats(client: RawClient, seconds: Sequence[Samples]) -> None:
    for second in seconds:
        await client.send("input_audio_buffer.append", audio=base64.b64encode(second.tobytes()).decode())


def spoken_by(running: Running, seconds: Sequence[Samples]) -> list[Samples]:
    """The sound of the first two turns when the engine hears these seconds and then silence, without a server."""
    config: SessionConfig = replace(running.session, seed=0)
    voice = running.voices.default()
    call = running.live.open("without a server", config, torch.from_numpy(voice.reference), voice.prompt)
    for second in seconds:
        call.send_audio(torch.from_numpy(second))
    speeches: list[Speech] = []
    num_ended = 0
    for happening in call.happenings():
        if isinstance(happening, UnitDecided):
            call.send_audio(torch.zeros(UNIT_SAMPLES))
        if isinstance(happening, Speech):
            speeches.append(happening)
            num_ended += happening.chunk.ends_turn
            if num_ended == 2:
                call.close()
    turns = groupby(speeches, key=lambda speech: speech.chunk.address.turn)
    return [np.concatenate([speech.samples.numpy() for speech in turn]) for _, turn in turns][:2]


def test_the_sound_of_an_answer_is_all_that_the_engine_made_of_it(realtime: str, tiny_engine: Running) -> None:
    seconds = seconds_of_noise(10)

    async def conversation() -> None:
        async with session(realtime, model_decides=True, audio=FLOAT) as client:
            await send_floats(client, seconds)
            for _ in range(2):
                await client.until("response.done")
        told = check(client.got)
        heard = [np.frombuffer(answer.audio, "<f4") for answer in told.answers]
        wanted = spoken_by(tiny_engine, seconds)
        assert len(wanted) == 2
        for one, other in zip(heard, wanted, strict=False):
            assert np.array_equal(one, other.clip(-1, 1))
            assert np.abs(one).max() > 0

    talk(conversation)


def test_by_default_the_model_decides_and_a_turn_that_comes_early_waits_for_the_one_before(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, "?vendor_events=1", model_decides=True) as client:
            await client.says(10)
            await client.until("response.done")
            first_done = len(client.got)
            await client.until("response.output_audio.delta")
            await client.send("response.cancel")
            await client.until("response.done")
        first, second = check(client.got).answers
        assert first.status == "completed"
        assert second.status == "cancelled"
        listened = [
            event.number("response", "metadata", "unit") for event in client.got if event.kind == "response.listen"
        ]
        # All ten seconds were decided on before the first answer had left, so the second one waited.
        assert max(listened) < 10
        assert first_done > 0
        assert not any(event.kind == "response.listen" for event in client.got[first_done:])

    talk(conversation)


NOT_BY_ITSELF = {"type": "semantic_vad", "create_response": False}


async def listened(client: RawClient, num_units: int) -> None:
    """Wait until the model has listened for so many seconds in all."""
    while client.kinds().count("response.listen") < num_units:
        await client.recv()


def test_a_model_that_may_not_answer_by_itself_speaks_only_when_it_is_asked(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, "?vendor_events=1", turn_detection=NOT_BY_ITSELF) as client:
            # Enough for two answers of a model that may: see above.
            await client.says(10)
            await listened(client, 9)
            assert "response.created" not in client.kinds()

    talk(conversation)


def test_who_sends_faster_than_speech_is_not_answered_unasked_either(realtime: str) -> None:
    async def conversation() -> None:
        settings = {"turn_detection": NOT_BY_ITSELF, "output_modalities": ["text"]}
        async with session(realtime, "?vendor_events=1", settings=settings) as client:
            await client.says(1)
            await client.send("response.create", response={"metadata": {"number": "1"}})
            # Here while the answer goes on, and heard when it is over.
            await client.says(20)
            await listened(client, 14)
            await client.asks(metadata={"number": "2"})
            await client.until("response.done")
        answers = check(client.got).answers
        assert [answer.response.metadata for answer in answers] == [{"number": "1"}, {"number": "2"}]

    talk(conversation)


def test_without_turn_detection_the_model_answers_when_it_is_asked(realtime: str) -> None:
    async def conversation() -> None:
        off = {"input": {"turn_detection": None}}
        async with session(realtime, audio=off, output_modalities=["text"]) as client:
            for number in ("1", "2"):
                await client.says(10)
                await client.asks(metadata={"number": number})
                await client.until("response.done")
        answers = check(client.got).answers
        assert [answer.response.metadata for answer in answers] == [{"number": "1"}, {"number": "2"}]
        assert all(answer.words for answer in answers)

    talk(conversation)


def test_an_answer_in_text_is_done_with_its_last_word_and_no_sound_of_it_is_waited_for(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, "?vendor_events=1", output_modalities=["text"]) as client:
            await client.says(1)
            await client.asks()
            await client.until("response.done")
        told = check(client.got)
        (answer,) = told.answers
        assert answer.words
        assert not told.all(AudioDelta)
        assert not told.all(TranscriptDelta)
        # With another second decided on in between, it would have waited.
        last_word = max(place for place, event in enumerate(told.events) if isinstance(event, TextDelta))
        assert client.kinds()[last_word + 1 :] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "conversation.item.done",
            "response.done",
        ]

    talk(conversation)


def test_a_second_answer_is_refused_while_one_goes_on(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime) as client:
            await client.says(1)
            await client.asks(metadata={"number": "1"})
            await client.until("response.output_audio.delta")
            await client.send("response.create", event_id="too early")
            error = await client.error()
            assert error.code == "conversation_already_has_active_response"
            assert error.text("error", "event_id") == "too early"
            await client.send("response.cancel")
            await client.until("response.done")
            await client.asks(metadata={"number": "3"})
            await client.until("response.output_audio.delta")
            await client.send("response.cancel")
            await client.until("response.done")
        answers = check(client.got).answers
        assert [answer.response.metadata for answer in answers] == [{"number": "1"}, {"number": "3"}]
        assert [(answer.status, answer.reason) for answer in answers] == [("cancelled", "client_cancelled")] * 2

    talk(conversation)


def test_an_answer_that_has_all_its_tokens_is_incomplete(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, max_output_tokens=4) as client:
            await client.says(1)
            await client.asks()
            await client.until("response.done")
            await client.asks(max_output_tokens=200, output_modalities=["text"])
            await client.until("response.done")
        short, long = check(client.got).answers
        assert (short.status, short.reason) == ("incomplete", "max_output_tokens")
        assert short.response.max_output_tokens == 4
        assert long.status == "completed"
        assert long.response.max_output_tokens == 200
        # How long an answer is that is not cut, is its own business.
        assert short.words
        assert long.words

    talk(conversation)


def test_an_answer_counts_what_it_answers_and_what_it_said(realtime: str) -> None:
    async def conversation() -> None:
        asked = {"format": FLOAT["input"]["format"], "turn_detection": None}
        async with session(realtime, audio={"input": asked}) as client:
            await send_floats(client, seconds_of_noise(2))
            await client.send("response.create")
            # Said while the answer is spoken, so that the next one answers it.
            await send_floats(client, seconds_of_noise(8))
            await client.until("response.done")
            await client.asks(0, output_modalities=["text"])
            await client.until("response.created")
            await client.send("response.cancel")
            await client.until("response.done")
        first, second = check(client.got).answers
        usage = first.response.usage
        assert usage is not None
        assert usage.input_token_details.audio_tokens == 2 * 1000 // 100
        assert usage.output_token_details.audio_tokens == len(first.audio) // 2 * 1000 // 24_000 // 50
        assert usage.output_token_details.text_tokens > 0
        waited = second.response.usage
        assert waited is not None
        assert waited.input_token_details.audio_tokens == 8 * 1000 // 100

    talk(conversation)


def test_what_was_asked_for_and_cancelled_before_it_began_has_no_item(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime) as client:
            await client.send("response.create")
            await client.send("response.cancel")
            await client.until("response.done")
        told = check(client.got)
        assert told.answers[0].status == "cancelled"
        assert told.one(ResponseDone).response.output == ()
        assert not told.items

    talk(conversation)
