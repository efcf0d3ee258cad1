"""A server from its start to its end, over real sockets."""

from __future__ import annotations

import json
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from antiphon.errors import CheckpointError, ConfigError
from antiphon.server.run import bound_socket, serve
from antiphon.server.settings import from_flags, resolve
from server.servers import StartServer, echo_app
from server.vad.networks import write_network


def refused(url: str, **headers: str) -> tuple[int, str]:
    """HTTP status and code of a handshake that must be refused."""
    with pytest.raises(InvalidStatus) as refusal, connect(url, additional_headers=headers):
        pass
    body = json.loads(refusal.value.response.body or b"")
    return refusal.value.response.status_code, body["error"]["code"]


def close_code(client: ClientConnection) -> int:
    with pytest.raises(ConnectionClosed) as closed:
        client.recv(timeout=30)
    assert closed.value.rcvd is not None, "the connection was cut without a close frame"
    return closed.value.rcvd.code


def reasons(url: str) -> list[str]:
    answer: list[str] = httpx.get(f"{url}/ready").json()["reasons"]
    return answer


def test_a_server_says_that_it_is_alive_and_ready(start_server: StartServer) -> None:
    with start_server(echo_app) as server:
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "reasons": []}
        ready = httpx.get(f"{server.url}/ready")
        assert ready.status_code == 200
        assert ready.json() == {"status": "ready", "reasons": [], "calls": {"now": 0, "most": 4}}


def test_a_caller_needs_a_key_where_there_are_keys(start_server: StartServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("right\n")
    with start_server(echo_app, api_keys_file=str(keys)) as server:
        url = f"{server.websocket_url}/echo"
        assert refused(url) == (401, "invalid_api_key")
        assert refused(url, Authorization="Bearer wrong") == (401, "invalid_api_key")
        with connect(url, additional_headers={"Authorization": "Bearer right"}) as client:
            client.send("hello")
            assert client.recv(timeout=10) == "hello"
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'antiphon_refusals_total{code="invalid_api_key"} 2.0' in metrics


def test_a_foreign_page_may_not_call(start_server: StartServer) -> None:
    with start_server(echo_app, allowed_origins="https://good.example") as server:
        url = f"{server.websocket_url}/echo"
        assert refused(url, Origin="https://bad.example") == (403, "origin_not_allowed")
        for origin in ("https://good.example", server.url):
            with connect(url, additional_headers={"Origin": origin}):
                pass


def test_a_key_has_only_so_many_calls_at_once(start_server: StartServer) -> None:
    with start_server(echo_app, max_calls_per_key="1") as server:
        url = f"{server.websocket_url}/echo"
        with connect(url) as client:
            client.send("hello")
            client.recv(timeout=10)
            assert refused(url) == (503, "too_many_calls")


def test_messages_are_counted_in_bytes_both_ways(start_server: StartServer) -> None:
    with start_server(echo_app) as server:
        with connect(f"{server.websocket_url}/echo") as client:
            client.send("né")
            client.recv(timeout=10)
        text = httpx.get(f"{server.url}/metrics").text
    for direction in ("in", "out"):
        assert f'antiphon_websocket_bytes_total{{direction="{direction}"}} 3.0' in text


def test_a_message_over_the_limit_closes_its_connection_and_no_other(start_server: StartServer) -> None:
    with start_server(echo_app, max_message_bytes="100") as server:
        url = f"{server.websocket_url}/echo"
        with connect(url) as other, connect(url) as client:
            client.send("x" * 101)
            assert close_code(client) == 1009
            other.send("x" * 100)
            assert other.recv(timeout=10) == "x" * 100


def test_a_stopping_server_lets_nobody_in_and_lets_who_is_inside_finish(start_server: StartServer) -> None:
    with start_server(echo_app, drain_s="60") as server:
        url = f"{server.websocket_url}/echo"
        with connect(url) as client:
            client.send("hello")
            client.recv(timeout=10)
            server.stop()
            while not reasons(server.url):
                pass
            assert reasons(server.url) == ["the server is stopping"]
            assert httpx.get(f"{server.url}/health").status_code == 200
            assert refused(url) == (503, "draining")
            client.send("still here")
            assert client.recv(timeout=10) == "still here"


def test_a_call_that_does_not_finish_in_time_is_told_to_come_back(start_server: StartServer) -> None:
    with start_server(echo_app, drain_s="0.2") as server, connect(f"{server.websocket_url}/echo") as client:
        client.send("hello")
        client.recv(timeout=10)
        server.stop()
        assert close_code(client) == 1012


def test_a_second_signal_ends_calls_at_once(start_server: StartServer) -> None:
    with start_server(echo_app, drain_s="3600") as server, connect(f"{server.websocket_url}/echo") as client:
        client.send("hello")
        client.recv(timeout=10)
        server.stop()
        server.stop()
        assert close_code(client) == 1012


def test_with_a_certificate_the_server_speaks_tls(start_server: StartServer, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*make.split(), "-out", certificate, "-keyout", key], check=True, capture_output=True)
    with start_server(echo_app, tls_certificate_file=str(certificate), tls_key_file=str(key)) as server:
        assert server.url.startswith("https://")
        with httpx.Client(verify=ssl.create_default_context(cafile=certificate)) as client:
            assert client.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"api_keys_file": "/none/keys"}, "cannot be read"),
        ({"tls_certificate_file": "/none/a", "tls_key_file": "/none/b"}, "no certificate"),
        ({"host": "999.0.0.1"}, "nobody can listen"),
        ({"vad_model": "/none/silero.onnx"}, "vad_model /none/silero.onnx cannot be loaded"),
    ],
)
def test_what_needs_no_checkpoint_is_refused_before_one_is_opened(options: dict[str, str], complaint: str) -> None:
    said: list[str] = []
    with pytest.raises(ConfigError, match=complaint):
        serve(resolve(from_flags({"model": "/none", "port": "0", **options})), echo_app, said.append)
    assert not [line for line in said if line.startswith("opening")]


def test_the_start_says_what_tells_speech(tmp_path: Path) -> None:
    file = write_network(tmp_path / "silero_vad.onnx")
    for vad_model, name in (("", "energy"), (str(file), f"silero in {file}")):
        said: list[str] = []
        options = {"model": "/none", "port": "0", "vad_model": vad_model}
        with pytest.raises(CheckpointError):
            serve(resolve(from_flags(options)), echo_app, said.append)
        assert f"server_vad hears speech by {name}" in said


def test_a_port_that_is_taken_is_told_before_anything_is_loaded() -> None:
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"), bound_socket("127.0.0.1", port):
            pass
