"""The mel filter bank of all three features: thinker, speech tokens, vocoder. Not the features themselves.

Scale and areas of Slaney's Auditory Toolbox (REFERENCE 6.1, 9.1). Tests: tests/models/test_audio.py, test_voice.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_HOST = torch.device("cpu")

# Linear up to 1 kHz (15 mels), then 27 mels for every factor of 6.4.
_MELS_PER_HZ = 3 / 200
_KNEE_HZ = 1000.0
_KNEE_MELS = _KNEE_HZ * _MELS_PER_HZ
_LOG_HZ_PER_MEL = math.log(6.4) / 27


def slaney_filters(num_mel_bins: int, fft_samples: int, rate_hz: int, max_hz: float) -> Tensor:
    """Triangles of equal area, evenly spaced on the mel scale from 0 to `max_hz`.

    returns: [num_mel_bins, fft_samples // 2 + 1] float64 on the host
    """
    bin_hz = torch.linspace(0, rate_hz / 2, fft_samples // 2 + 1, dtype=torch.float64, device=_HOST)
    mels = torch.linspace(0, _mel_of(max_hz), num_mel_bins + 2, dtype=torch.float64, device=_HOST)
    corner_hz = _hz_of(mels)[:, None]
    width_hz = corner_hz.diff(dim=0)
    rising = (bin_hz - corner_hz[:-2]) / width_hz[:-1]
    falling = (corner_hz[2:] - bin_hz) / width_hz[1:]
    return torch.minimum(rising, falling).clamp(min=0) * 2 / (corner_hz[2:] - corner_hz[:-2])


def _mel_of(hz: float) -> float:
    return _KNEE_MELS + math.log(hz / _KNEE_HZ) / _LOG_HZ_PER_MEL if hz > _KNEE_HZ else hz * _MELS_PER_HZ


def _hz_of(mels: Tensor) -> Tensor:
    logarithmic = _KNEE_HZ * ((mels - _KNEE_MELS) * _LOG_HZ_PER_MEL).exp()
    return torch.where(mels > _KNEE_MELS, logarithmic, mels / _MELS_PER_HZ)
