"""Silero's network: how it is fed, on a file that tells; and the real one where a package brings it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from antiphon.errors import ConfigError
from antiphon.server.audio import Samples
from antiphon.server.vad.config import TurnConfig
from antiphon.server.vad.detector import Started, Stopped, TurnDetector
from antiphon.server.vad.silero import CONTEXT_SAMPLES, NUM_LOW_WINDOWS, SileroNetwork
from antiphon.server.vad.speech import WINDOW_SAMPLES, SpeechModel
from antiphon.units import INPUT_RATE_HZ
from server.vad.networks import STATE_STEP, packaged_silero, write_network
from server.vad.sounds import CALLER, VOICE, noise, recording, silence, syllables


def windows(samples: Samples) -> list[Samples]:
    count = len(samples) // WINDOW_SAMPLES
    return list(samples[: count * WINDOW_SAMPLES].reshape(count, WINDOW_SAMPLES))


def probabilities(model: SpeechModel, samples: Samples) -> list[float]:
    return [model.probability(window) for window in windows(samples)]


@pytest.fixture
def told(tmp_path: Path) -> SileroNetwork:
    return SileroNetwork(write_network(tmp_path / "told.onnx"))


@pytest.fixture(scope="module")
def silero() -> SileroNetwork:
    return SileroNetwork(packaged_silero())


def test_a_window_comes_behind_the_end_of_the_one_before_and_with_its_state(told: SileroNetwork) -> None:
    model = told.new_model()
    samples = noise(0.32, -6)
    first = windows(samples)[:-1]
    expected = [0.0, *(float(window[-CONTEXT_SAMPLES]) for window in first)]
    expected = [value + STATE_STEP * index for index, value in enumerate(expected)]
    assert probabilities(model, samples) == pytest.approx(expected, abs=1e-6)


def test_callers_share_the_network_and_nothing_else(told: SileroNetwork) -> None:
    sounds = [windows(noise(0.32, -6, seed)) for seed in (1, 2)]
    alone = [probabilities(told.new_model(), np.concatenate(sound)) for sound in sounds]
    models = [told.new_model() for _ in sounds]
    together = [[model.probability(pair[i]) for i, model in enumerate(models)] for pair in zip(*sounds, strict=True)]
    assert [list(one) for one in zip(*together, strict=True)] == alone


def test_after_long_quiet_the_memory_begins_anew(told: SileroNetwork) -> None:
    model = told.new_model()
    quiet = np.zeros(WINDOW_SAMPLES, np.float32)
    found = [model.probability(quiet) for _ in range(2 * NUM_LOW_WINDOWS)]
    once = [STATE_STEP * index for index in range(NUM_LOW_WINDOWS)]
    assert found == pytest.approx([*once, *once], abs=1e-6)
    loud = np.ones(WINDOW_SAMPLES, np.float32)
    model = told.new_model()
    found = [model.probability(loud if index % 10 == 5 else quiet) for index in range(2 * NUM_LOW_WINDOWS)]
    assert found[-1] == pytest.approx(STATE_STEP * (2 * NUM_LOW_WINDOWS - 1), abs=1e-6)


@pytest.mark.parametrize(
    ("names", "state_size", "complaint"),
    [
        (("input", "h", "sr"), 128, "takes h, input, sr, not input, sr, state"),
        (("input", "state", "sr"), 64, "cannot hear silence: .*128"),
    ],
)
def test_another_network_is_refused(tmp_path: Path, names: tuple[str, ...], state_size: int, complaint: str) -> None:
    file = write_network(tmp_path / "other.onnx", names, state_size)
    with pytest.raises(ConfigError, match=f"vad_model {file} {complaint}.*; name silero_vad.onnx"):
        SileroNetwork(file)


def test_what_is_no_network_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.onnx"
    text.write_text("no network")
    for file in (text, tmp_path, tmp_path / "none.onnx"):
        with pytest.raises(ConfigError, match=f"vad_model {file} cannot be loaded"):
            SileroNetwork(file)


def test_probabilities_are_those_of_the_packages_own_wrapper(silero: SileroNetwork) -> None:
    """On sound without so long a quiet that memory begins anew."""
    official = official_wrapper()
    for samples in (recording(VOICE), recording(CALLER)[: 5 * INPUT_RATE_HZ], syllables(3)):
        wrapped = official()
        expected = [wrapped(window) for window in windows(samples)]
        assert probabilities(silero.new_model(), samples) == expected


def test_the_recordings_that_ship_are_heard(silero: SileroNetwork) -> None:
    events = TurnDetector(TurnConfig(), silero.new_model()).feed(recording(CALLER))
    assert [type(event) for event in events] == [Started, Stopped] * 4
    ends = [event.audio_end_ms for event in events if isinstance(event, Stopped)]
    assert ends == pytest.approx([4900, 11700, 21100, 29250], abs=100)
    assert TurnDetector(TurnConfig(), silero.new_model()).feed(recording(VOICE)) == [Started(0)]


def test_what_is_not_speech_is_not_taken_for_it(silero: SileroNetwork) -> None:
    for samples in (silence(10), noise(10, -60), noise(10, -40), noise(10, -20)):
        assert max(probabilities(silero.new_model(), samples)) < 0.2
    fan = np.concatenate([noise(2, -60), noise(5, -25)])
    assert TurnDetector(TurnConfig(), silero.new_model()).feed(fan) == []


@pytest.mark.parametrize("duration_s", [15.5, 20.0, 31.1])
def test_loud_noise_before_it_does_not_hide_speech(silero: SileroNetwork, duration_s: float) -> None:
    """It does if memory is kept: up to a second late."""
    alone = TurnDetector(TurnConfig(), silero.new_model()).feed(recording(CALLER))[0]
    after = TurnDetector(TurnConfig(), silero.new_model()).feed(
        np.concatenate([noise(duration_s, -26), recording(CALLER)])
    )[0]
    assert isinstance(alone, Started)
    assert isinstance(after, Started)
    assert after.audio_start_ms - 1000 * duration_s == pytest.approx(alone.audio_start_ms, abs=64)


def official_wrapper() -> Callable[[], Callable[[Samples], float]]:
    """The package's own way to run its file; the module alone, since the package sets the number of torch's threads."""
    package = importlib.util.find_spec("silero_vad")
    if package is None or package.origin is None:
        pytest.skip("the package silero-vad is not installed")
    import torch

    spec = importlib.util.spec_from_file_location("silero_wrapper", Path(package.origin).with_name("utils_vad.py"))
    assert spec is not None, "a file has a spec"
    assert spec.loader is not None, "a file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def wrapper() -> Callable[[Samples], float]:
        wrapped = module.OnnxWrapper(str(packaged_silero()))
        return lambda window: float(wrapped(torch.from_numpy(window), INPUT_RATE_HZ).item())

    return wrapper
