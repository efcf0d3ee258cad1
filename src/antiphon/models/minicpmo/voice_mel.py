"""The log-mel frames that the flow speaks in, of 24 kHz audio. Not the 16 kHz features: `audio_features.py`.

Formula of REFERENCE 9.1, step 3. Recordings arrive on the host, so everything is float32 on the CPU.
Test: tests/models/test_voice.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.models.minicpmo.mel_filters import slaney_filters
from antiphon.units import OUTPUT_RATE_HZ, SAMPLES_PER_MEL_FRAME

FFT_SAMPLES = 4 * SAMPLES_PER_MEL_FRAME
EDGE_SAMPLES = (FFT_SAMPLES - SAMPLES_PER_MEL_FRAME) // 2
MAX_HZ = 8000.0
_LEAST_POWER = 1e-9
_LEAST_MAGNITUDE = 1e-5

_HOST = torch.device("cpu")


class PromptMel:
    """The tables, computed once. Stateless, so any thread may use it."""

    def __init__(self, num_mel_bins: int) -> None:
        self._filters = slaney_filters(num_mel_bins, FFT_SAMPLES, OUTPUT_RATE_HZ, MAX_HZ).float()
        self._window = torch.hann_window(FFT_SAMPLES, device=_HOST)

    def frames(self, samples: Tensor) -> Tensor:
        """samples: [n] float32, 24 kHz, n > EDGE_SAMPLES -> [n // 480, M] float32, natural logarithm of magnitude."""
        mirrored = F.pad(samples[None], (EDGE_SAMPLES, EDGE_SAMPLES), mode="reflect")
        spectrum = torch.stft(
            mirrored, FFT_SAMPLES, SAMPLES_PER_MEL_FRAME, window=self._window, center=False, return_complex=True
        )
        magnitude = (torch.view_as_real(spectrum[0]).square().sum(-1) + _LEAST_POWER).sqrt()
        return (self._filters @ magnitude).clamp(min=_LEAST_MAGNITUDE).log().T
