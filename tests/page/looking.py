"""What axe-core says of a page, and pictures of it. These are written to build/screenshots and are not compared."""

from __future__ import annotations

from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from page.tabs import Tab

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
SERIOUS = ("serious", "critical")


def serious_issues(page: Page) -> list[str]:
    """What axe-core finds of them, in words."""
    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in found
        if one["impact"] in SERIOUS
        for node in one["nodes"]
    ]


def picture(tab: Tab, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    tab.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
