"""The page's files as the server gives them: all there, under a strict policy, and nothing in them that it forbids."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from websockets import Subprotocol
from websockets.sync.client import connect

from antiphon.server.page import FOLDER, POLICY
from page.tabs import seeded
from server.servers import RunningServer, StartServer

ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())


@pytest.mark.parametrize("address", ["/", "/ops", "/page/app.js", "/page/style.css", "/page/audio/jitter.js"])
def test_every_file_comes_under_a_strict_policy(running: RunningServer, address: str) -> None:
    answer = httpx.get(running.url + address)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not re.search("unsafe|https?:|[*]", POLICY)


def test_an_unchanged_file_is_not_sent_again(running: RunningServer) -> None:
    tag = httpx.get(f"{running.url}/page/app.js").headers["etag"]
    again = httpx.get(f"{running.url}/page/app.js", headers={"If-None-Match": tag})
    assert again.status_code == 304
    assert again.content == b""


@pytest.mark.parametrize(
    "address", ["/page/../server/page.py", "/page/%2e%2e/__init__.py", "/page/nothing.js", "/page/"]
)
def test_nothing_but_the_files_is_served(running: RunningServer, address: str) -> None:
    assert httpx.get(running.url + address).status_code == 404


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_names_another_host_or_takes_text_as_html(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    hosts = re.findall(r"(?:https?:)?//([\w.-]+\.\w+)", text)
    assert set(hosts) <= {"www.w3.org"}, hosts
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)


def test_every_test_that_a_module_names_exists() -> None:
    texts = [path.read_text(encoding="utf-8") for path in FILES if path.suffix == ".js"]
    named = {name for text in texts for name in re.findall(r"tests/page/[\w.]+\.py", text)}
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", ["index.html", "ops.html"])
def test_there_is_no_script_and_no_style_inside_a_document(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]* src=)", text) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", text) == []


def test_who_would_be_let_in_is_told_what_there_is(running: RunningServer) -> None:
    offer = httpx.get(f"{running.url}/page/offer").json()
    assert offer["has_random_weights"] is True
    assert offer["window"]["mode"] == "basic"
    assert offer["window"]["high_tokens"] == 400


def test_who_would_not_be_let_in_is_told_why(start_server: StartServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("right\n")
    with start_server(seeded, api_keys_file=str(keys), max_calls_per_key="1") as running:
        address = f"{running.url}/page/offer"
        assert httpx.get(address).json()["error"]["code"] == "invalid_api_key"
        key = {"Authorization": "Bearer right"}
        assert httpx.get(address, headers=key).status_code == 200
        protocols = [Subprotocol("realtime"), Subprotocol("openai-insecure-api-key.right")]
        with connect(f"{running.websocket_url}/v1/realtime", subprotocols=protocols) as call:
            assert call.subprotocol == "realtime"
            assert httpx.get(address, headers=key).json()["error"]["code"] == "too_many_calls"
