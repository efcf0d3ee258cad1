"""Tables of the documentation that are made from the code. `python tests/server/tables.py` writes them anew."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from antiphon.server.auth import REFUSALS
from antiphon.server.metrics import Direction, Metrics
from antiphon.server.realtime.codes import CODES
from antiphon.server.settings import ServerSettings, allowed, as_text, options
from fakes.clock import HandClock
from server.calls import CALL, CHAT, counts, queued

DOCS = Path(__file__).parents[2] / "docs"
OPTIONS = ("option", "allowed", "default", "what it is")
METRICS = ("metric", "type", "labels", "what it counts")
CODED = ("code", "what it means", "what to do", "what ends")
REFUSED = ("code", "HTTP status", "close code", "message")


def options_table() -> str:
    rows = []
    for option in options():
        field = ServerSettings.model_fields[option]
        default = "computed" if field.default_factory is not None else as_text(field.default)
        rows.append((f"`{option}`", allowed(option), default, str(field.description)))
    return _table(OPTIONS, rows)


def moved_metrics() -> Metrics:
    """After a call and an engine's answer in which everything happens."""
    clock = HandClock()
    metrics = Metrics(clock)
    watch = metrics.watch()
    for event in CALL[:-1]:
        watch.observe(event)
    for clock.time_s in (1.0, 5.0):
        watch.observe(queued(3, 5))
    watch.observe(CALL[-1])
    metrics.watch()
    chat = metrics.watch_chat()
    for event in CHAT:
        chat.observe(event)
    metrics.watch_chat()
    metrics.count_refusal("draining")
    metrics.count_bytes(Direction.IN, 1)
    metrics.engine.counts = counts(num_calls=1)
    return metrics


def metrics_table() -> str:
    rows = []
    for family in moved_metrics().registry.collect():
        labels = {name: None for sample in family.samples for name in sample.labels if name != "le"}
        suffix = "_total" if family.type == "counter" else ""
        rows.append((family.name + suffix, family.type, ", ".join(labels) or "-", family.documentation))
    return _table(METRICS, rows)


def refusals_table() -> str:
    return _table(REFUSED, [(one.code, str(one.status), str(one.close_code), one.message) for one in REFUSALS])


def codes_table() -> str:
    return _table(CODED, [(code, one.meaning, one.advice, one.ends.value) for code, one in CODES.items()])


def documented() -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Document, headers, and the table as it should be."""
    yield "configuration.md", OPTIONS, options_table()
    yield "operations.md", METRICS, metrics_table()
    yield "operations.md", REFUSED, refusals_table()
    yield "protocol.md", CODED, codes_table()


def present(document: str, headers: tuple[str, ...]) -> str:
    """The table with these headers as it is printed."""
    head = re.escape(f"| {' | '.join(headers)} |\n")
    found = re.findall(rf"^{head}\|[-|]+\|\n(?:\|.*\|\n)*", (DOCS / document).read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) == 1, f"{document} has {len(found)} tables of {headers}"
    return str(found[0])


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headers)} |", f"|{'---|' * len(headers)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def main() -> None:
    for document, headers, table in documented():
        path = DOCS / document
        path.write_text(path.read_text(encoding="utf-8").replace(present(document, headers), table), encoding="utf-8")


if __name__ == "__main__":
    main()
