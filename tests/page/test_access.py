"""For everybody: screen readers, keyboards, phones, the dark, two languages."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from antiphon.server.page import FOLDER
from page.looking import picture, serious_issues
from page.tabs import Tab
from server.servers import RunningServer

PHONE: ViewportSize = {"width": 390, "height": 844}
DESK: ViewportSize = {"width": 1280, "height": 900}


@pytest.fixture(params=["light", "dark", "phone", "zh"])
def look(browser: Browser, request: pytest.FixtureRequest) -> Iterator[tuple[str, Tab]]:
    """A way to look at the page, by name."""
    name = request.param
    context = browser.new_context(
        locale="zh-CN" if name == "zh" else "en-US",
        viewport=PHONE if name == "phone" else DESK,
        color_scheme="dark" if name == "dark" else "light",
        device_scale_factor=2 if name == "phone" else 1,
        has_touch=name == "phone",
    )
    tab = Tab(context.new_page())
    tab.watch()
    yield name, tab
    context.close()
    tab.check()


def test_no_state_of_a_call_has_a_serious_issue(look: tuple[str, Tab], running: RunningServer) -> None:
    name, tab = look
    tab.open(running.url)
    picture(tab, f"idle-{name}")
    assert serious_issues(tab.page) == []
    tab.page.click("#settings summary")
    tab.page.click("#devices summary")
    tab.call()
    tab.until("document.querySelector('#level-caller').value > 0.3")
    picture(tab, f"listening-{name}")
    tab.until("document.querySelector('#captions .heard')?.textContent.length > 5")
    picture(tab, f"speaking-{name}")
    assert serious_issues(tab.page) == []
    tab.hang_up()
    assert serious_issues(tab.page) == []
    assert not is_wider_than_the_screen(tab.page)
    tab.page.goto(f"{running.url}/ops")
    expect(tab.page.locator("#ready")).not_to_be_empty()
    expect(tab.page.locator(".histogram")).to_have_count(6)
    picture(tab, f"ops-{name}")
    assert serious_issues(tab.page) == []
    assert not is_wider_than_the_screen(tab.page)


def is_wider_than_the_screen(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


def test_a_call_needs_no_mouse(tab: Tab, running: RunningServer) -> None:
    def focused() -> str:
        return str(tab.page.evaluate("document.activeElement.id || document.activeElement.textContent"))

    tab.open(running.url)
    tab.page.keyboard.press("Space")
    tab.until("['listening', 'speaking'].includes(document.body.dataset.phase)")
    tab.page.keyboard.press("m")
    tab.until("document.querySelector('#mute').getAttribute('aria-pressed') === 'true'")
    tab.page.keyboard.press("m")
    seen = []
    for _ in range(12):
        tab.page.keyboard.press("Tab")
        seen.append(focused())
    assert seen[:4] == ["Skip to the conversation", "language", "Operation", "call"]
    assert "timeline" in seen
    assert tab.page.locator("#microphone option").count() > 1
    tab.page.focus("#timeline")
    tab.until("Number(document.querySelector('#timeline').width) > 0")
    tab.page.keyboard.press("-")
    tab.page.keyboard.press("+")
    tab.page.evaluate("document.activeElement.blur()")
    tab.page.keyboard.press("Space")
    tab.until_phase("over")


def test_the_page_speaks_the_language_that_is_chosen_and_keeps_it(tab: Tab, running: RunningServer) -> None:
    tab.open(running.url)
    assert tab.text("#call") == "Start talking"
    tab.page.select_option("#language", "zh")
    assert tab.page.get_attribute("html", "lang") == "zh"
    tab.until("document.querySelector('#call').textContent === '开始对话'")
    tab.page.reload()
    tab.until("document.querySelector('#call').textContent === '开始对话'")


def test_both_languages_say_the_same_things(modules: Tab) -> None:
    english, chinese = (
        modules.run(dict[str, str], f"words/{name}.js", words, f"return {words};")
        for name, words in (("en", "EN"), ("zh", "ZH"))
    )
    assert english.keys() == chinese.keys()
    values = re.compile(r"\{\w+\}")
    assert {key: sorted(values.findall(text)) for key, text in english.items()} == {
        key: sorted(values.findall(text)) for key, text in chinese.items()
    }


def test_every_word_that_the_page_names_is_there(modules: Tab) -> None:
    words = modules.run(dict[str, str], "words/en.js", "EN", "return EN;")
    files = [path.read_text(encoding="utf-8") for path in FOLDER.rglob("*") if path.suffix in (".js", ".html")]
    named = {name for text in files for name in re.findall(r'data-(?:t|t-label|t-hint|title)="([\w.]+)"', text)}
    named |= {name for text in files for name in re.findall(r'\bt\("([\w.]+)"', text)}
    assert len(named) > 60
    assert named <= words.keys(), named - words.keys()
