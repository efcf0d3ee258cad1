"""A call in a browser: somebody speaks, is heard, hears, reads along, and interrupts."""

from __future__ import annotations

import io

import numpy as np
import soundfile

from page.tabs import Tab
from server.servers import RunningServer

RECORD_HZ = 24_000


def lanes_drawn(tab: Tab) -> set[str]:
    """Those of the time line that show something."""
    return set(
        tab.page.evaluate(
            """() => {
                const canvas = document.querySelector('#timeline');
                const style = getComputedStyle(canvas);
                const hex = ['caller', 'model'].map((lane) => [lane, style.getPropertyValue(`--line-${lane}`)]);
                const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
                const seen = new Set();
                for (let i = 0; i < data.length; i += 4) {
                    seen.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
                }
                return hex.filter(([, value]) => seen.has(parseInt(value.slice(1), 16))).map(([lane]) => lane);
            }"""
        )
    )


def test_the_page_talks_draws_it_and_what_it_played_is_in_its_recording(tab: Tab, running: RunningServer) -> None:
    tab.allow("willReadFrequently")
    tab.open(running.url)
    assert lanes_drawn(tab) == set()
    tab.call()
    tab.until_phase("speaking")
    tab.until("document.querySelector('#captions .turn.model .heard').textContent.length > 3")
    tab.until_phase("listening")
    assert lanes_drawn(tab) == {"caller", "model"}
    tab.hang_up()
    sound, rate_hz = soundfile.read(io.BytesIO(tab.saved("#save-audio")), dtype="float32")
    caller, model = sound.T
    assert rate_hz == RECORD_HZ
    assert np.abs(caller).max() > 0.05
    assert np.abs(model).max() > 0.02
    # It was silent before it spoke.
    assert np.abs(model[:RECORD_HZ]).max() == 0
    said = tab.page.text_content("#captions .turn.model .heard")
    assert said is not None
    assert said.strip() in tab.saved("#save-text").decode()
    assert tab.saved("#save-vtt").startswith(b"WEBVTT\n\n00:00:")


def test_an_interruption_silences_the_model_at_once_and_the_next_call_begins_anew(
    tab: Tab, running: RunningServer
) -> None:
    tab.open(running.url)
    tab.call()
    tab.until_phase("speaking")
    tab.page.keyboard.press("Escape")
    tab.until_phase("listening")
    assert tab.number("#figure-interruptions") == 1
    tab.until("document.querySelector('#captions .turn.model[data-cut]') !== null")
    tab.hang_up()
    log = tab.events()
    asked = next(event["at_ms"] for event in log if event["type"] == "barge_in")
    acks = [event for event in log if event["type"] == "playback.ack" and event["truncate"]]
    assert len(acks) == 1
    assert acks[0]["at_ms"] - asked < 1000
    assert not any(event["type"] == "error" for event in log), log
    done = [event["response"]["status"] for event in log if event["type"] == "response.done"]
    assert "cancelled" in done
    assert tab.text("#call") == "Talk again"
    tab.call()
    assert tab.page.locator("#captions .turn").count() == 0
    tab.hang_up()
