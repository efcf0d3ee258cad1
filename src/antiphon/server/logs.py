"""Logs: one line per record, for people or as JSON, with the call it is about. What is said in calls is not in them.

Above `debug` an error is its types and where it came from, without its words, and an address has no query.
Shown by tests/server/test_logs.py.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TextIO

from antiphon.core.events import (
    ChangeRefused,
    Event,
    InputRefused,
    SessionEnded,
    SessionOpened,
    SettingsChanged,
    SpeechLost,
    TurnInterrupted,
)
from antiphon.errors import places
from antiphon.server.settings import LogFormat, LogLevel

TOLD_ALWAYS = (
    SessionOpened,
    SessionEnded,
    SettingsChanged,
    ChangeRefused,
    InputRefused,
    SpeechLost,
    TurnInterrupted,
)
"""Other events come every second; they are for `debug`."""
LIBRARIES = ("uvicorn", "uvicorn.error", "uvicorn.access", "websockets")
"""Loggers that may have been given handlers of their own."""
PLAIN_TEXTS = ("code", "session_id")
"""Texts in events that we wrote ourselves."""

_session_id: ContextVar[str] = ContextVar("session_id", default="")

logger = logging.getLogger(__name__)


@contextmanager
def in_session(session_id: str) -> Iterator[None]:
    """Whatever this task logs inside is about that session."""
    token = _session_id.set(session_id)
    try:
        yield
    finally:
        _session_id.reset(token)


@dataclass(frozen=True, slots=True)
class Told:
    """A message with values of its own. what: the same words every time."""

    what: str
    values: Mapping[str, object]

    def __str__(self) -> str:
        return " ".join([self.what, *(f"{name}={value}" for name, value in self.values.items())])


def log_event(event: Event) -> None:
    """At `info` what a call's life is made of, in numbers and codes; at `debug` everything, with what was said."""
    what = re.sub(r"(?<!^)(?=[A-Z])", " ", type(event).__name__).lower()
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(Told(what, asdict(event)))
    elif isinstance(event, TOLD_ALWAYS):
        logger.info(Told(what, _without_words(event)))


def configure(level: LogLevel, log_format: LogFormat, stream: TextIO) -> None:
    """Send every logger's records, uvicorn's too, to one stream in one form; whatever was configured before goes."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonLines(level) if log_format is LogFormat.JSON else _TextLines(level))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.value.upper())
    for name in LIBRARIES:
        library = logging.getLogger(name)
        library.handlers, library.propagate = [], True
        library.setLevel(logging.NOTSET)


def _without_words(event: Event) -> dict[str, object]:
    """Numbers, truth values and texts of our own."""
    return {
        name: value
        for name, value in asdict(event).items()
        if isinstance(value, int | float) or (name in PLAIN_TEXTS and isinstance(value, str))
    }


class _Lines(logging.Formatter):
    """What both forms have in common."""

    def __init__(self, level: LogLevel) -> None:
        super().__init__()
        self._has_words = level is LogLevel.DEBUG

    def what(self, record: logging.LogRecord) -> str:
        message = record.msg.what if isinstance(record.msg, Told) else record.getMessage()
        if record.name.startswith("antiphon") or self._has_words:
            return message
        # Libraries print addresses, with a caller's words or key behind the question mark, and asyncio whole errors,
        # below its own words.
        return re.sub(r"\?[^\s\"']*", "", message.partition("\n")[0])

    def values(self, record: logging.LogRecord) -> Mapping[str, object]:
        return record.msg.values if isinstance(record.msg, Told) else {}

    def error(self, record: logging.LogRecord) -> str:
        if record.exc_info is None or record.exc_info[1] is None:
            return ""
        if self._has_words:
            return "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        return "\n".join(places(record.exc_info[1]))

    def when(self, record: logging.LogRecord) -> str:
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class _TextLines(_Lines):
    """`time LEVEL logger [session] what name=value`, and an error below."""

    def format(self, record: logging.LogRecord) -> str:
        session_id = _session_id.get()
        words = [self.when(record), record.levelname, record.name, *([f"[{session_id}]"] if session_id else [])]
        values = [f"{name}={value}" for name, value in self.values(record).items()]
        line = _in_one_line(" ".join([*words, self.what(record), *values]))
        error = self.error(record)
        return f"{line}\n{error}" if error else line


class _JsonLines(_Lines):
    """An object a line: time, level, logger, message, and if there are any session_id, error and the values."""

    def format(self, record: logging.LogRecord) -> str:
        fixed = {
            "time": self.when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self.what(record),
            "session_id": _session_id.get(),
            "error": self.error(record),
        }
        filled = {name: text for name, text in fixed.items() if text}
        return json.dumps({**self.values(record), **filled}, default=str)


def _in_one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\r", "\\r")
