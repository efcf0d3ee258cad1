"""A message with its pictures and its voice is ready as a whole, or rejected as a whole."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from antiphon.loading import Running
from antiphon.server.events.client import AudioAppend, Heartbeat, ItemCreate
from antiphon.server.realtime.incoming import LONG_CHARACTERS, MAX_VOICE_S, Incoming, Rejected, read
from antiphon.voices import VoiceBook


@pytest.fixture(scope="module")
def book(tiny_engine: Running) -> VoiceBook:
    return tiny_engine.voices


def took(book: VoiceBook, kind: str, **fields: object) -> Incoming:
    incoming = asyncio.run(read(json.dumps({"type": kind, **fields}), book))
    assert isinstance(incoming, Incoming), incoming
    return incoming


def rejected(book: VoiceBook, kind: str, **fields: object) -> Rejected:
    incoming = asyncio.run(read(json.dumps({"type": kind, "event_id": "mine", **fields}), book))
    assert isinstance(incoming, Rejected), incoming
    return incoming


def picture(width: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, 40), "teal").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def recording(seconds: float) -> str:
    time_s = np.arange(round(seconds * 16_000)) / 16_000
    file = io.BytesIO()
    soundfile.write(file, 0.3 * np.sin(2 * np.pi * 220 * time_s), 16_000, format="WAV")
    return base64.b64encode(file.getvalue()).decode()


def message(*urls: str) -> dict[str, object]:
    parts: list[dict[str, object]] = [{"type": "input_image", "image_url": url} for url in urls]
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}, *parts]}


def test_a_message_without_files_is_its_event(book: VoiceBook) -> None:
    incoming = took(book, "session.heartbeat", event_id="mine")
    assert incoming.event == Heartbeat(type="session.heartbeat", event_id="mine")
    assert (incoming.pictures, incoming.voice) == ((), None)


def test_a_long_message_is_read_like_a_short_one(book: VoiceBook) -> None:
    audio = "A" * (4 * LONG_CHARACTERS)
    incoming = took(book, "input_audio_buffer.append", audio=audio)
    assert isinstance(incoming.event, AudioAppend)
    assert incoming.event.audio == audio
    fault = rejected(book, "input_audio_buffer.append", audio=audio, nonsense=1)
    assert (fault.error.code, fault.event_id) == ("invalid_event", "mine")


def test_pictures_are_decoded_in_their_order(book: VoiceBook) -> None:
    urls = [f"data:image/png;base64,{picture(width)}" for width in (10, 20, 30)]
    incoming = took(book, "conversation.item.create", item=message(*urls))
    assert isinstance(incoming.event, ItemCreate)
    assert [one.size for one in incoming.pictures] == [(10, 40), (20, 40), (30, 40)]
    assert all(one.mode == "RGB" for one in incoming.pictures)
    frames = took(book, "input_audio_buffer.append", video_frames=[picture(10), urls[1]])
    assert [one.size for one in frames.pictures] == [(10, 40), (20, 40)]


def test_a_recording_becomes_a_voice(book: VoiceBook) -> None:
    for text in (recording(2.0), f"data:audio/wav;base64,{recording(2.0)}"):
        incoming = took(book, "session.update", session={"type": "realtime", "ref_audio": text})
        assert incoming.voice is not None
        assert len(incoming.voice.reference)


@pytest.mark.parametrize(
    ("kind", "fields", "code"),
    [
        ("sing", {}, "unknown_event"),
        ("conversation.item.create", {"item": message("data:image/png;base64,AAAA")}, "invalid_image"),
        ("conversation.item.create", {"item": message("data:image/png;base64,?")}, "invalid_image"),
        ("conversation.item.create", {"item": message("data:image/png,AAAA")}, "invalid_image"),
        ("conversation.item.create", {"item": message("https://example.com/cat.png,")}, "invalid_image"),
        (
            "conversation.item.create",
            {"item": message(f"data:image/png;base64,{picture(10)}", "data:image/png;base64,AAAA")},
            "invalid_image",
        ),
        ("input_audio_buffer.append", {"video_frames": [picture(10), "AAAA"]}, "invalid_image"),
        ("session.update", {"session": {"type": "realtime", "ref_audio": "AAAA"}}, "invalid_audio"),
        (
            "session.update",
            {"session": {"type": "realtime", "ref_audio": recording(MAX_VOICE_S + 1)}},
            "invalid_audio",
        ),
    ],
)
def test_a_message_with_a_file_that_cannot_be_used_is_rejected_as_a_whole(
    book: VoiceBook, kind: str, fields: dict[str, object], code: str
) -> None:
    fault = rejected(book, kind, **fields)
    assert (fault.error.code, fault.event_id) == (code, "mine")


def test_what_is_fetched_from_nowhere_is_not_fetched_from_here_either(book: VoiceBook, tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    Image.new("RGB", (10, 10)).save(file)
    assert rejected(book, "conversation.item.create", item=message(file.as_uri())).error.code == "invalid_image"
    assert rejected(book, "conversation.item.create", item=message(str(file))).error.code == "invalid_image"
