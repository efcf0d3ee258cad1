"""What is in the log, and what must not be."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest

from antiphon.errors import AudioError
from antiphon.server.logs import Told, configure, in_session, log_event
from antiphon.server.settings import LogFormat, LogLevel
from server.calls import CALL, SECRET, SECRET_IDS


def log_to(level: LogLevel, form: LogFormat) -> io.StringIO:
    stream = io.StringIO()
    configure(level, form, stream)
    return stream


def fail_with_words() -> None:
    try:
        raise AudioError(f"not audio: {SECRET}")
    except AudioError as error:
        raise ValueError(f"refused {SECRET}") from error


def let_everything_happen() -> None:
    """Events, errors, addresses and tasks that all have a caller's words in them."""
    for event in CALL:
        log_event(event)
    try:
        fail_with_words()
    except ValueError:
        logging.getLogger("antiphon.server.realtime").exception("a call failed")
    logging.getLogger("uvicorn.error").info('%s - "WebSocket %s" [accepted]', "1.2.3.4", f"/v1/realtime?q={SECRET[:4]}")
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: <Task %r>", ValueError(SECRET))


@pytest.mark.parametrize("form", LogFormat)
def test_what_callers_and_model_say_is_not_in_the_log(form: LogFormat) -> None:
    stream = log_to(LogLevel.INFO, form)
    let_everything_happen()
    text = stream.getvalue()
    for secret in (SECRET, *map(str, SECRET_IDS), "?q="):
        assert secret not in text, text
    for told in ("session opened", "completed", "invalid_audio", "a call failed", "AudioError", "/v1/realtime"):
        assert told in text, told


@pytest.mark.parametrize("form", LogFormat)
def test_at_debug_it_is(form: LogFormat) -> None:
    stream = log_to(LogLevel.DEBUG, form)
    let_everything_happen()
    text = stream.getvalue()
    assert text.count(SECRET) >= 8
    assert str(SECRET_IDS[0]) in text


def test_a_json_line_has_the_call_and_the_values() -> None:
    stream = log_to(LogLevel.INFO, LogFormat.JSON)
    with in_session("call 7"):
        logging.getLogger("antiphon.x").warning(Told("slow reader", {"queued_bytes": 12}))
    logging.getLogger("antiphon.x").info("two\nlines %d", 3)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "warning",
        "logger": "antiphon.x",
        "message": "slow reader",
        "session_id": "call 7",
        "queued_bytes": 12,
    }
    assert second["message"] == "two\nlines 3"
    assert "session_id" not in second


def test_a_line_for_people_is_one_line() -> None:
    stream = log_to(LogLevel.INFO, LogFormat.TEXT)
    with in_session("call 7"):
        logging.getLogger("antiphon.x").warning(Told("slow reader", {"peer": "a\nb"}))
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(" WARNING antiphon.x [call 7] slow reader peer=a\\nb")


def test_calls_of_other_tasks_do_not_mix() -> None:
    stream = log_to(LogLevel.INFO, LogFormat.JSON)

    async def call(name: str, mine: asyncio.Event, others: asyncio.Event) -> None:
        with in_session(name):
            mine.set()
            await others.wait()
            logging.getLogger("antiphon.x").info(name)

    async def both() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        await asyncio.gather(call("a", first, second), call("b", second, first))

    asyncio.run(both())
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert sorted((line["message"], line["session_id"]) for line in lines) == [("a", "a"), ("b", "b")]


def test_what_is_below_the_level_is_not_logged() -> None:
    stream = log_to(LogLevel.ERROR, LogFormat.TEXT)
    let_everything_happen()
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("20")]
    assert [line.split()[1] for line in lines] == ["ERROR", "ERROR"]


def test_uvicorn_logs_into_the_same_stream_once() -> None:
    stream = log_to(LogLevel.INFO, LogFormat.JSON)
    logging.getLogger("uvicorn.error").info("Started server process [%d]", 5)
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert (line["logger"], line["message"]) == ("uvicorn.error", "Started server process [5]")
