"""What callers and their rooms sound like: the recordings that ship, vowels, noise, silence; all at 16 kHz."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile
import soxr

from antiphon.server.audio import Samples
from antiphon.units import INPUT_RATE_HZ

ROOT = Path(__file__).parents[3]
CALLER = ROOT / "examples" / "caller.flac"
VOICE = ROOT / "src" / "antiphon" / "assets" / "default_voice.flac"

VOWELS_HZ = ((730, 1090, 2440), (530, 1840, 2480), (270, 2290, 3010), (570, 840, 2410), (300, 870, 2240))
"""Formants of a, e, i, o, u: Peterson and Barney 1952, men."""
FORMANT_WIDTHS_HZ = (90, 110, 170)
SYLLABLE_S, GAP_S = 0.18, 0.06
MAX_HARMONIC_HZ = 4000


def recording(path: Path) -> Samples:
    samples, rate_hz = soundfile.read(path, dtype="float32")
    resampled: Samples = soxr.resample(samples, rate_hz, INPUT_RATE_HZ)
    return resampled


def silence(duration_s: float) -> Samples:
    return np.zeros(round(duration_s * INPUT_RATE_HZ), np.float32)


def noise(duration_s: float, level_db: float, seed: int = 0) -> Samples:
    """White, of this level in dB of full scale."""
    count = round(duration_s * INPUT_RATE_HZ)
    return (10 ** (level_db / 20) * np.random.default_rng(seed).standard_normal(count)).astype(np.float32)


def syllables(duration_s: float, level_db: float = -26.0) -> Samples:
    """One vowel after the other with short gaps, on a falling pitch: harmonics as strong as the formants let them."""
    times_s = np.arange(round(duration_s * INPUT_RATE_HZ)) / INPUT_RATE_HZ
    pitch_hz = 130 - 20 * times_s / duration_s + 3 * np.sin(2 * np.pi * 5 * times_s)
    phase = 2 * np.pi * np.cumsum(pitch_hz) / INPUT_RATE_HZ
    place = times_s / (SYLLABLE_S + GAP_S)
    which, within_s = place.astype(int) % len(VOWELS_HZ), (place % 1) * (SYLLABLE_S + GAP_S)
    voiced = np.where(within_s < SYLLABLE_S, np.abs(np.sin(np.pi * within_s / SYLLABLE_S)) ** 0.5, 0.0)
    formants_hz = np.array(VOWELS_HZ)[which]
    sound = np.zeros_like(times_s)
    for harmonic in range(1, int(MAX_HARMONIC_HZ / pitch_hz.max()) + 1):
        frequency_hz = harmonic * pitch_hz[:, None]
        gains = 1 / (1 + ((frequency_hz - formants_hz) / FORMANT_WIDTHS_HZ) ** 2)
        sound += gains.sum(axis=1) / harmonic**0.5 * np.sin(harmonic * phase)
    sound *= voiced
    return (sound * 10 ** (level_db / 20) / sound.std()).astype(np.float32)
