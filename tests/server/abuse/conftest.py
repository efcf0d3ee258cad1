"""A server that keeps nothing for later, so that whatever is left after a call is a leak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from fastapi import FastAPI

from antiphon.core.events import SessionEnded
from antiphon.loading import Running
from antiphon.server.app import build_app
from antiphon.server.run import Host, loaded
from server.abuse.watching import Watched, logged_failures
from server.servers import running_server, tiny_settings

FRUGAL = {"max_stored_prompt_bytes": "0", "max_stored_voice_bytes": "0", "max_calls": "4"}

SEND_BUFFER_BYTES = 2**16
"""So small that a server soon sees that a client does not read."""
KEY, NEIGHBOUR_KEY = "the fuzzer's", "the neighbour's"
"""Calls of one key leave those of the other their places."""


@pytest.fixture
def two_keys(tmp_path: Path) -> str:
    """The file of both keys."""
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n{NEIGHBOUR_KEY}\n")
    return str(file)


@pytest.fixture(scope="session")
def frugal_engine(tiny_checkpoint: Path) -> Iterator[Running]:
    said: list[str] = []
    with loaded(tiny_settings(tiny_checkpoint, **FRUGAL), said.append) as running:
        # The newest voice is kept anyway; from now on there is one.
        first = running.live.open("first", running.session, torch.empty(0), running.voices.default().prompt)
        first.close()
        assert isinstance(list(first.happenings())[-1], SessionEnded)
        yield running


def _build_app(host: Host) -> FastAPI:
    return build_app(host, draw_seed=lambda: 0)


class StartWatched:
    """`with start_watched(idle_s="1") as watched:`; at the end of the context nothing may be left, nothing failed."""

    def __init__(self, checkpoint: Path, engine: Running) -> None:
        self._checkpoint = checkpoint
        self._engine = engine

    def __call__(self, **options: str) -> AbstractContextManager[Watched]:
        return self._start(options)

    @contextmanager
    def _start(self, options: dict[str, str]) -> Iterator[Watched]:
        settings = tiny_settings(self._checkpoint, **{**FRUGAL, **options})
        with (
            logged_failures() as failures,
            running_server(settings, self._engine, _build_app, SEND_BUFFER_BYTES) as server,
        ):
            watched = Watched(server, self._engine.live)
            yield watched
            watched.wait_until_nothing_is_left()
            assert not failures, failures


@pytest.fixture(scope="session")
def start_watched(tiny_checkpoint: Path, frugal_engine: Running) -> StartWatched:
    return StartWatched(tiny_checkpoint, frugal_engine)
