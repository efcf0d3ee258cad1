"""A server whose stages are processes: what callers and model say is in no log of any of them."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import signal
from pathlib import Path
from queue import SimpleQueue

import pytest
from websockets.asyncio.client import connect

from antiphon.core.messages import Address, Failed, Open
from antiphon.runner.placed import Died
from antiphon.runner.process import Separate
from antiphon.stages.loop import Answer, Message
from fakes.echo_stage import EchoBuilder, Say
from server.raw_client import RawClient, connected, sound
from server.test_serve import served

SECRET = "my mother's maiden name"
PLACES = [flag for stage in ("thinker", "talker", "code2wav") for flag in (f"--{stage}-placement", "process")]
Said = Answer[str, tuple[str, ...], int] | Died


def test_an_error_in_a_process_is_logged_by_its_parent_and_without_its_words(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    inbox: SimpleQueue[Said] = SimpleQueue()
    placed: Separate[Message[tuple[str, str], Say], Answer[str, tuple[str, ...], int]]
    placed = Separate("echo", EchoBuilder(), inbox.put)
    placed.start()
    placed.send(Open("a", ("a", "")))
    placed.send(Say(Address("a", 0, 0, 0), "raise"))
    while not isinstance(inbox.get(timeout=60), Failed):
        pass
    placed.stop()
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.name == "antiphon.stages.loop"
    assert record.getMessage().startswith("a session failed\nRuntimeError\n  ")
    assert "a bug" not in "".join((caplog.text, *capfd.readouterr()))


def test_a_process_that_fails_says_where_and_not_at_what(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    inbox: SimpleQueue[Said] = SimpleQueue()
    placed: Separate[Message[tuple[str, str], Say], Answer[str, tuple[str, ...], int]]
    placed = Separate("echo", EchoBuilder(), inbox.put)
    placed.start()
    placed.send(SECRET)  # type: ignore[arg-type]  # no stage knows what to do with that
    assert isinstance(inbox.get(timeout=60), Died)
    placed.stop()
    assert "the stage failed" in caplog.text
    assert SECRET not in "".join((caplog.text, *capfd.readouterr()))


async def say_the_secret_everywhere(url: str) -> list[str]:
    """Returns what the model said."""
    words = {"type": "message", "role": "user", "id": SECRET, "content": [{"type": "input_text", "text": SECRET}]}
    async with connected(url, f"?who={SECRET.replace(' ', '%20')}") as client:
        await client.send("session.update", session={"instructions": SECRET, "initial_user_text": SECRET})
        await client.send(SECRET)
        await client.send("input_audio_buffer.append", audio=SECRET)
        await client.send("input_audio_buffer.append", audio="", video_frames=[SECRET])
        await client.send("conversation.item.create", item=words, event_id=SECRET)
        await client.send("conversation.item.create", item=words, previous_item_id=SECRET)
        await client.send("session.update", session={"voice": SECRET, "ref_audio": SECRET})
        await client.socket.send(f'{{"type": "{SECRET}')
        await client.socket.send(SECRET.encode())
        await client.says(3)
        await client.send("response.create", response={"instructions": SECRET, "metadata": {"a": SECRET}})
        while (await client.recv()).kind != "response.done":
            pass
        spoken = [event.text("transcript") for event in client.got if event.kind.endswith("transcript.done")]
        await client.socket.send(SECRET.encode() + b"\xff", text=True)
        assert await client.closed() in (1006, 1007)
    async with connect(f"{url.replace('http', 'ws', 1)}/ws/duplex/a") as socket:
        demo = RawClient(socket)
        await demo.send("prepare", system_prompt=SECRET, ref_audio_base64=SECRET)
        assert await demo.closed() == 1008
    return spoken


def test_a_call_in_processes_leaves_no_word_and_no_sound_in_any_log(tiny_checkpoint: Path, tmp_path: Path) -> None:
    flags = ("--model", str(tiny_checkpoint), "--log-format", "json", *PLACES)
    with served(tmp_path, *flags) as (process, url, printed):
        spoken = asyncio.run(asyncio.wait_for(say_the_secret_everywhere(url), 60))
        process.send_signal(signal.SIGTERM)
        printed += [line.rstrip() for line in process.stdout or ()]
        assert process.wait(timeout=60) == 0
    log = (tmp_path / "log").read_text()
    assert "session opened" in {json.loads(line)["message"] for line in log.splitlines()}
    everything = log + "\n".join(printed)
    assert any(spoken)
    payload = base64.b64encode(base64.b64decode(sound(0))).decode()
    for said in (SECRET, SECRET.replace(" ", "%20"), payload[:40], *filter(None, spoken)):
        assert said not in everything, said
