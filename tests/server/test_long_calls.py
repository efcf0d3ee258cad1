"""More than two minutes of one caller's speech in each window mode, calls side by side and one after the other."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from antiphon.server.app import build_app
from antiphon.server.run import loaded
from server.raw_client import RawClient, connected, sound, talk
from server.servers import RunningServer, running_server, tiny_settings

SECONDS = 132
BLOCK = 12
"""Seconds of speech for each answer."""
BURST = 20
"""Seconds of speech before the last one."""
WINDOWS: dict[str, dict[str, object]] = {
    "off": {"sliding_window_mode": "off"},
    "basic": {"sliding_window_mode": "basic", "basic_window_high_tokens": 400, "basic_window_low_tokens": 300},
    "context": {"sliding_window_mode": "context", "context_max_units": 6, "context_previous_max_tokens": 40},
}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a call has besides sound."""

    has_camera: bool
    has_voice: bool


TOGETHER = (Kind(has_camera=True, has_voice=False), Kind(has_camera=False, has_voice=True))
AFTERWARDS = Kind(has_camera=True, has_voice=True)
LIMIT_S = 280.0
"""Of all three; what takes longer hangs."""


@pytest.fixture(scope="module")
def running(tiny_checkpoint: Path) -> Iterator[RunningServer]:
    """With room for two windows of any mode."""
    settings = tiny_settings(tiny_checkpoint, max_calls="2", window="off")
    with (
        loaded(settings, lambda _: None) as engine,
        running_server(settings, engine, lambda host: build_app(host, draw_seed=lambda: 0)) as running,
    ):
        yield running


def picture(number: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (64, 48), (number % 256, 2 * number % 256, 90)).save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


def voice() -> str:
    file = io.BytesIO()
    soundfile.write(file, 0.1 * np.sin(np.arange(16_000) / 20), 16_000, format="WAV")
    return base64.b64encode(file.getvalue()).decode()


async def speak(client: RawClient, kind: Kind, seconds: range) -> None:
    """One message a second, as fast as they go."""
    for second in seconds:
        # A picture every other second: without a window, one a second would fill the context before the call is over.
        seen = {"video_frames": [picture(second)]} if kind.has_camera and second % 2 else {}
        await client.send("input_audio_buffer.append", audio=sound(second), **seen)


async def live(url: str, mode: str, kind: Kind) -> RawClient:
    """A whole call: the caller never stops speaking, and asks for an answer in the midst of it now and then."""
    async with connected(url, "?vendor_events=1") as client:
        await client.until("session.created")
        given: dict[str, object] = {"ref_audio": voice()} if kind.has_voice else {}
        extra: dict[str, object] = {"auto_response": False, **WINDOWS[mode]}
        wanted = {"type": "realtime", "output_modalities": ["text"], "extra_body": extra, **given}
        await client.send("session.update", session=wanted)
        await client.until("session.updated")
        for start in range(0, SECONDS, BLOCK):
            await speak(client, kind, range(start, start + BLOCK // 2))
            await client.send("response.create")
            await speak(client, kind, range(start + BLOCK // 2, start + BLOCK))
            await client.until("response.done")
        # What is left of the last second is flushed by whoever asks for the answer to it.
        await speak(client, kind, range(SECONDS, SECONDS + BURST))
        await client.send("input_audio_buffer.append", audio=sound(0, seconds=0.3))
        await client.send("input.commit")
        await client.until("response.done")
        await client.send("session.close")
        await client.until("session.closed")
    return client


@pytest.mark.parametrize("mode", WINDOWS)
def test_a_call_goes_on_for_as_long_as_its_caller_speaks(running: RunningServer, mode: str) -> None:
    """Two at once, and one more when they are over."""
    calls: list[RawClient] = []

    async def conversation() -> None:
        calls.extend(await asyncio.gather(*(live(running.url, mode, kind) for kind in TOGETHER)))
        calls.append(await live(running.url, mode, AFTERWARDS))

    talk(conversation, LIMIT_S)
    for client in calls:
        answers = [event for event in client.got if event.kind == "response.done"]
        assert len(answers) == SECONDS // BLOCK + 1
        assert all(answer.text("response", "status") == "completed" for answer in answers)
        slides = [event for event in client.got if event.kind == "session.window_slid"]
        assert (len(slides) > 3) == (mode != "off")
        if mode == "context":
            assert max(slide.number("previous_tokens") for slide in slides) > 5
