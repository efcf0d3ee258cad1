"""G.711: 16-bit samples to 8-bit codes and back, by tables that follow the formulas of ITU-T G.711.

Samples are 16-bit, as telephony carries them: a u-law value of 14 bits times 4, an A-law value of 13 bits times 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

ULAW_BIAS = 33
ULAW_MAX = 8158
ALAW_TOGGLED = 0x55
"""A-law inverts every other bit on the wire."""


@dataclass(frozen=True, slots=True)
class Companding:
    """samples: [256] int16, by code. codes: [65536] uint8, by sample + 32768."""

    samples: NDArray[np.int16]
    codes: NDArray[np.uint8]

    def expand(self, codes: NDArray[np.uint8]) -> NDArray[np.int16]:
        """codes: [n] uint8 -> [n] int16."""
        return self.samples[codes]

    def compress(self, samples: NDArray[np.int16]) -> NDArray[np.uint8]:
        """samples: [n] int16 -> [n] uint8."""
        return self.codes[samples.astype(np.int32) + 32768]


@cache
def ulaw() -> Companding:
    """Table 2 of the recommendation: code = not(sign, segment, place), of the magnitude plus 33."""
    codes = np.arange(256) ^ 0xFF
    magnitude = ((2 * (codes & 0x0F) + ULAW_BIAS) << (codes >> 4 & 7)) - ULAW_BIAS
    samples = 4 * np.where(codes & 0x80, -magnitude, magnitude)

    sample = np.arange(-32768, 32768)
    biased = np.minimum(np.abs(sample >> 2), ULAW_MAX) + ULAW_BIAS
    segment = _log2(biased) - 5
    place = biased >> (segment + 1) & 0x0F
    return _companding(samples, (np.where(sample < 0, 0x80, 0) | segment << 4 | place) ^ 0xFF)


@cache
def alaw() -> Companding:
    """Table 1 of the recommendation: the first two segments have the same step, so the lower one has no leading bit."""
    codes = np.arange(256) ^ ALAW_TOGGLED
    segment, place = codes >> 4 & 7, codes & 0x0F
    magnitude = np.where(segment == 0, 2 * place + 1, (2 * place + 33) << np.maximum(segment - 1, 0))
    samples = 8 * np.where(codes & 0x80, magnitude, -magnitude)

    sample = np.arange(-32768, 32768)
    # A negative sample is the complement: -1 has magnitude 0.
    magnitude = np.where(sample < 0, ~sample, sample) >> 3
    segment = np.maximum(_log2(np.maximum(magnitude, 1)) - 4, 0)
    place = magnitude >> np.maximum(segment, 1) & 0x0F
    return _companding(samples, (np.where(sample < 0, 0, 0x80) | segment << 4 | place) ^ ALAW_TOGGLED)


def _log2(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of the highest bit; values are positive and exact in float64."""
    return np.frexp(values)[1].astype(np.int64) - 1


def _companding(samples: NDArray[np.int64], codes: NDArray[np.int64]) -> Companding:
    return Companding(samples.astype(np.int16), codes.astype(np.uint8))
