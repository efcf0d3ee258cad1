"""A server for clients as they come from the package index, and what they say to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from antiphon.server.app import build_app
from antiphon.units import INPUT_RATE_HZ
from server.servers import StartServer

RECORDING = Path(__file__).parents[3] / "examples" / "caller.flac"
TURN_S = 5
"""The recording's first sentence is over by then."""


@pytest.fixture
def address(start_server: StartServer) -> Iterator[str]:
    """host:port of a server whose calls all draw the same."""
    with start_server(lambda host: build_app(host, draw_seed=lambda: 0)) as running:
        yield running.url.removeprefix("http://")


@pytest.fixture(scope="session")
def recording() -> NDArray[np.int16]:
    """Half a minute of a caller, mono, at the model's rate."""
    samples, rate_hz = soundfile.read(RECORDING, dtype="int16")
    assert rate_hz == INPUT_RATE_HZ
    return samples


@pytest.fixture(scope="session")
def turn(recording: NDArray[np.int16]) -> NDArray[np.int16]:
    """One sentence, and the silence of who waits for an answer."""
    return np.concatenate([recording[: TURN_S * INPUT_RATE_HZ], np.zeros(INPUT_RATE_HZ, np.int16)])
