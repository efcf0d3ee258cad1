"""The operator's view is what /metrics says."""

from __future__ import annotations

import re

import httpx
from playwright.sync_api import expect

from page.tabs import LIMIT_MS, Tab, seeded
from server.servers import RunningServer, StartServer

TEXT = """
# HELP x_seconds A help with "quotes" 1
# TYPE x_seconds histogram
x_seconds_bucket{le="0.1",stage="a"} 2.0
x_seconds_bucket{le="0.2",stage="a"} 6.0
x_seconds_bucket{le="+Inf",stage="a"} 8.0
x_seconds_count{stage="a"} 8.0
x_seconds_bucket{le="0.1",stage="b"} 0.0
x_seconds_bucket{le="+Inf",stage="b"} 0.0
x_seconds_count{stage="b"} 0.0
y_total{code="a\\\\"b,c"} 1.5e+01
y_total{code="d"} 1.0
"""


def test_the_text_of_prometheus_is_read_as_it_is_meant(modules: Tab) -> None:
    assert modules.run(
        tuple[list[float], list[str], list[float], list[bool]],
        "metrics.js",
        "Metrics",
        f"""
        const metrics = new Metrics(`{TEXT}`);
        const a = metrics.histogram("x_seconds", {{ stage: "a" }});
        const b = metrics.histogram("x_seconds", {{ stage: "b" }});
        return [
            [metrics.sum("y_total"), metrics.sum("y_total", {{ code: "d" }}), metrics.sum("z")],
            metrics.all("y_total").map(({{ labels }}) => labels.code),
            [a.quantile(0.25), ...a.counts],
            [a.quantile(0.99) === Infinity, Number.isNaN(b.quantile(0.5))],
        ];
        """,
    ) == ([16, 1, 0], ['a"b,c', "d"], [0.1, 2, 4, 2], [True, True])


def test_the_operator_sees_a_call_come_and_somebody_be_refused(tab: Tab, start_server: StartServer) -> None:
    with start_server(seeded, max_calls_per_key="1") as running:
        tab.open(running.url)
        tab.call()
        tab.until("document.querySelector('#figure-unit').textContent.endsWith('ms')")
        assert httpx.get(f"{running.url}/page/offer").status_code == 503
        ops = tab.page.context.new_page()
        ops.goto(f"{running.url}/ops")
        expect(ops.locator("#call-counts")).to_have_text(re.compile("(listening|speaking)1"), timeout=LIMIT_MS)
        expect(ops.locator("#ready")).to_have_text("Ready for calls")
        expect(ops.locator("#refusals")).to_contain_text("too_many_calls")
        expect(ops.locator("#memory")).to_contain_text(re.compile(r"[1-9]\d* of \d+ used"))
        expect(ops.locator(".histogram").nth(1)).to_contain_text(re.compile(r"median \d+ ms"))
        running.stop()
        expect(ops.locator("#ready")).to_have_text("Not ready: the server is stopping", timeout=LIMIT_MS)
        ops.close()
        tab.hang_up()


def test_a_server_that_is_gone_is_said_to_be(tab: Tab, start_server: StartServer) -> None:
    tab.allow("ERR_")
    with start_server(seeded) as running:
        tab.page.goto(f"{running.url}/ops")
        expect(tab.page.locator("#ready")).to_have_text("Ready for calls", timeout=LIMIT_MS)
    expect(tab.page.locator("#ready")).to_have_text("The server does not answer.", timeout=LIMIT_MS)


def test_the_two_pages_lead_to_each_other_and_who_leaves_hangs_up(tab: Tab, running: RunningServer) -> None:
    tab.open(running.url)
    tab.call()
    tab.page.click("text=Operation")
    expect(tab.page).to_have_url(f"{running.url}/ops")
    expect(tab.page.locator("#call-counts")).to_contain_text("opening0listening0speaking0", timeout=LIMIT_MS)
    tab.page.click("text=Talk")
    expect(tab.page).to_have_url(f"{running.url}/")
