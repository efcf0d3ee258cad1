"""Silero's network as a speech model: `silero_vad.onnx` of its versions 5 and 6, which is the operator's to bring.

Source: `OnnxWrapper` in silero_vad/utils_vad.py (silero-vad 6.2.3). At 16 kHz it takes 512 samples behind the last 64
of the window before (`input` [1, 576] float32), its memory (`state` [2, 1, 128] float32, zeros at first) and the rate
(`sr`, int64), and gives the probability (`output` [1, 1]) and the next memory (`stateN`). Version 4 had `h` and `c`.
Shown by tests/server/vad/test_silero.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from antiphon.errors import ConfigError
from antiphon.server.audio import Samples
from antiphon.server.vad.speech import WINDOW_SAMPLES
from antiphon.units import INPUT_RATE_HZ

CONTEXT_SAMPLES = 64
STATE_SHAPE = (2, 1, 128)
INPUTS = ("input", "sr", "state")

LOW_PROBABILITY = 0.1
FORGETTING_S = 10.0
"""After so long a stretch of windows that are surely none, memory begins anew. Loud noise shifts it until the next
speech is found a second late: not within ten seconds, but often within fifteen (white noise of -18 to -30 dB, version
6.2.3). Pipecat resets for the same reason (`_MODEL_RESET_*` in pipecat/audio/vad/silero.py, 1.14.0), every two seconds;
but a new memory takes music for speech more often, so it is made no oftener than it must be."""
NUM_LOW_WINDOWS = round(FORGETTING_S * INPUT_RATE_HZ / WINDOW_SAMPLES)

LOG_ERRORS = 3
"""onnxruntime's number; below, it comments on how the file was exported."""


class SileroNetwork:
    """The weights. One for all callers: running it changes nothing in it, so any thread may."""

    def __init__(self, path: Path) -> None:
        """Raises: ConfigError if the file is no such network."""
        options = ort.SessionOptions()
        # So small a network is slower in several threads, and the engine needs the other cores.
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = LOG_ERRORS
        try:
            self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise _refused(path, f"cannot be loaded: {' '.join(str(error).split())}") from error
        names = tuple(sorted(one.name for one in self._session.get_inputs()))
        if names != INPUTS:
            raise _refused(path, f"takes {', '.join(names)}, not {', '.join(INPUTS)}")
        self._rate = np.array(INPUT_RATE_HZ, np.int64)
        try:
            self.run(np.zeros((1, CONTEXT_SAMPLES + WINDOW_SAMPLES), np.float32), np.zeros(STATE_SHAPE, np.float32))
        except Exception as error:
            raise _refused(path, f"cannot hear silence: {' '.join(str(error).split())}") from error

    def run(self, sound: Samples, state: Samples) -> tuple[float, Samples]:
        """The probability, and the state of the next window.

        sound: [1, CONTEXT_SAMPLES + WINDOW_SAMPLES] float32. state: [2, 1, 128] float32. Neither is kept or changed.
        """
        output, state = self._session.run(("output", "stateN"), {"input": sound, "state": state, "sr": self._rate})
        return float(output[0, 0]), state

    def new_model(self) -> SileroModel:
        return SileroModel(self)


class SileroModel:
    """What the network remembers of one caller."""

    def __init__(self, network: SileroNetwork) -> None:
        self._network = network
        self._state = np.zeros(STATE_SHAPE, np.float32)
        self._sound = np.zeros((1, CONTEXT_SAMPLES + WINDOW_SAMPLES), np.float32)
        self._num_low = 0

    def probability(self, window: Samples) -> float:
        """That it is speech. window: [WINDOW_SAMPLES] float32."""
        self._sound[0, :CONTEXT_SAMPLES] = self._sound[0, -CONTEXT_SAMPLES:]
        self._sound[0, CONTEXT_SAMPLES:] = window
        probability, self._state = self._network.run(self._sound, self._state)
        self._num_low = self._num_low + 1 if probability < LOW_PROBABILITY else 0
        if self._num_low == NUM_LOW_WINDOWS:
            self._state, self._num_low = np.zeros(STATE_SHAPE, np.float32), 0
        return probability


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"vad_model {path} {why}; name silero_vad.onnx of the package silero-vad 5 or 6, or leave it empty for energy"
    )
