"""The table of events in docs/protocol.md is the one that the classes give."""

from __future__ import annotations

from pathlib import Path

from antiphon.server.events.tables import event_table

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_table_of_events_in_the_documentation_is_current() -> None:
    table = event_table()
    assert table in PROTOCOL.read_text(encoding="utf-8"), f"docs/protocol.md should have this table:\n\n{table}"
