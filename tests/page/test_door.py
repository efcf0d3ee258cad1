"""Why a call does not come about, said so that a caller knows what to do; and that it does when that has passed."""

from __future__ import annotations

from pathlib import Path

import uvicorn
from playwright.sync_api import Browser, expect

from antiphon.loading import Running
from antiphon.server.run import bound_socket
from antiphon.server.waiting import waiting_page
from page.looking import picture, serious_issues
from page.tabs import LIMIT_MS, Tab, seeded
from server.servers import RunningServer, StartServer, running_server, tiny_settings

REFUSED = "Failed to load resource"


def test_a_server_with_keys_asks_for_one_and_says_if_it_is_wrong(
    tab: Tab, start_server: StartServer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("right\n")
    tab.allow(REFUSED)
    with start_server(seeded, api_keys_file=str(keys)) as running:
        tab.open(running.url)
        assert tab.text("#problem-title") == "This server asks for a key"
        tab.page.fill("#key", "wrong")
        tab.page.click("#key-form button")
        expect(tab.page.locator("#problem-title")).to_have_text("This key is not accepted", timeout=LIMIT_MS)
        tab.page.fill("#key", "right")
        tab.page.click("#key-form button")
        expect(tab.page.locator("#problem")).to_be_hidden(timeout=LIMIT_MS)
        tab.call()
        tab.hang_up()


def test_a_full_server_says_so_and_takes_the_call_when_it_is_not(tab: Tab, start_server: StartServer) -> None:
    tab.allow(REFUSED)
    with start_server(seeded, max_calls_per_key="1") as running:
        other = Tab(tab.page.context.new_page())
        other.watch()
        other.open(running.url)
        other.call()
        tab.open(running.url)
        assert tab.text("#problem-title") == "Every line is taken"
        picture(tab, "full")
        assert serious_issues(tab.page) == []
        other.hang_up()
        # The place is free a moment after the other has hung up.
        tab.until("(document.querySelector('#retry').click(), document.querySelector('#problem').hidden)")
        tab.call()
        tab.hang_up()


def test_a_server_that_went_away_is_asked_again_until_it_answers(tab: Tab, running: RunningServer) -> None:
    tab.allow(f"{REFUSED}|ERR_")
    tab.open(running.url)
    tab.page.context.set_offline(True)
    tab.page.click("#call")
    expect(tab.page.locator("#problem-title")).to_have_text("The server does not answer", timeout=LIMIT_MS)
    assert tab.page.is_disabled("#call")
    tab.page.context.set_offline(False)
    expect(tab.page.locator("#problem")).to_be_hidden(timeout=LIMIT_MS)
    tab.call()
    tab.hang_up()


def test_who_gives_no_microphone_is_told_how_to_go_on_and_may_go_on_without(
    browser: Browser, running: RunningServer
) -> None:
    context = browser.new_context(locale="en-US")
    tab = Tab(context.new_page())
    tab.watch()
    # As a browser does it where somebody says no.
    tab.page.add_init_script(
        "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('', 'NotAllowedError'); };"
    )
    tab.open(running.url)
    tab.page.click("#call")
    expect(tab.page.locator("#problem-title")).to_have_text("The microphone is not allowed", timeout=LIMIT_MS)
    tab.page.click("#without")
    tab.until("document.querySelector('#figure-unit').textContent.endsWith('ms')")
    assert tab.page.is_enabled("#typed")
    tab.hang_up()
    context.close()
    tab.check()


def test_an_address_without_https_is_explained(tab: Tab, running: RunningServer) -> None:
    tab.open(running.url.replace("127.0.0.1", "insecure.test"))
    tab.page.click("#call")
    expect(tab.page.locator("#problem-title")).to_have_text("Your browser gives no sound to this address")
    assert tab.page.is_hidden("#without")


def test_a_server_that_stops_ends_the_call_with_its_reason(tab: Tab, start_server: StartServer) -> None:
    tab.allow(f"{REFUSED}|ERR_|WebSocket")
    with start_server(seeded, drain_s="0", resume_s="1") as running:
        tab.open(running.url)
        tab.call()
        running.stop()
        tab.until_phase("over")
        assert "connection was away for too long" in tab.text("#hint")
        assert tab.page.is_enabled("#save-log")


def test_a_server_that_is_loading_says_how_far_it_is_and_the_page_goes_on_by_itself(
    tab: Tab, engine: Running, tiny_checkpoint: Path
) -> None:
    tab.allow(f"{REFUSED}|ERR_")
    with bound_socket("127.0.0.1", 0) as listening:
        port = str(listening.getsockname()[1])
        with waiting_page(listening, 4, uvicorn.Config, lambda _: None) as tell:
            tell("loading bfloat16")
            tab.open(f"http://127.0.0.1:{port}")
            assert tab.text("#problem-title") == "The model is loading"
            assert tab.text("#problem-do").startswith("loading bfloat16")
            tell("almost there")
            expect(tab.page.locator("#problem-do")).to_contain_text("almost there", timeout=LIMIT_MS)
    with running_server(tiny_settings(tiny_checkpoint, port=port), engine, seeded):
        expect(tab.page.locator("#problem")).to_be_hidden(timeout=LIMIT_MS)
        tab.call()
        tab.hang_up()
