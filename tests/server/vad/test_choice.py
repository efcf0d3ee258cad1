"""Which speech model a server has, and what it needs for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import antiphon
from antiphon.errors import ConfigError
from antiphon.server.vad.choice import speech_models
from antiphon.server.vad.energy import EnergyModel
from antiphon.server.vad.silero import SileroModel
from antiphon.server.vad.speech import WINDOW_SAMPLES
from server.vad.networks import packaged_silero, write_network


def test_without_a_file_it_is_energy_and_with_one_silero(tmp_path: Path) -> None:
    energy = speech_models(None)
    assert energy.name == "energy"
    assert isinstance(energy.new(), EnergyModel)
    file = write_network(tmp_path / "silero_vad.onnx")
    silero = speech_models(file)
    assert silero.name == f"silero in {file}"
    assert isinstance(silero.new(), SileroModel)
    with pytest.raises(ConfigError, match="vad_model"):
        speech_models(tmp_path / "none.onnx")


def test_energy_needs_neither_onnxruntime_nor_torch() -> None:
    program = (
        "import sys; sys.modules.update(onnxruntime=None, torch=None)\n"
        "import antiphon.server.vad.detector, antiphon.server.vad.choice as choice; choice.speech_models(None).new()"
    )
    environment = {"PYTHONPATH": str(Path(antiphon.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


@pytest.mark.parametrize("kind", ["energy", "silero"])
def test_a_probability_is_one_and_follows_from_what_was_heard(kind: str) -> None:
    models = speech_models(None if kind == "energy" else packaged_silero())
    draws = np.random.default_rng(0)
    sounds = [np.zeros(WINDOW_SAMPLES), np.ones(WINDOW_SAMPLES), *draws.uniform(-1, 1, (50, WINDOW_SAMPLES))]
    windows = [sound.astype(np.float32) for sound in sounds]
    one, other = models.new(), models.new()
    found = [one.probability(window) for window in windows]
    assert all(0 <= probability <= 1 for probability in found)
    assert [other.probability(window.copy()) for window in windows] == found
