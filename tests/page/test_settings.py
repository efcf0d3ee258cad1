"""What a caller chooses: before a call, during it, what is refused, and a voice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any  # noqa: TID251 - events of any kind

from playwright.sync_api import expect

from page.tabs import LIMIT_MS, Tab, seeded
from server.servers import RunningServer, StartServer

ROOT = Path(__file__).parents[2]


def updates(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["session"] for event in log if event["type"] == "session.update"]


def test_the_window_of_a_call_changes_while_it_goes_on(tab: Tab, running: RunningServer) -> None:
    tab.open(running.url)
    tab.page.click("#settings summary")
    tab.call()
    tab.until("document.querySelector('#gauge-blocks-text').textContent !== '–'")
    assert tab.text("#gauge-mode") == "slides by tokens"
    assert tab.page.is_hidden("#apply")
    tab.page.select_option("#field-windowMode", "context")
    tab.page.fill("#field-maxUnits", "4")
    tab.page.click("#apply")
    expect(tab.page.locator("#settings-said")).to_have_text("In force.", timeout=LIMIT_MS)
    assert tab.text("#gauge-mode") == "slides by seconds, keeps words"
    tab.until("Number(document.querySelector('#figure-slides').textContent) > 0")
    tab.hang_up()
    log = tab.events()
    assert updates(log)[-1] == {
        "type": "realtime",
        "extra_body": {"sliding_window_mode": "context", "context_max_units": 4, "context_previous_max_tokens": 500},
    }
    assert any(event["type"] == "session.call_changed" for event in log)


def test_what_is_refused_is_told_and_the_call_goes_on_as_it_was(tab: Tab, running: RunningServer) -> None:
    tab.open(running.url)
    tab.page.click("#settings summary")
    tab.call()
    tab.until("document.querySelector('#gauge-blocks-text').textContent !== '–'")
    tab.page.fill("#field-lowTokens", "200")
    tab.page.fill("#field-highTokens", "100")
    tab.page.click("#apply")
    expect(tab.page.locator("#settings-said")).to_contain_text("Refused:", timeout=LIMIT_MS)
    tab.page.fill("#field-highTokens", "350")
    tab.page.click("#apply")
    expect(tab.page.locator("#settings-said")).to_have_text("In force.", timeout=LIMIT_MS)
    tab.hang_up()


def test_what_was_chosen_before_a_call_is_what_it_begins_with(tab: Tab, running: RunningServer) -> None:
    tab.open(running.url)
    tab.page.click("#settings summary")
    tab.page.fill("#field-instructions", "Be brief.")
    tab.page.select_option("#field-answers", "stopped")
    tab.page.fill("#field-seed", "7")
    tab.page.reload()
    tab.until("!document.querySelector('#call').disabled")
    tab.call()
    tab.until("!document.querySelector('#save-log').disabled")
    tab.hang_up()
    (session,) = updates(tab.events())
    assert session["instructions"] == "Be brief."
    assert session["extra_body"] == {
        "sliding_window_mode": "basic",
        "basic_window_high_tokens": 400,
        "basic_window_low_tokens": 300,
        "listen_scale": 1,
        "report_units": True,
        "seed": 7,
    }
    assert '"server_vad"' in json.dumps(session["audio"])


def test_where_only_the_button_asks_the_model_is_silent_until_then(tab: Tab, running: RunningServer) -> None:
    tab.open(running.url)
    tab.page.click("#settings summary")
    tab.page.select_option("#field-answers", "asked")
    tab.call()
    # By then it would have answered by itself.
    tab.until("/ [5-9] s$/.test(document.querySelector('#gauge-ring-text').textContent)")
    assert tab.page.locator("#captions .turn").count() == 0
    tab.page.click("#answer")
    tab.until_phase("speaking")
    tab.hang_up()


def test_presets_choose_several_things_at_once(tab: Tab, running: RunningServer) -> None:
    tab.open(running.url)
    tab.page.click("#settings summary")
    tab.page.select_option("#preset", "repeatable")
    assert tab.page.input_value("#field-temperature") == "0"
    assert tab.page.input_value("#field-seed") == "1"
    tab.page.select_option("#preset", "remembersWords")
    assert tab.page.input_value("#field-seed") == ""
    assert tab.page.input_value("#field-windowMode") == "context"
    assert tab.page.is_visible("#field-maxUnits")
    assert tab.page.is_hidden("#field-highTokens")


def test_where_a_call_may_not_change_the_form_says_so(tab: Tab, load_server: StartServer) -> None:
    with load_server(seeded, keeps_inputs="false") as running:
        tab.open(running.url)
        tab.page.click("#settings summary")
        tab.call()
        tab.until("document.querySelector('#field-instructions').disabled")
        assert tab.page.is_enabled("#field-answers")
        assert "Before a call only." in tab.text("#settings-form")
        tab.hang_up()


def test_a_voice_from_a_file_stays_chosen_until_it_is_given_back(tab: Tab, running: RunningServer) -> None:
    tab.open(running.url)
    tab.page.click("#settings summary")
    tab.page.set_input_files("#voice-file", ROOT / "examples" / "caller.flac")
    expect(tab.page.locator("#voice-name")).to_have_text("caller.flac")
    tab.page.select_option("#language", "zh")
    tab.page.select_option("#language", "en")
    expect(tab.page.locator("#voice-name")).to_have_text("caller.flac")
    tab.page.click("#voice-own")
    expect(tab.page.locator("#voice-name")).to_have_text("The server's own voice")


def test_a_voice_that_is_recorded_here_can_be_heard_and_is_taken(tab: Tab, running: RunningServer) -> None:
    tab.open(running.url)
    tab.page.click("#settings summary")
    tab.page.click("#voice-record")
    expect(tab.page.locator("#voice-record")).to_contain_text("(2 s)", timeout=LIMIT_MS)
    tab.page.click("#voice-record")
    tab.until("document.querySelector('#settings-form audio').duration > 1.5")
    tab.call()
    tab.until("document.querySelector('#gauge-blocks-text').textContent !== '–'")
    assert tab.number("#gauge-anchor-text") > 50
    tab.hang_up()
    log = tab.events()
    assert "ref_audio" in updates(log)[0]
    assert not any(event["type"] == "error" for event in log)
