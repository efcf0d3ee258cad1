"""The HiFT vocoder: mel frames to 24 kHz samples by a neural source filter and a short inverse Fourier transform.

One call on one piece of mel; official names (REFERENCE 2.8, without `generator.`), formulas of REFERENCE 9.7 and the
golden README. Float32 only. What both generations share is here, with the layers of 1.0.5; those of 1.0.7 are in
`causal_hift.py`. Not the joining of pieces: `vocoder.py`. Tests: golden code2wav, tests/models/test_hift.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from antiphon.models.minicpmo.hift_config import UPSAMPLING_RATES, HiftConfig
from antiphon.models.minicpmo.hift_extent import NO_ENDS, WHOLE, Ends, Extent
from antiphon.units import OUTPUT_RATE_HZ, SAMPLES_PER_MEL_FRAME

N_FFT = 16
HOP_SAMPLES = 4
DILATIONS = (1, 3, 5)
SINE_AMPLITUDE = 0.1
VOICED_NOISE = 0.003
UNVOICED_NOISE = SINE_AMPLITUDE / 3
VOICED_ABOVE_HZ = 10.0
STAGE_SLOPE = 0.1
LAST_SLOPE = 0.01
MAX_MAGNITUDE = 100.0
MAX_SAMPLE = 0.99
LAST_KERNEL = 7
SNAKE_EPS = 1e-9


def fold_weight_norms(module: nn.Module) -> None:
    """Replace every weight-normed weight by its product g · v / ‖v‖, in place. Call it once, after loading."""
    for layer in list(module.modules()):
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight")


class HiftNetwork(nn.Module, ABC):
    """The weights of `hift.pt` and the filter. Which samples its convolutions see is for the generations to say."""

    def __init__(self, config: HiftConfig) -> None:
        super().__init__()
        self.config = config
        num_stages = len(config.upsampling_kernels)
        channels = [config.base_channels >> stage for stage in range(num_stages + 1)]
        frames_per_source_step = [math.prod(UPSAMPLING_RATES[stage + 1 :]) for stage in range(num_stages)]
        self.f0_predictor = _PitchPredictor(config, self._pitch_conv)
        self.m_source = _HarmonicMerge(config.num_harmonics)
        self.conv_pre = weight_norm(self._first_conv(config.num_mel_bins, config.base_channels))
        self.ups = nn.ModuleList(
            weight_norm(self._upsampling(before, after, kernel, rate))
            for before, after, kernel, rate in zip(
                channels, channels[1:], config.upsampling_kernels, UPSAMPLING_RATES, strict=False
            )
        )
        self.source_downs = nn.ModuleList(
            self._downsampling(N_FFT + 2, after, 1 if rate == 1 else 2 * rate, rate)
            for after, rate in zip(channels[1:], frames_per_source_step, strict=True)
        )
        self.source_resblocks = nn.ModuleList(
            _ResBlock(after, kernel, self._conv)
            for after, kernel in zip(channels[1:], config.source_resblock_kernels, strict=True)
        )
        self.resblocks = nn.ModuleList(
            _ResBlock(after, kernel, self._conv) for after in channels[1:] for kernel in config.resblock_kernels
        )
        self.conv_post = weight_norm(self._conv(channels[-1], N_FFT + 2, LAST_KERNEL, 1))

    @abstractmethod
    def _pitch_conv(self, num_before: int, num_after: int, index: int) -> nn.Module:
        """The pitch predictor's convolution number `index`."""

    @abstractmethod
    def _first_conv(self, num_before: int, num_after: int) -> nn.Module: ...

    @abstractmethod
    def _upsampling(self, num_before: int, num_after: int, kernel: int, rate: int) -> nn.Module: ...

    @abstractmethod
    def _downsampling(self, num_before: int, num_after: int, kernel: int, rate: int) -> nn.Module: ...

    @abstractmethod
    def _conv(self, num_before: int, num_after: int, kernel: int, dilation: int) -> nn.Module:
        """All others: as many steps out as in."""

    def prepare(self) -> None:
        """Once, when the weights are loaded: to run them."""
        fold_weight_norms(self)

    def filter(self, mel: Tensor, source: Tensor, extent: Extent = WHOLE) -> Tensor:
        """mel: [B, M, T], source: [B, 480 T] float32 -> samples [B, 480 T] float32 within ±0.99.

        extent: of what is real; the mel is zero behind it, and the samples there mean nothing.
        """
        spectrum = _spectrum(source, extent)
        num_stages = len(self.ups)
        num_parallel = len(self.resblocks) // num_stages
        x, ends, steps_per_frame = self.conv_pre(mel), extent.at(1), 1
        for stage, rate in enumerate(UPSAMPLING_RATES):
            x = self.ups[stage](ends.cut(F.leaky_relu(x, STAGE_SLOPE)))
            steps_per_frame *= rate
            ends = extent.at(steps_per_frame)
            if stage == num_stages - 1:
                x = F.pad(x, (1, 0), mode="reflect")  # the spectrum has one frame more, as its frames are centred
                ends = extent.at(steps_per_frame, num_more=1)
            x = x + self.source_resblocks[stage](self.source_downs[stage](spectrum), ends)
            parallel = self.resblocks[stage * num_parallel : (stage + 1) * num_parallel]
            x = torch.stack([block(x, ends) for block in parallel]).mean(0)
        x = self.conv_post(ends.cut(F.leaky_relu(x, LAST_SLOPE)))
        log_magnitude, phase = x.chunk(2, dim=1)
        samples = _samples(log_magnitude.exp().clamp(max=MAX_MAGNITUDE), phase.sin(), ends)
        return samples.clamp(-MAX_SAMPLE, MAX_SAMPLE)


class Hift(HiftNetwork):
    """The network of 1.0.5. Every convolution looks as far ahead as it looks back."""

    def _pitch_conv(self, num_before: int, num_after: int, index: int) -> nn.Module:
        return self._conv(num_before, num_after, 3, 1)

    def _first_conv(self, num_before: int, num_after: int) -> nn.Module:
        return self._conv(num_before, num_after, 7, 1)

    def _upsampling(self, num_before: int, num_after: int, kernel: int, rate: int) -> nn.Module:
        return nn.ConvTranspose1d(num_before, num_after, kernel, rate, (kernel - rate) // 2)

    def _downsampling(self, num_before: int, num_after: int, kernel: int, rate: int) -> nn.Module:
        return nn.Conv1d(num_before, num_after, kernel, rate, rate // 2)

    def _conv(self, num_before: int, num_after: int, kernel: int, dilation: int) -> nn.Module:
        return nn.Conv1d(num_before, num_after, kernel, dilation=dilation, padding=dilation * (kernel - 1) // 2)

    def pitch_hz(self, mel: Tensor, extent: Extent = WHOLE) -> Tensor:
        """mel: [B, M, T] float32, zeros behind the extent -> [B, T] float32."""
        pitch: Tensor = self.f0_predictor(mel, extent.at(1))
        return pitch

    def source(self, pitch_hz: Tensor, noise: Tensor, extent: Extent = WHOLE) -> Tensor:
        """The excitation signal. The phase starts at zero in every call.

        pitch_hz: [B, T] float32
        noise:    [B, 480 T, 9] float32, standard normal, or zeros
        Returns: [B, 480 T] float32.
        """
        sines, is_voiced = harmonics(pitch_hz, noise.shape[-1], extent)
        amplitude = torch.where(is_voiced, VOICED_NOISE, UNVOICED_NOISE)
        out: Tensor = self.m_source(sines * is_voiced + amplitude * noise)
        return out


def harmonics(pitch_hz: Tensor, num_harmonics: int, extent: Extent = WHOLE) -> tuple[Tensor, Tensor]:
    """Sines of the pitch and its multiples, and where there is a voice.

    The phase is summed over whole frames and interpolated between their centres, in float32 radians as the reference
    does: it grows by thousands a frame, so its rounding is heard in no single call but would differ in any other order.
    pitch_hz: [B, T] float32 -> [B, 480 T, H] float32, [B, 480 T, 1] bool.
    """
    orders = torch.arange(1, num_harmonics + 1, device=pitch_hz.device)
    turns_per_sample = (pitch_hz[..., None] * orders / OUTPUT_RATE_HZ) % 1.0
    phase = turns_per_sample.cumsum(dim=1) * (2 * math.pi) * SAMPLES_PER_MEL_FRAME
    phase = F.interpolate(extent.last_repeated(phase).mT, scale_factor=SAMPLES_PER_MEL_FRAME, mode="linear").mT
    is_voiced = (pitch_hz > VOICED_ABOVE_HZ).repeat_interleave(SAMPLES_PER_MEL_FRAME, dim=1)
    return SINE_AMPLITUDE * phase.sin(), is_voiced[..., None]


class _PitchPredictor(nn.Module):
    def __init__(self, config: HiftConfig, conv: Callable[[int, int, int], nn.Module]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = config.num_mel_bins
        for index in range(config.num_pitch_convs):
            layers += [weight_norm(conv(channels, config.pitch_channels, index)), nn.ELU()]
            channels = config.pitch_channels
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(config.pitch_channels, 1)

    def forward(self, mel: Tensor, ends: Ends = NO_ENDS) -> Tensor:
        """mel: [B, M, T] floating -> [B, T] of the same kind, in Hz; the causal one needs three frames more."""
        x = mel
        for layer in self.condnet:
            x = layer(x)
            if isinstance(layer, nn.ELU):
                x = ends.cut(x)
        pitch: Tensor = self.classifier(x.mT)
        return pitch.abs().squeeze(-1)


class _HarmonicMerge(nn.Module):
    def __init__(self, num_harmonics: int) -> None:
        super().__init__()
        self.l_linear = nn.Linear(num_harmonics, 1)

    def forward(self, sines: Tensor) -> Tensor:
        """sines: [B, n, H] float32 -> [B, n] float32."""
        merged: Tensor = self.l_linear(sines)
        return merged.tanh().squeeze(-1)


class _ResBlock(nn.Module):
    """Three times: snake, dilated convolution, snake, convolution, plus the input."""

    def __init__(self, channels: int, kernel: int, conv: Callable[[int, int, int, int], nn.Module]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(weight_norm(conv(channels, channels, kernel, dilation)) for dilation in DILATIONS)
        self.convs2 = nn.ModuleList(weight_norm(conv(channels, channels, kernel, 1)) for _ in DILATIONS)
        self.activations1 = nn.ModuleList(_Snake(channels) for _ in DILATIONS)
        self.activations2 = nn.ModuleList(_Snake(channels) for _ in DILATIONS)

    def forward(self, x: Tensor, ends: Ends) -> Tensor:
        """x: [B, C, n] float32 -> the same."""
        for snake1, conv1, snake2, conv2 in zip(
            self.activations1, self.convs1, self.activations2, self.convs2, strict=True
        ):
            x = x + conv2(snake2(conv1(snake1(x, ends)), ends))
        return x


class _Snake(nn.Module):
    """x + sin²(αx) / α, one α per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, ends: Ends) -> Tensor:
        """x: [B, C, n] float32 -> the same, zeros behind the ends."""
        return ends.snake(x.contiguous(), self.alpha, SNAKE_EPS)


def _window(device: torch.device) -> Tensor:
    return torch.hann_window(N_FFT, device=device, dtype=torch.float64)


def _waves(device: torch.device) -> tuple[Tensor, Tensor]:
    """[9, 16] float64 each: cosine and sine of every frequency at every sample of a frame."""
    frequencies = torch.arange(N_FFT // 2 + 1, device=device, dtype=torch.float64)
    samples = torch.arange(N_FFT, device=device, dtype=torch.float64)
    angles = 2 * math.pi / N_FFT * frequencies[:, None] * samples
    return angles.cos(), angles.sin()


def _spectrum(samples: Tensor, extent: Extent = WHOLE) -> Tensor:
    """The transform of windowed frames around every 4th sample, the ends mirrored; zeros behind the extent.

    A product by a matrix of 18 rows: of 16 samples it costs nothing, while a recorded cuFFT now and then reads what is
    not there when other stages are at work (seen on an H200, torch 2.11).
    samples: [B, 4 n] float32 -> [B, 18, n + 1] float32, the 9 real parts before the 9 imaginary ones.
    """
    cosines, sines = _waves(samples.device)
    matrix = (torch.cat((cosines, -sines)) * _window(samples.device)).to(samples.dtype)
    frames = extent.mirrored(samples, N_FFT // 2).unfold(-1, N_FFT, HOP_SAMPLES)
    return extent.at(SAMPLES_PER_MEL_FRAME // HOP_SAMPLES, num_more=1).cut(matrix @ frames.mT)


def _samples(magnitude: Tensor, phase: Tensor, ends: Ends = NO_ENDS) -> Tensor:
    """The inverse of `_spectrum` from polar parts, of the frames before the ends.

    magnitude, phase: [B, 9, n + 1] float32 -> [B, 4 n] float32.
    """
    window = _window(magnitude.device)
    # All frequencies but the first and the last stand for their mirror images as well.
    weights = torch.full((N_FFT // 2 + 1, 1), 2.0 / N_FFT, device=magnitude.device, dtype=torch.float64)
    weights[:: N_FFT // 2] /= 2
    cosines, sines = _waves(magnitude.device)
    matrix = (torch.cat((cosines * weights, -sines * weights)) * window).to(magnitude.dtype)
    frames = ends.cut(matrix.mT @ torch.cat((magnitude * phase.cos(), magnitude * phase.sin()), dim=1))
    covered = ends.cut(window.square().to(magnitude.dtype)[:, None].expand(1, N_FFT, frames.shape[2]))
    half = N_FFT // 2
    return (_overlapped(frames) / _overlapped(covered).clamp(min=SNAKE_EPS))[:, half:-half]


def _overlapped(frames: Tensor) -> Tensor:
    """Sum of frames that start every 4 samples. frames: [B, 16, n] -> [B, 4 (n - 1) + 16]."""
    num_samples = HOP_SAMPLES * (frames.shape[2] - 1) + N_FFT
    return F.fold(frames, (1, num_samples), (1, N_FFT), stride=(1, HOP_SAMPLES))[:, 0, 0]
