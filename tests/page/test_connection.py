"""A network that is cut in the midst of a call: the call goes on, and no word of either side is lost."""

from __future__ import annotations

import io
from collections.abc import Callable
from time import monotonic

import httpx
import numpy as np
import soundfile

from page.network import network
from page.tabs import LIMIT_MS, Tab, seeded
from server.servers import RunningServer, StartServer

NETWORK_ERRORS = "WebSocket|ERR_|Failed to load"


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
        log = tab.events()
    numbers = [event["server_event_seq"] for event in log if event["from"] == "server" and "server_event_seq" in event]
    assert numbers == list(range(1, len(numbers) + 1))
    kinds = [event["type"] for event in log]
    assert "session.resumed" in kinds
    assert "error" not in kinds
    assert seconds_heard(running) >= heard_before


def test_what_is_said_while_the_network_is_away_is_heard_afterwards_once(tab: Tab, start_server: StartServer) -> None:
    tab.allow(NETWORK_ERRORS)
    with start_server(seeded) as running, network(running.url) as between:
        tab.open(between.url)
        tab.call()
        tab.page.evaluate("window.startedAt = performance.now()")
        tab.until("/ [4-9] s$/.test(document.querySelector('#gauge-ring-text').textContent)")
        between.cut()
        tab.until_phase("away")
        tab.page.fill("#typed", "words into the dark")
        tab.page.click("#type-send")
        # As much of the caller's sound belongs to the time without a network.
        cut_s = elapsed_s(tab)
        wait_for(lambda: elapsed_s(tab) > cut_s + 4)
        between.mend()
        tab.until("['listening', 'speaking'].includes(document.body.dataset.phase)")
        # Late, and complete: whatever is lost now would be missing for ever, whatever comes twice be too much.
        wait_for(lambda: seconds_heard(running) > elapsed_s(tab) - 2)
        mended_s = elapsed_s(tab)
        wait_for(lambda: elapsed_s(tab) > mended_s + 2)
        assert seconds_heard(running) < elapsed_s(tab) + 1
        tab.hang_up()
        log = tab.events()
    kinds = [event["type"] for event in log]
    assert kinds.count("input.text.append") == 1
    assert "error" not in kinds


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


def elapsed_s(tab: Tab) -> float:
    """Since the call began."""
    return float(tab.page.evaluate("(performance.now() - window.startedAt) / 1000"))


def wait_for(condition: Callable[[], bool]) -> None:
    """Raises: AssertionError if it does not come about."""
    ends_s = monotonic() + LIMIT_MS / 1000
    while not condition():
        assert monotonic() < ends_s, "it never came about"
