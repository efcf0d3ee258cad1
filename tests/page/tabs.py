"""A browser's tab with the page in it: what may go wrong there is collected, and what a test does is said in words."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, TypeVar  # noqa: TID251 - events of any kind, looked at by tests
from urllib.parse import urlsplit

from fastapi import FastAPI
from playwright.sync_api import ConsoleMessage, Page, Request
from pydantic import TypeAdapter

from antiphon.server.app import build_app
from antiphon.server.run import Host

T = TypeVar("T")

LIMIT_MS = 60_000.0
"""For whatever a test waits for; what takes longer hangs. Others may have the machine."""


def seeded(host: Host) -> FastAPI:
    """The app whose calls all draw from the same seed."""
    return build_app(host, draw_seed=lambda: 0)


@dataclass(slots=True)
class Tab:
    """page: of one context. faults: what no page may do, but for what a test allows."""

    page: Page
    faults: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """From here on."""
        self.page.set_default_timeout(LIMIT_MS)
        self.page.on("console", lambda message: self._said(message))
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("request", lambda request: self._requested(request))

    def allow(self, pattern: str) -> None:
        """A console error that the test brings about, by a pattern in it."""
        self.allowed.append(pattern)

    def check(self) -> None:
        """Raises: AssertionError for what no page may do."""
        unexpected = [fault for fault in self.faults if not any(re.search(one, fault) for one in self.allowed)]
        assert not unexpected, "\n".join(unexpected)

    def open(self, url: str) -> None:
        """The page of a server, until it is ready for a call or says why it is not."""
        self.page.goto(url)
        self.until("!document.querySelector('#call').disabled || !document.querySelector('#problem').hidden")

    def call(self) -> None:
        """Press the button, and wait until the model listens."""
        self.page.click("#call")
        self.until("['listening', 'speaking'].includes(document.body.dataset.phase)")

    def hang_up(self) -> None:
        self.page.click("#call")
        self.until_phase("over")

    def until_phase(self, phase: str) -> None:
        self.until(f"document.body.dataset.phase === '{phase}'")

    def until(self, condition: str) -> None:
        """Wait for a condition in JavaScript."""
        # Playwright's own way to wait evaluates text inside of the page, which the page's policy forbids.
        program = f"""() => new Promise((resolve, reject) => {{
            const endsAt = performance.now() + {LIMIT_MS};
            const look = () => {{
                if ({condition}) resolve();
                else if (performance.now() > endsAt) reject(new Error({json.dumps(f"never: {condition}")}));
                else setTimeout(look, 25);
            }};
            look();
        }})"""
        self.page.evaluate(program)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def number(self, selector: str) -> int:
        """The first number in a text."""
        found = re.search(r"\d+", self.text(selector).replace(",", ""))
        assert found is not None, f"{selector} is {self.text(selector)!r}"
        return int(found[0])

    def run(self, kind: type[T], module: str, names: str, body: str) -> T:
        """Run JavaScript with some of a module's names. kind: of what it returns."""
        program = f"async () => {{ const {{ {names} }} = await import('/page/{module}'); {body} }}"
        return TypeAdapter(kind).validate_python(self.page.evaluate(program))

    def saved(self, selector: str) -> bytes:
        """What a button saves."""
        with self.page.expect_download() as download:
            self.page.click(selector)
        return download.value.path().read_bytes()

    def events(self) -> list[dict[str, Any]]:
        """The event log of the call, as it is saved."""
        return [json.loads(line) for line in self.saved("#save-log").splitlines()]

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console: {message.text}")

    def _requested(self, request: Request) -> None:
        host = urlsplit(request.url).hostname
        if host not in ("127.0.0.1", "insecure.test", None):
            self.faults.append(f"request to {host}")
