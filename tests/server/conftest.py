"""What tests of the server share: one engine on the tiny checkpoint, and servers that start at once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from antiphon.loading import Running
from antiphon.server.app import build_app
from antiphon.server.logs import LIBRARIES
from antiphon.server.run import BuildApp, loaded
from server.servers import RunningServer, StartServer, running_server, tiny_settings


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Logging belongs to the whole process; a server sets it up for itself."""
    loggers = [logging.getLogger(name) for name in ("", *LIBRARIES)]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, is_propagating) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, is_propagating
        logger.setLevel(level)


@pytest.fixture(scope="session")
def tiny_engine(tiny_checkpoint: Path) -> Iterator[Running]:
    """For every server that needs no other one."""
    said: list[str] = []
    with loaded(tiny_settings(tiny_checkpoint), said.append) as running:
        yield running


@pytest.fixture(scope="module")
def realtime(tiny_checkpoint: Path, tiny_engine: Running) -> Iterator[str]:
    """The address of a server whose calls all draw from the same seed, and which waits for no client that has gone."""
    settings = tiny_settings(tiny_checkpoint, resume_s="0.01")
    with running_server(settings, tiny_engine, lambda host: build_app(host, draw_seed=lambda: 0)) as running:
        yield running.url


@pytest.fixture
def start_server(tiny_checkpoint: Path, tiny_engine: Running) -> StartServer:
    """`with start_server(build_app, drain_s="0") as running:`."""

    def start(build_app: BuildApp, **options: str) -> AbstractContextManager[RunningServer]:
        return running_server(tiny_settings(tiny_checkpoint, **options), tiny_engine, build_app)

    return start
