"""A server whose engine is loading: the page is there, calls are refused, and then the same port takes them."""

from __future__ import annotations

import json
import socket

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from antiphon.server.run import bound_socket
from antiphon.server.waiting import waiting_page


def config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(app, log_config=None, access_log=False, ws="websockets-sansio")


def address(listening: socket.socket) -> str:
    return f"127.0.0.1:{listening.getsockname()[1]}"


def get(listening: socket.socket, path: str) -> httpx.Response:
    return httpx.get(f"http://{address(listening)}{path}")


def test_who_comes_too_early_sees_the_page_and_how_far_loading_is() -> None:
    said: list[str] = []
    with bound_socket("127.0.0.1", 0) as listening, waiting_page(listening, 8, config, said.append) as tell:
        tell("loading bfloat16")
        assert "<html" in get(listening, "/").text
        assert get(listening, "/health").json()["status"] == "loading"
        ready = get(listening, "/ready")
        assert ready.status_code == 503
        assert ready.json() == {
            "status": "not_ready",
            "reasons": ["the model is loading: loading bfloat16"],
            "calls": {"now": 0, "most": 8},
        }
        offer = get(listening, "/page/offer")
        assert offer.status_code == 503
        assert offer.json()["error"]["code"] == "loading"
        assert offer.json()["error"]["message"] == "loading bfloat16"
        assert "retry-after" in offer.headers
    assert said == ["loading bfloat16"]


def test_a_call_that_comes_too_early_is_refused_with_a_reason_to_come_again() -> None:
    with bound_socket("127.0.0.1", 0) as listening, waiting_page(listening, 1, config, lambda _: None):
        get(listening, "/health")
        with pytest.raises(InvalidStatus) as refusal, connect(f"ws://{address(listening)}/v1/realtime"):
            pass
    assert refusal.value.response.status_code == 503
    assert json.loads(refusal.value.response.body or b"")["error"]["code"] == "loading"


def test_the_port_stays_open_between_the_two_servers() -> None:
    with bound_socket("127.0.0.1", 0) as listening:
        with waiting_page(listening, 1, config, lambda _: None):
            get(listening, "/health")
        with socket.create_connection(listening.getsockname()), waiting_page(listening, 1, config, lambda _: None):
            assert get(listening, "/health").status_code == 200


def test_a_load_that_fails_takes_the_page_with_it() -> None:
    with bound_socket("127.0.0.1", 0) as listening:
        with pytest.raises(RuntimeError), waiting_page(listening, 1, config, lambda _: None):
            raise RuntimeError("no such checkpoint")
        taken = listening.getsockname()
    with pytest.raises(ConnectionRefusedError), socket.create_connection(taken):
        pass
