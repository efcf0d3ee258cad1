"""The demo's protocol over a real socket: what its front ends send, and what they get."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from PIL import Image
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

import build
from antiphon.server.app import build_app
from server.servers import StartServer

Message = dict[str, object]


@pytest.fixture
def address(start_server: StartServer) -> Iterator[str]:
    with start_server(lambda host: build_app(host, draw_seed=lambda: 0)) as running:
        yield running.url.removeprefix("http://")


@contextmanager
def client(address: str, session_id: str = "a") -> Iterator[ClientConnection]:
    with connect(f"ws://{address}/ws/duplex/{session_id}", max_size=2**27) as socket:
        assert receive(socket) == {"type": "queue_done"}
        yield socket


def receive(socket: ClientConnection) -> Message:
    message: Message = json.loads(socket.recv(timeout=30))
    return message


def ask(socket: ClientConnection, **message: object) -> Message:
    """Send a message and take the next one."""
    socket.send(json.dumps(message))
    return receive(socket)


def prepare(socket: ClientConnection, **more: object) -> Message:
    return ask(socket, type="prepare", system_prompt="Be kind.", config={"generate_audio": True}, **more)


def base64_of(samples: object) -> str:
    return base64.b64encode(np.asarray(samples, "<f4").tobytes()).decode()


def hear(socket: ClientConnection, seed: int, **more: object) -> Message:
    return ask(socket, type="audio_chunk", audio_base64=base64_of(build.second(seed).samples.numpy()), **more)


def picture(width: int, height: int) -> str:
    file = io.BytesIO()
    Image.effect_noise((width, height), 60).convert("RGB").save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


def test_every_second_gets_one_result_and_what_is_spoken_is_heard(address: str) -> None:
    with client(address) as socket:
        prepared = prepare(socket)
        assert prepared == {"type": "prepared", "prompt_length": 8, "recording_session_id": "a"}
        results = [hear(socket, unit) for unit in range(8)]
        assert ask(socket, type="stop") == {"type": "stopped"}
    assert [result["type"] for result in results] == ["result"] * 8
    assert [result["current_time"] for result in results] == list(range(8))
    spoken = [result for result in results if not result["is_listen"]]
    assert spoken
    for result in results:
        sound = np.frombuffer(base64.b64decode(str(result["audio_data"])), "<f4")
        assert len(sound) >= 24_000 or result["end_of_turn"]
        assert (np.abs(sound).max(initial=0) > 0) <= (not result["is_listen"])
    assert any(result["text"] for result in spoken)
    assert results[0]["is_listen"]


def test_pictures_ride_along_and_lengthen_the_context(address: str) -> None:
    with client(address) as socket:
        prepare(socket)
        before = hear(socket, 0)["kv_cache_length"]
        after = hear(socket, 1, frame_base64_list=[picture(320, 240)])["kv_cache_length"]
        assert isinstance(before, int)
        assert isinstance(after, int)
        assert after - before >= 13 + 66


def test_a_second_can_be_forced_to_listen(address: str) -> None:
    with client(address) as socket:
        prepare(socket)
        assert all(hear(socket, unit, force_listen=True)["is_listen"] for unit in range(4))


def test_a_voice_given_as_sound_is_spoken_with_and_stands_in_the_prompt(address: str) -> None:
    voice = base64_of(0.1 * np.sin(np.arange(32_000) / 20))
    with client(address) as socket:
        prepare(socket)
        plain = hear(socket, 0)["kv_cache_length"]
    with client(address) as socket:
        assert prepare(socket, ref_audio_base64=voice)["type"] == "prepared"
        voiced = hear(socket, 0)["kv_cache_length"]
    assert isinstance(plain, int)
    assert isinstance(voiced, int)
    assert voiced - plain == 20, "two seconds of voice"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"type": "audio_chunk"}, "no audio_base64"),
        ({"type": "audio_chunk", "audio_base64": "?"}, "no base64"),
        ({"type": "audio_chunk", "audio_base64": "AAA="}, "no float32 samples"),
        ({"type": "audio_chunk", "audio_base64": base64_of([0.0] * 16_001)}, "16001 samples"),
        ({"type": "audio_chunk", "audio_base64": base64_of([float("nan")] * 16_000)}, "finite"),
        (
            {"type": "audio_chunk", "audio_base64": base64_of([0.0] * 16_000), "frame_base64_list": ["AAAA"]},
            "cannot be read",
        ),
        ({"type": "prepare"}, "prepared already"),
        ({"type": "sing"}, "sing"),
        ({"no": "type"}, "type"),
    ],
)
def test_a_bad_message_is_answered_and_the_session_goes_on(address: str, message: Message, error: str) -> None:
    with client(address) as socket:
        prepare(socket)
        refused = ask(socket, **message)
        assert refused["type"] == "error"
        assert error in str(refused["error"])
        assert hear(socket, 0)["type"] == "result"


def test_what_comes_before_prepare_is_refused(address: str) -> None:
    with client(address) as socket:
        assert "comes before prepare" in str(ask(socket, type="stop")["error"])
        assert prepare(socket)["type"] == "prepared"


def test_a_pause_refuses_sound_and_ends_with_resume_or_with_the_session(address: str) -> None:
    with client(address) as socket:
        prepare(socket)
        assert ask(socket, type="pause", timeout=60) == {"type": "paused", "timeout": 60.0}
        assert "paused" in str(hear(socket, 0)["error"])
        assert ask(socket, type="resume") == {"type": "resumed"}
        assert hear(socket, 0)["type"] == "result"
        assert ask(socket, type="pause", timeout=0.01)["type"] == "paused"
        assert receive(socket)["type"] == "timeout"
        with pytest.raises(ConnectionClosed):
            receive(socket)


def test_a_full_engine_says_so_and_a_place_is_free_as_soon_as_somebody_has_gone(address: str) -> None:
    with ExitStack() as inside:
        sockets = [inside.enter_context(client(address, str(number))) for number in range(4)]
        assert {str(prepare(socket)["type"]) for socket in sockets} == {"prepared"}
        with pytest.raises(InvalidStatus) as refused, client(address, "one_more"):
            pass
        assert refused.value.response.status_code == 503
        assert ask(sockets[0], type="stop")["type"] == "stopped"
        with pytest.raises(ConnectionClosed):
            receive(sockets[0])
        later = inside.enter_context(client_when_there_is_room(address))
        assert prepare(later)["type"] == "prepared"
        assert hear(sockets[1], 0)["type"] == "result"


@contextmanager
def client_when_there_is_room(address: str) -> Iterator[ClientConnection]:
    """The server leaves a call a moment after its client has seen the end."""
    for _ in range(100):
        try:
            with client(address, "later") as socket:
                yield socket
                return
        except InvalidStatus:
            continue
    raise AssertionError("no place became free")


def test_a_client_that_just_goes_frees_its_place(address: str) -> None:
    for _ in range(5):
        with client(address) as socket:
            prepare(socket)
            socket.send(json.dumps({"type": "audio_chunk", "audio_base64": base64_of([0.0] * 16_000)}))
            socket.socket.close()


def test_an_interruption_is_answered(address: str) -> None:
    with client(address) as socket:
        prepare(socket)
        hear(socket, 0)
        assert ask(socket, type="interrupt") == {"type": "interrupted"}
        assert hear(socket, 1)["type"] == "result"
