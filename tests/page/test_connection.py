"""A network that is cut in the midst of a call: the call goes on, and no word of either side is lost."""

from __future__ import annotations

import io
import json

import httpx
import numpy as np
import soundfile

from page.network import network
from page.tabs import Tab, seeded
from server.servers import RunningServer, StartServer

NETWORK_ERRORS = "WebSocket|ERR_|Failed to load"


def events_of(tab: Tab) -> list[dict[str, object]]:
    return [json.loads(line) for line in tab.saved("#save-log").splitlines()]


def test_a_cut_call_goes_on_where_it_was(tab: Tab, running: RunningServer) -> None:
    tab.allow(NETWORK_ERRORS)
    with network(running.url) as between:
        tab.open(between.url)
        tab.call()
        tab.until_phase("speaking")
        between.cut()
        tab.until_phase("away")
        assert tab.text("#hint").startswith("Coming back")
        heard_before = seconds_heard(running)
        between.mend()
        tab.until("['listening', 'speaking'].includes(document.body.dataset.phase)")
        tab.until("document.querySelector('#gauge-ring-text').textContent !== '–'")
        tab.hang_up()
        log = events_of(tab)
    numbers = [event["server_event_seq"] for event in log if event["from"] == "server" and "server_event_seq" in event]
    assert numbers == list(range(1, len(numbers) + 1))
    kinds = [event["type"] for event in log]
    assert "session.resumed" in kinds
    assert "error" not in kinds
    assert seconds_heard(running) >= heard_before


def test_what_is_said_while_the_network_is_away_is_heard_afterwards(tab: Tab, start_server: StartServer) -> None:
    tab.allow(NETWORK_ERRORS)
    with start_server(seeded) as running, network(running.url) as between:
        tab.open(between.url)
        tab.call()
        tab.until("document.querySelector('#gauge-blocks-text').textContent !== '–'")
        between.cut()
        tab.until_phase("away")
        tab.page.fill("#typed", "words into the dark")
        tab.page.click("#type-send")
        # Some seconds of the caller's sound belong to the time without a network.
        tab.until("document.querySelector('#level-caller').value > 0")
        tab.page.evaluate("() => { window.cutAt = performance.now(); }")
        tab.until("performance.now() - window.cutAt > 3000")
        between.mend()
        tab.until("['listening', 'speaking'].includes(document.body.dataset.phase)")
        tab.until("document.querySelector('#figure-round').textContent.endsWith('ms')")
        tab.hang_up()
        sound, rate_hz = soundfile.read(io.BytesIO(tab.saved("#save-audio")))
        said_s = len(sound) / rate_hz
        log = events_of(tab)
        resumed = next(event for event in log if event["type"] == "session.resumed")
        taken = resumed["received_client_events"]
        assert isinstance(taken, int)
        typed = [event for event in log if event["type"] == "input.text.append"]
        assert len(typed) == 1
        # All of it was heard, but for the second that is never complete, and what was under way at the end.
        assert seconds_heard(running) >= said_s - 3.0
        assert "error" not in [event["type"] for event in log]


def test_a_network_that_does_not_come_back_ends_the_call_and_keeps_what_was_said(
    tab: Tab, start_server: StartServer
) -> None:
    tab.allow(NETWORK_ERRORS)
    with start_server(seeded, resume_s="1") as running, network(running.url) as between:
        tab.open(between.url)
        tab.call()
        tab.until("document.querySelector('#gauge-blocks-text').textContent !== '–'")
        between.cut()
        tab.until_phase("over")
        assert tab.text("#hint").startswith("The connection was away for too long")
        sound, _ = soundfile.read(io.BytesIO(tab.saved("#save-audio")))
        assert np.abs(sound).max() > 0.01


def seconds_heard(running: RunningServer) -> float:
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("antiphon_units_total{"))
