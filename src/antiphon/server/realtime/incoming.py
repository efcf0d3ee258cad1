"""A client's message, read as a whole: what takes long of it, pictures and a voice, is ready before its turn comes.

Shown by tests/server/test_incoming.py.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from dataclasses import dataclass

from antiphon.aio import Picture, read_picture
from antiphon.errors import ImageError, InputError
from antiphon.server.audio_file import decode_file, read_sound
from antiphon.server.events.client import AudioAppend, ClientEvent, EventError, ItemCreate, SessionUpdateEvent, parse
from antiphon.server.events.items import InputImage, UserMessage
from antiphon.voices import PreparedVoice, VoiceBook

LONG_CHARACTERS = 2**16
"""A longer message is read in another thread, so that nobody else's second is late for it."""
MAX_VOICE_S = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """pictures: the event's own, decoded, in order. voice: made of the recording in it."""

    event: ClientEvent
    pictures: tuple[Picture, ...]
    voice: PreparedVoice | None


@dataclass(frozen=True, slots=True, eq=False)
class Rejected:
    """A message that cannot be used. event_id: the client's, if there is one."""

    error: InputError
    event_id: str | None


async def read(text: str, book: VoiceBook) -> Incoming | Rejected:
    """text: as it came. book: makes voices."""
    try:
        event = await asyncio.to_thread(parse, text) if len(text) > LONG_CHARACTERS else parse(text)
    except EventError as error:
        return Rejected(error, error.event_id)
    files, recording = _picture_files(event), _recording(event)
    if not files and recording is None:
        return Incoming(event, (), None)
    try:
        return await asyncio.to_thread(_ready, event, files, recording, book)
    except InputError as error:
        return Rejected(error, event.event_id)


def _ready(event: ClientEvent, files: tuple[str, ...], recording: str | None, book: VoiceBook) -> Incoming:
    pictures = tuple(read_picture(_decode_picture(file)) for file in files)
    voice = None
    if recording is not None:
        voice = book.prepare(*read_sound(decode_file(recording), MAX_VOICE_S))
    return Incoming(event, pictures, voice)


def _picture_files(event: ClientEvent) -> tuple[str, ...]:
    match event:
        case AudioAppend(video_frames=frames) if frames is not None:
            return frames
        case ItemCreate(item=UserMessage(content=parts)):
            return tuple(part.image_url for part in parts if isinstance(part, InputImage) and part.image_url)
    return ()


def _recording(event: ClientEvent) -> str | None:
    return event.session.ref_audio if isinstance(event, SessionUpdateEvent) else None


def _decode_picture(text: str) -> bytes:
    """text: a `data:` URL, or as vLLM-Omni's clients write it, base64 by itself."""
    head, comma, body = text.partition(",")
    if not comma:
        head, body = "data:;base64", text
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise ImageError("a picture is a data URL in base64, data:image/jpeg;base64,...; nothing is fetched")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the picture is not base64: {error}") from error
