"""Instructions, voice and window of a session that is under way: they change between two answers, or not at all."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile

from antiphon.server.app import build_app
from server.raw_client import RawClient, audio_of, connected, talk
from server.servers import RunningServer, StartServer

RECORDING = Path(__file__).parents[2] / "examples" / "caller.flac"


@pytest.fixture
def running(start_server: StartServer) -> Iterator[RunningServer]:
    with start_server(lambda host: build_app(host, draw_seed=lambda: 0)) as running:
        yield running


async def answer(client: RawClient, seed: int) -> bytes:
    """Say something and ask for an answer. Returns its sound."""
    first = len(client.got)
    await client.says(2, seed)
    await client.send("response.create")
    await client.until("response.done")
    return audio_of(client.got[first:])


async def update(client: RawClient, **fields: object) -> None:
    await client.send("session.update", event_id="mine", session={"type": "realtime", **fields})
    await client.until("session.updated")


async def only_when_asked(client: RawClient) -> None:
    await client.until("session.created")
    await update(client, audio={"input": {"turn_detection": None}})


def num_changes(running: RunningServer) -> int:
    metrics = httpx.get(f"{running.url}/metrics").text
    return int(
        float(
            next(line for line in metrics.splitlines() if line.startswith("antiphon_change_seconds_count")).split()[1]
        )
    )


def voice(start_s: float) -> str:
    """Two seconds of a recording as a WAV file."""
    samples, rate_hz = soundfile.read(RECORDING, dtype="int16")
    file = io.BytesIO()
    first = round(start_s * rate_hz)
    soundfile.write(file, samples[first : first + 2 * rate_hz], rate_hz, format="WAV")
    return base64.b64encode(file.getvalue()).decode()


def test_new_instructions_are_in_force_in_the_next_answer_and_the_call_goes_on(running: RunningServer) -> None:
    async def conversation() -> None:
        async with connected(running.url) as client:
            await only_when_asked(client)
            before = await answer(client, 0)
            await update(client, instructions="Be brief.")
            after = await answer(client, 10)
            assert before
            assert after
            assert client.got[-1].text("response", "status") == "completed"

    talk(conversation)
    assert num_changes(running) == 1


def test_an_answer_under_way_is_heard_to_its_end_before_its_voice_changes(running: RunningServer) -> None:
    heard: list[tuple[bytes, bytes]] = []

    async def conversation(*, is_changed: bool) -> None:
        async with connected(running.url) as client:
            await only_when_asked(client)
            await client.says(2)
            await client.send("response.create")
            await client.until("response.output_audio.delta")
            if is_changed:
                await client.send("session.update", session={"type": "realtime", "ref_audio": voice(3.0)})
            await client.until("response.done")
            first = client.audio()
            heard.append((first, await answer(client, 10)))

    talk(lambda: conversation(is_changed=False))
    talk(lambda: conversation(is_changed=True))
    (first, _), (first_changed, second_changed) = heard
    assert first == first_changed
    assert np.abs(np.frombuffer(second_changed, "<i2")).max() > 100
    assert num_changes(running) == 1


def test_a_window_becomes_smaller_and_slides_from_then_on(running: RunningServer) -> None:
    async def conversation() -> None:
        async with connected(running.url, "?vendor_events=1") as client:
            await client.until("session.created")
            await client.says(4)
            await client.until("response.listen")
            small = {"basic_window_high_tokens": 130, "basic_window_low_tokens": 100}
            await update(client, extra_body={"sliding_window_mode": "basic", **small})
            await client.says(12, 20)
            slid = await client.until("session.window_slid")
            assert slid.number("context_tokens") <= 100

    talk(conversation)


def test_what_cannot_be_had_is_said_and_taken_back_and_the_call_goes_on(running: RunningServer) -> None:
    async def conversation() -> None:
        async with connected(running.url) as client:
            await only_when_asked(client)
            await update(client, instructions="Be brief.")
            await answer(client, 0)
            await update(client, instructions="on and on " * 200)
            refused = await client.error()
            assert refused.code == "prompt_too_long"
            assert refused.text("error", "event_id") == "mine"
            kept = await client.until("session.updated")
            assert kept.text("session", "instructions") == "Be brief."
            assert await answer(client, 10)

    talk(conversation)
    assert num_changes(running) == 0


def test_of_many_changes_during_an_answer_the_last_one_is_in_force(running: RunningServer) -> None:
    async def conversation() -> None:
        async with connected(running.url) as client:
            await only_when_asked(client)
            await client.says(2)
            await client.send("response.create")
            await client.until("response.output_audio.delta")
            for number in range(20):
                await update(client, instructions=f"Count to {number}.")
            await client.until("response.done")
            assert await answer(client, 10)

    talk(conversation)
    assert num_changes(running) == 2, "the first one, and the last one when that was done"


def test_what_a_call_begins_with_cannot_be_said_later(running: RunningServer) -> None:
    async def conversation() -> None:
        async with connected(running.url) as client:
            await only_when_asked(client)
            await answer(client, 0)
            await client.send("session.update", session={"type": "realtime", "initial_user_text": "Hello?"})
            assert (await client.error()).code == "initial_user_text_update_unsupported"

    talk(conversation)
