"""Mel chunks to one continuous waveform: the vocoder with its short memory, and the joining of what it returns.

The reference of minicpmo-utils 1.0.5 vocodes a chunk together with the last 8 mel frames, continues the old source
signal through them and fades the two renderings of those 160 ms into each other (REFERENCE 9.7). Not PCM, not units:
`stages/code2wav`. Tests: golden code2wav, tests/models/test_hift.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from antiphon.models.minicpmo.hift import Hift
from antiphon.units import SAMPLES_PER_MEL_FRAME

OVERLAP_FRAMES = 8
OVERLAP_SAMPLES = OVERLAP_FRAMES * SAMPLES_PER_MEL_FRAME


class SourceNoise(Protocol):
    """Where the noise in the vocoder's source comes from; one per session."""

    def draw(self, num_samples: int, num_harmonics: int) -> Tensor:
        """Standard normal values, [1, num_samples, num_harmonics] float32 on the vocoder's device."""


class SeededNoise:
    """The normal case: a session's own random numbers, so that nobody else changes its output."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def draw(self, num_samples: int, num_harmonics: int) -> Tensor:
        generator = self._generator
        return torch.randn(1, num_samples, num_harmonics, generator=generator, device=generator.device)


class NoNoise:
    """Zeros, to compare waveforms."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def draw(self, num_samples: int, num_harmonics: int) -> Tensor:
        return torch.zeros(1, num_samples, num_harmonics, device=self._device)


@dataclass(frozen=True, slots=True, eq=False)
class VocoderState:
    """How the last chunk of this turn ended; all of length 0 before the first.

    mel_tail:    [B, M, 8] float32
    source_tail: [B, 3840] float32
    speech_tail: [B, 3840] float32; rendered, faded, not yet given out
    """

    mel_tail: Tensor
    source_tail: Tensor
    speech_tail: Tensor


class Vocoder:
    """Runs HiFT chunk by chunk. Holds no session's state."""

    def __init__(self, hift: Hift) -> None:
        self.hift = hift
        self._like = hift.f0_predictor.classifier.weight

    def at_turn_start(self) -> VocoderState:
        new = self._like.new_zeros
        return VocoderState(new(1, self.hift.config.num_mel_bins, 0), new(1, 0), new(1, 0))

    def speak(
        self, mel: Tensor, state: VocoderState, noise: SourceNoise, *, is_last: bool
    ) -> tuple[Tensor, VocoderState]:
        """The next samples of a turn.

        mel: [1, M, T] floating; T ≥ 8 unless `is_last`
        Returns: [1, n] float32 within ±1.08, n as in `spliced`, and the state after them.
        """
        mel = torch.cat((state.mel_tail, mel.to(self._like.dtype)), dim=-1)
        drawn = noise.draw(mel.shape[-1] * SAMPLES_PER_MEL_FRAME, self.hift.config.num_harmonics)
        source = self.hift.source(self.hift.pitch_hz(mel), drawn)
        source = torch.cat((state.source_tail, source[:, state.source_tail.shape[-1] :]), dim=-1)
        samples, speech_tail = spliced(self.hift.filter(mel, source), state.speech_tail, is_last=is_last)
        tails = mel[..., -OVERLAP_FRAMES:].clone(), source[:, -OVERLAP_SAMPLES:].clone()
        return samples, VocoderState(*tails, speech_tail)


def spliced(speech: Tensor, tail: Tensor, *, is_last: bool) -> tuple[Tensor, Tensor]:
    """Join a rendered chunk to the one before it.

    speech: [B, n] float32, from the first of the overlapped frames on
    tail:   [B, 3840] float32, the end of the chunk before; [B, 0] at a turn's start, which has 160 ms of silence
            instead, unless this is all of the turn
    Returns: what can be given out, and the end that cannot ([B, 3840]; the last chunk gives it out all the same).
    """
    if tail.shape[-1]:
        fade_in, fade_out = _fade(tail.device)
        overlap = speech[:, :OVERLAP_SAMPLES] * fade_in + tail * fade_out
        speech = torch.cat((overlap.to(speech.dtype), speech[:, OVERLAP_SAMPLES:]), dim=-1)
    new_tail = speech[:, -OVERLAP_SAMPLES:].clone()
    if is_last:
        return speech, new_tail
    silence = speech.new_zeros(len(speech), 0 if tail.shape[-1] else OVERLAP_SAMPLES)
    return torch.cat((silence, speech[:, :-OVERLAP_SAMPLES]), dim=-1), new_tail


def _fade(device: torch.device) -> tuple[Tensor, Tensor]:
    """The halves of a symmetric Hamming window, [3840] float64. They add up to 1.08, not 1, as in the reference."""
    window = torch.hamming_window(2 * OVERLAP_SAMPLES, periodic=False, dtype=torch.float64, device=device)
    fade_in, fade_out = window.chunk(2)
    return fade_in, fade_out
