"""The table of all events for docs/protocol.md, from the classes themselves; `tests/server/test_tables.py` compares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from pydantic import BaseModel

from antiphon.server.events.client import OfficialClientEvent, VendorClientEvent
from antiphon.server.events.server import OFFICIAL_SERVER_EVENTS, ServerEvent
from antiphon.server.events.vendor import VENDOR_SERVER_EVENTS

HEAD = "| event | from | whose | fields |\n|---|---|---|---|\n"
SHARED = ("type", "event_id")
"""Fields of every event, said once in the text."""


def event_table() -> str:
    """Markdown, one row an event; a field that may be left out has a question mark."""
    groups: Sequence[tuple[str, str, Sequence[type[BaseModel]]]] = (
        ("client", "official", get_args(OfficialClientEvent)),
        ("client", "vendor", get_args(VendorClientEvent)),
        ("server", "official", OFFICIAL_SERVER_EVENTS),
        ("server", "vendor", VENDOR_SERVER_EVENTS),
    )
    rows = [
        f"| {_names(event)} | {sender} | {owner} | {_fields(event)} |\n"
        for sender, owner, events in groups
        for event in events
    ]
    return HEAD + "".join(rows)


def _names(event: type[BaseModel]) -> str:
    return " ".join(f"`{name}`" for name in get_args(event.model_fields["type"].annotation))


def _fields(event: type[BaseModel]) -> str:
    """The server writes a field that has a default all the same, unless it is a `Maybe`."""
    words = []
    for name, field in event.model_fields.items():
        is_always_there = field.is_required() or (issubclass(event, ServerEvent) and field.exclude_if is None)
        if name not in SHARED:
            words.append(f"`{name}`" if is_always_there else f"`{name}`?")
    return " ".join(words) or "-"
