"""What is shown, typed and played to the model instead of spoken."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from page.tabs import Tab, seeded
from server.servers import RunningServer, StartServer

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["camera", "screen"])
def test_a_picture_a_second_goes_to_the_model_and_is_shown_to_the_caller(
    tab: Tab, running: RunningServer, kind: str
) -> None:
    tab.open(running.url)
    tab.call()
    tab.page.click(f"#{kind}")
    tab.until("document.querySelector('#preview').videoWidth > 0")
    tab.until("/^[2-9] /.test(document.querySelector('#num-pictures').textContent)")
    assert tab.page.get_attribute(f"#{kind}", "aria-pressed") == "true"
    tab.page.click(f"#{kind}")
    tab.until("document.querySelector('#pictures').hidden")
    tab.hang_up()
    log = tab.events()
    assert len([event for event in log if "video_frames" in event]) >= 2
    assert not any(event["type"] == "error" for event in log), log


def test_typed_words_are_told_and_stand_in_the_conversation_as_text(tab: Tab, running: RunningServer) -> None:
    tab.open(running.url)
    tab.call()
    words = "<img src=x onerror=alert(1)> & hello"
    tab.page.fill("#typed", words)
    tab.page.keyboard.press("Enter")
    assert tab.text("#captions .turn.caller .heard") == words
    assert tab.page.locator("#captions img").count() == 0
    tab.hang_up()
    assert words in tab.saved("#save-text").decode()


def test_a_recording_that_is_dropped_in_is_heard_instead_of_the_microphone(tab: Tab, running: RunningServer) -> None:
    tab.open(running.url)
    tab.call()
    file = base64.b64encode((ROOT / "examples" / "caller.flac").read_bytes()).decode()
    transfer = tab.page.evaluate_handle(
        """(file) => {
            const bytes = Uint8Array.from(atob(file), (character) => character.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], 'question.flac', { type: 'audio/flac' }));
            return transfer;
        }""",
        file,
    )
    tab.page.dispatch_event("body", "dragover", {"dataTransfer": transfer})
    assert tab.page.is_visible("#drop")
    tab.page.dispatch_event("body", "drop", {"dataTransfer": transfer})
    tab.until("document.querySelector('#captions .turn.caller .heard') !== null")
    assert tab.text("#captions .turn.caller .heard") == "Recording: question.flac"
    assert tab.page.is_hidden("#drop")
    tab.page.set_input_files("#file", ROOT / "README.md")
    tab.until("!document.querySelector('#problem').hidden")
    assert tab.text("#problem-title") == "This recording cannot be read"
    tab.hang_up()


def test_where_the_operator_takes_no_pictures_none_can_be_shown(tab: Tab, load_server: StartServer) -> None:
    with load_server(seeded, max_pictures="0") as running:
        tab.open(running.url)
        tab.call()
        assert tab.page.is_disabled("#camera")
        assert tab.page.is_disabled("#screen")
        tab.hang_up()
