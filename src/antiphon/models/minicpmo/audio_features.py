"""Log-mel features of 16 kHz speech: the arithmetic of REFERENCE 6.1. Not a stream: that is `audio_stream.py`.

Samples arrive on the host and features are small, so everything here is float32 on the CPU, whatever the model's
device and dtype. Golden: tests/golden/audio; tests/models/test_audio.py.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.errors import AudioError
from antiphon.models.minicpmo.mel_filters import slaney_filters
from antiphon.units import INPUT_RATE_HZ

FFT_SAMPLES = 400
HOP_SAMPLES = 160
EDGE_SAMPLES = FFT_SAMPLES // 2
"""A frame sees this many samples on either side of its centre."""

PIECE_SAMPLES = 30 * INPUT_RATE_HZ
"""Reference audio is cut into pieces of this length, and each is filled up to it with silence (REFERENCE 6.5)."""

_LEAST_POWER = 1e-10
_FIXED_FLOOR = -10.0
_DYNAMIC_RANGE = 8.0

_HOST = torch.device("cpu")


class Floor(Enum):
    """What quiet values are lifted to: a constant, or a distance below the loudest value around."""

    FIXED = "fixed"
    DYNAMIC = "dynamic"

    def level(self, peak: float) -> float:
        """Lower clamp of log10 power where the largest value is `peak` (both log10 units)."""
        match self:
            case Floor.FIXED:
                return _FIXED_FLOOR
            case Floor.DYNAMIC:
                return peak - _DYNAMIC_RANGE
        assert_never(self)


class MelExtractor:
    """The tables (filters, window), computed once for all sessions. Stateless, so any thread may use it."""

    def __init__(self, num_mel_bins: int) -> None:
        self.num_mel_bins = num_mel_bins
        self._filters = slaney_filters(num_mel_bins, FFT_SAMPLES, INPUT_RATE_HZ, INPUT_RATE_HZ / 2).float()
        self._window = torch.hann_window(FFT_SAMPLES, periodic=True, dtype=torch.float32, device=_HOST)

    def log_mel(self, samples: Tensor) -> Tensor:
        """Log10 mel power of every frame that lies wholly inside the samples; no floor but the logarithm's own.

        samples: [n] float32, n >= FFT_SAMPLES; frame t covers samples HOP_SAMPLES * t : HOP_SAMPLES * t + FFT_SAMPLES
        returns: [bins, (n - FFT_SAMPLES) // HOP_SAMPLES + 1] float32
        """
        spectrum = torch.stft(
            samples, FFT_SAMPLES, HOP_SAMPLES, window=self._window, center=False, return_complex=True
        )  # [FFT_SAMPLES / 2 + 1, frames] complex64
        return (self._filters @ spectrum.abs().square()).clamp(min=_LEAST_POWER).log10()

    def mel(self, samples: Tensor, floor: Floor) -> Tensor:
        """Features of a whole recording; its ends are mirrored, so frame t is centred on sample HOP_SAMPLES * t.

        samples: [n] float32, n > EDGE_SAMPLES
        returns: [bins, n // HOP_SAMPLES] float32
        """
        log_mel = self.log_mel(mirrored(samples, left=EDGE_SAMPLES, right=EDGE_SAMPLES))[:, :-1]
        return normalised(log_mel, floor.level(log_mel.max().item()))

    def reference_mels(self, samples: Tensor) -> list[Tensor]:
        """Features of a reference recording, piece by piece (REFERENCE 6.5).

        samples: [n] float32, n >= 1, 16 kHz
        returns: per piece of p <= PIECE_SAMPLES samples: [bins, ceil(p / HOP_SAMPLES)] float32
        Raises: AudioError, as `check_samples`, or if there is no sample.
        """
        check_samples(samples)
        if not samples.numel():
            raise AudioError("reference audio has 0 samples; give audio or leave it out")
        return [
            self.mel(F.pad(piece, (0, PIECE_SAMPLES - piece.numel())), Floor.DYNAMIC)[
                :, : math.ceil(piece.numel() / HOP_SAMPLES)
            ]
            for piece in torch.split(samples, PIECE_SAMPLES)
        ]


def check_samples(samples: Tensor) -> None:
    """Refuse what is not mono float32 audio. Raises: AudioError.

    A value that is not finite would stay in the floor and in the encoder's history for half a minute.
    """
    if samples.dim() != 1 or samples.dtype != torch.float32:
        raise AudioError(f"audio is {samples.dtype} {tuple(samples.shape)}; give mono float32 samples of shape [n]")
    if not samples.isfinite().all():
        raise AudioError(f"{int((~samples.isfinite()).sum())} of {samples.numel()} samples are not finite numbers")


def mirrored(samples: Tensor, *, left: int, right: int) -> Tensor:
    """samples: [n] float32, n > left, right. returns: [left + n + right], the end samples not repeated."""
    return F.pad(samples[None], (left, right), mode="reflect")[0]


def normalised(log_mel: Tensor, level: float) -> Tensor:
    """log_mel: [bins, T] float32, log10. returns: the same, lifted to `level` and scaled as Whisper wants it."""
    return (log_mel.clamp(min=level) + 4) / 4
