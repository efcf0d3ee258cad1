"""Sound files that clients send whole, as the model hears them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile as sf
from numpy.typing import NDArray

from antiphon.errors import AudioError
from antiphon.server.audio_file import BLOCK_SAMPLES, read_heard
from antiphon.units import INPUT_RATE_HZ

MAX_S = 60.0


def tone(rate_hz: int, num_channels: int = 1, duration_s: float = 1.0) -> NDArray[np.float32]:
    """[n, channels], each channel as loud as its number."""
    wave = 0.1 * np.sin(2 * np.pi * 440 * np.arange(round(duration_s * rate_hz)) / rate_hz)
    return np.stack([wave * number for number in range(1, num_channels + 1)], axis=1).astype(np.float32)


def written(samples: NDArray[np.float32], rate_hz: int, form: str = "WAV", coding: str = "FLOAT") -> bytes:
    with io.BytesIO() as file:
        sf.write(file, samples, rate_hz, coding, format=form)
        return file.getvalue()


@pytest.mark.parametrize("rate_hz", [8_000, INPUT_RATE_HZ, 44_100, 192_000])
@pytest.mark.parametrize("num_channels", [1, 2, 6])
def test_the_model_hears_the_mean_of_the_channels_at_its_own_rate(rate_hz: int, num_channels: int) -> None:
    heard = read_heard(written(tone(rate_hz, num_channels), rate_hz), MAX_S)
    expected = tone(INPUT_RATE_HZ)[:, 0] * (num_channels + 1) / 2
    assert abs(len(heard) - INPUT_RATE_HZ) <= 1
    inner = slice(1000, -1000)  # where no resampler looks over an edge
    # Its passband ripples by less than a 16-bit step.
    np.testing.assert_allclose(heard[:INPUT_RATE_HZ][inner], expected[: len(heard)][inner], rtol=0, atol=1e-4)


def test_a_sound_that_is_read_in_many_blocks_has_no_seams() -> None:
    num_channels, rate_hz = 8, 48_000
    samples = tone(rate_hz, num_channels, duration_s=3.5 * BLOCK_SAMPLES / num_channels / rate_hz)
    heard = read_heard(written(samples, rate_hz), MAX_S)
    expected = tone(INPUT_RATE_HZ, 1, len(heard) / INPUT_RATE_HZ)[:, 0] * (num_channels + 1) / 2
    np.testing.assert_allclose(heard[1000:-1000], expected[1000:-1000], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "coding"), [("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")]
)
def test_every_format_that_is_promised_is_read(form: str, coding: str) -> None:
    heard = read_heard(written(tone(INPUT_RATE_HZ), INPUT_RATE_HZ, form, coding), MAX_S)
    assert np.abs(heard).max() == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"no sound at all",
        written(tone(INPUT_RATE_HZ)[:0], INPUT_RATE_HZ),
        written(tone(500), 500),
        written(tone(INPUT_RATE_HZ, duration_s=61), INPUT_RATE_HZ),
        written(np.full((1000, 1), np.nan, np.float32), INPUT_RATE_HZ),
        written(tone(INPUT_RATE_HZ), INPUT_RATE_HZ, "FLAC", "PCM_16")[:100],
    ],
    ids=["nothing", "text", "empty", "too slow", "too long", "not finite", "cut off"],
)
def test_what_cannot_be_heard_is_refused(file: bytes) -> None:
    with pytest.raises(AudioError):
        read_heard(file, MAX_S)
