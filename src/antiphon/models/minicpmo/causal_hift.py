"""The causal vocoder of minicpmo-utils 1.0.7: the same source filter, whose convolutions look back instead of around.

Its first layers look a few frames ahead, all others at nothing that comes later, so that a piece of mel sounds the same
wherever it is cut. Official names (REFERENCE 2.8), formulas of REFERENCE 9.7 with the changes of 9.8. Float32 but for
the pitch, which is float64. Not the streaming: `causal_vocoder.py`. Test: tests/models/test_causal_hift.py.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from antiphon.models.minicpmo.hift import (
    DILATIONS,
    HOP_SAMPLES,
    LAST_KERNEL,
    N_FFT,
    SINE_AMPLITUDE,
    UNVOICED_NOISE,
    VOICED_ABOVE_HZ,
    VOICED_NOISE,
    HiftNetwork,
)
from antiphon.models.minicpmo.hift_config import UPSAMPLING_RATES, HiftConfig
from antiphon.units import OUTPUT_RATE_HZ, SAMPLES_PER_MEL_FRAME

PITCH_LOOKAHEAD_FRAMES = 3
MEL_LOOKAHEAD_FRAMES = 4
FILTER_LOOKAHEAD_FRAMES = MEL_LOOKAHEAD_FRAMES + 1
"""Of a frame's samples: the last of them overlap with what the next frame begins with."""


class CausalHift(HiftNetwork):
    """The network of 1.0.7."""

    def _pitch_conv(self, num_before: int, num_after: int, index: int) -> nn.Module:
        if index == 0:
            return nn.Conv1d(num_before, num_after, PITCH_LOOKAHEAD_FRAMES + 1)
        return self._conv(num_before, num_after, 3, 1)

    def _first_conv(self, num_before: int, num_after: int) -> nn.Module:
        return _AheadConv(num_before, num_after, MEL_LOOKAHEAD_FRAMES + 1)

    def _upsampling(self, num_before: int, num_after: int, kernel: int, rate: int) -> nn.Module:
        return _UpsamplingConv(num_before, num_after, kernel, rate)

    def _downsampling(self, num_before: int, num_after: int, kernel: int, rate: int) -> nn.Module:
        return _BackConv(num_before, num_after, kernel, stride=rate, num_before_first=rate - 1)

    def _conv(self, num_before: int, num_after: int, kernel: int, dilation: int) -> nn.Module:
        return _BackConv(num_before, num_after, kernel, dilation=dilation, num_before_first=(kernel - 1) * dilation)

    def prepare(self) -> None:
        # An error of the pitch adds up in the phase, for as long as a turn lasts.
        self.f0_predictor.double()
        super().prepare()

    def pitch_hz(self, mel: Tensor) -> Tensor:
        """mel: [B, M, T + 3] float32, zeros where a turn has ended -> [B, T] float32."""
        pitch: Tensor = self.f0_predictor(mel.double())
        return pitch.to(mel.dtype)

    def source(self, pitch_hz: Tensor, phase: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The excitation signal. A frame's sines stand still: the reference takes the phase at its end for all of it.

        pitch_hz: [B, T] float32
        phase:    [B, H] float64 in turns, of the harmonics at the end of the frame before
        noise:    [B, 480 T, H] float32 from 0 to 1
        Returns: [B, 480 T] float32, and the phase at the end of the last frame.
        """
        orders = torch.arange(1, phase.shape[1] + 1, device=phase.device)
        turns_per_sample = ((pitch_hz[..., None] * orders / OUTPUT_RATE_HZ) % 1.0).double()
        turns = phase[:, None] + turns_per_sample.cumsum(dim=1) * SAMPLES_PER_MEL_FRAME
        sines = SINE_AMPLITUDE * (2 * math.pi * (turns % 1.0)).sin().to(pitch_hz.dtype)
        is_voiced = (pitch_hz > VOICED_ABOVE_HZ)[..., None]
        amplitude = torch.where(is_voiced, VOICED_NOISE, UNVOICED_NOISE)
        spread = [part.repeat_interleave(SAMPLES_PER_MEL_FRAME, dim=1) for part in (sines * is_voiced, amplitude)]
        source: Tensor = self.m_source(spread[0] + spread[1] * noise)
        return source, (phase + turns_per_sample.sum(dim=1) * SAMPLES_PER_MEL_FRAME) % 1.0


def history_frames(config: HiftConfig) -> int:
    """How many mel frames and frames of source before a frame its samples depend on, by the widths of the layers.

    Follows the first sample of frame 0 back through the network; places before it are negative. REFERENCE 9.8 has two
    frames more, which the official code adds for safety.
    """
    earliest_source = 0
    step = -((N_FFT // 2 - 1) // HOP_SAMPLES) - (LAST_KERNEL - 1)  # of the spectrum that the last layers make
    for stage in reversed(range(len(UPSAMPLING_RATES))):
        step -= _reach(max(config.resblock_kernels))
        rate = math.prod(UPSAMPLING_RATES[stage + 1 :])
        spectrum = (step - _reach(config.source_resblock_kernels[stage])) * rate - (rate - 1)
        earliest_source = min(earliest_source, HOP_SAMPLES * spectrum - N_FFT // 2)
        is_shifted = stage == len(UPSAMPLING_RATES) - 1  # by the reflected step in front
        step = (step - is_shifted - (config.upsampling_kernels[stage] - 1)) // UPSAMPLING_RATES[stage]
    return max(-step, -(earliest_source // SAMPLES_PER_MEL_FRAME))


def _reach(kernel: int) -> int:
    """Steps that a resblock looks back."""
    return (kernel - 1) * sum(dilation + 1 for dilation in DILATIONS)


class _BackConv(nn.Conv1d):
    """A convolution that sees `num_before_first` zeros before the first step and nothing after the last."""

    def __init__(
        self, num_before: int, num_after: int, kernel: int, *, num_before_first: int, stride: int = 1, dilation: int = 1
    ) -> None:
        super().__init__(num_before, num_after, kernel, stride, dilation=dilation)
        self._num_before_first = num_before_first

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (self._num_before_first, 0)))


class _AheadConv(nn.Conv1d):
    """Sees each step and those after it; zeros after the last."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, self.kernel_size[0] - 1)))


class _UpsamplingConv(_BackConv):
    """Repeats every step, then looks back."""

    def __init__(self, num_before: int, num_after: int, kernel: int, rate: int) -> None:
        super().__init__(num_before, num_after, kernel, num_before_first=kernel - 1)
        self._rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.repeat_interleave(self._rate, dim=-1))
