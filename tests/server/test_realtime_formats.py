"""Every encoding and rate in both directions on a real socket: the same words are heard, and the same sound is said."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest

from antiphon.server.audio import Decoder, Encoder, Encoding, WireFormat
from antiphon.units import INPUT_RATE_HZ, OUTPUT_RATE_HZ
from server.lifecycle import Answer, check, session
from server.raw_client import talk

FORMATS = {
    "audio/pcm": WireFormat(Encoding.PCM16, OUTPUT_RATE_HZ),
    "audio/pcmu": WireFormat(Encoding.ULAW, 8_000),
    "audio/pcma": WireFormat(Encoding.ALAW, 8_000),
    "pcm_f32le": WireFormat(Encoding.FLOAT32, INPUT_RATE_HZ),
    "pcm_s16le": WireFormat(Encoding.PCM16, 48_000),
}


def declared(name: str) -> dict[str, object]:
    return {"type": name, "rate": FORMATS[name].rate_hz}


def speech_in(form: WireFormat) -> list[str]:
    """Three seconds of the same hum, in messages of an odd number of bytes."""
    time_s = np.arange(3 * form.rate_hz) / form.rate_hz
    hum = 0.3 * np.sin(2 * np.pi * 220 * time_s) * np.sin(2 * np.pi * 3 * time_s)
    # An encoder takes the engine's rate; at its own rate, it changes only how a sample is written.
    payload = Encoder(WireFormat(form.encoding, OUTPUT_RATE_HZ)).encode(hum.astype(np.float32))
    return [base64.b64encode(payload[start : start + 4001]).decode() for start in range(0, len(payload), 4001)]


async def answer(url: str, name: str) -> Answer:
    audio = {"input": {"turn_detection": None}, "output": {"format": declared(name)}}
    async with session(url, audio=audio) as client:
        await client.says(1)
        await client.asks()
        await client.until("response.done")
    return check(client.got).answers[0]


def test_an_answer_is_the_same_in_every_format(realtime: str) -> None:
    async def conversation() -> None:
        names = ("audio/pcmu", "audio/pcma", "pcm_f32le")
        plain, *answers = await asyncio.gather(*(answer(realtime, name) for name in ("audio/pcm", *names)))
        wanted = decoded("audio/pcm", plain.audio)
        for name, one in zip(names, answers, strict=True):
            assert one.words == plain.words
            heard = decoded(name, one.audio)
            # A lower rate rounds the length of the whole answer.
            assert abs(len(heard) - len(wanted)) <= INPUT_RATE_HZ / FORMATS[name].rate_hz + 1
            length = min(len(heard), len(wanted))
            assert np.corrcoef(heard[:length], wanted[:length])[0, 1] > 0.5

    talk(conversation)


def decoded(name: str, payload: bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """At INPUT_RATE_HZ."""
    decoder = Decoder(FORMATS[name])
    return np.concatenate([decoder.decode(payload), decoder.flush()])


@pytest.mark.parametrize("name", FORMATS)
def test_sound_in_every_format_is_heard_for_as_long_as_it_lasts(realtime: str, name: str) -> None:
    async def conversation() -> None:
        audio = {"input": {"format": declared(name), "turn_detection": {"type": "server_vad"}}}
        async with session(realtime, audio=audio, output_modalities=["text"]) as client:
            for piece in speech_in(FORMATS[name]):
                await client.send("input_audio_buffer.append", audio=piece)
            await client.until("input_audio_buffer.speech_started")
            await client.send("input_audio_buffer.commit")
            await client.send("response.create")
            await client.until("response.created")
            await client.send("response.cancel")
            await client.until("response.done")
        usage = check(client.got).answers[0].response.usage
        assert usage is not None
        # What the resampler holds has not been heard yet.
        assert usage.input_token_details.audio_tokens in (29, 30)

    talk(conversation)
