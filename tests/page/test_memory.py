"""The gauge and the panel: what they say follows from what the server reports."""

from __future__ import annotations

from page.tabs import Tab
from server.servers import RunningServer


def test_the_gauge_knows_when_the_window_slides(modules: Tab) -> None:
    assert modules.run(
        list[float],
        "call/memory.js",
        "Memory",
        """
        const limits = { max_tokens: 8000, high_tokens: 400, low_tokens: 300, max_units: 24, previous_max_tokens: 500 };
        const memory = new Memory({ mode: "basic", ...limits });
        memory.hear({ type: "session.opened", prompt_tokens: 40, is_prompt_shared: true });
        const unit = (context_tokens, retained_units) =>
            memory.hear({ type: "session.unit_decided", context_tokens, context_blocks: 4, retained_units });
        for (let number = 1; number <= 6; number += 1) unit(40 + 20 * number, number);
        const basic = [memory.ringTokens, memory.limitTokens, memory.fullInS];
        memory.change({ mode: "context", ...limits }, true);
        const context = [memory.limitTokens, memory.fullInS, memory.anchorTokens];
        memory.hear({ type: "session.window_slid", context_tokens: 100, previous_tokens: 12 });
        return [...basic, ...context, memory.numSlides, memory.ringTokens];
        """,
    ) == [120, 400, 12, 520, 18, 40, 1, 48]


def test_the_panel_is_about_this_call(tab: Tab, running: RunningServer) -> None:
    tab.open(running.url)
    assert {tab.text(f"#figure-{name}") for name in ("unit", "first", "round", "lead", "prompt")} == {"–"}
    tab.call()
    tab.until("document.querySelector('#figure-unit').textContent.endsWith('ms')")
    tab.until("document.querySelector('#figure-round').textContent.endsWith('ms')")
    assert tab.text("#figure-prompt") in ("yes", "no")
    assert tab.number("#gauge-anchor-text") > 0
    assert tab.text("#gauge-total").endswith("of 400 tokens")
    tab.hang_up()
    tab.call()
    # Another call has left its prompt in the cache by now.
    tab.until("document.querySelector('#figure-prompt').textContent === 'yes'")
    assert tab.text("#gauge-anchor-text").endswith("shared")
    tab.hang_up()
