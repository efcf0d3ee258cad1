"""Mel chunks to one continuous waveform: the vocoder with its short memory, and the joining of what it returns.

The reference of minicpmo-utils 1.0.5 vocodes a chunk together with the last 8 mel frames, continues the old source
signal through them and fades the two renderings of those 160 ms into each other (REFERENCE 9.7). Equally long pieces
of several sessions are one batch. Not PCM, not units: `stages/code2wav`. Tests: golden code2wav,
tests/models/test_hift.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from antiphon.kernels.sampling.draws import generator_seed
from antiphon.models.minicpmo.hift import Hift
from antiphon.units import SAMPLES_PER_MEL_FRAME

OVERLAP_FRAMES = 8
OVERLAP_SAMPLES = OVERLAP_FRAMES * SAMPLES_PER_MEL_FRAME


class SourceNoise(Protocol):
    """Where the noise in the vocoder's source comes from; one per session, immutable, so that a chunk can be redone."""

    def draw(self, num_samples: int, num_harmonics: int) -> tuple[Tensor, SourceNoise]:
        """[1, num_samples, num_harmonics] float32, standard normal, on the vocoder's device; and the noise after it."""


@dataclass(frozen=True, slots=True)
class SeededNoise:
    """The normal case: a session's own random numbers, so that nobody else changes its output."""

    seed: int
    device: torch.device
    num_drawn: int = 0

    def draw(self, num_samples: int, num_harmonics: int) -> tuple[Tensor, SourceNoise]:
        generator = torch.Generator(self.device).manual_seed(generator_seed(self.seed, self.num_drawn))
        values = torch.randn(1, num_samples, num_harmonics, generator=generator, device=self.device)
        return values, replace(self, num_drawn=self.num_drawn + 1)


@dataclass(frozen=True, slots=True)
class NoNoise:
    """Zeros, to compare waveforms."""

    device: torch.device

    def draw(self, num_samples: int, num_harmonics: int) -> tuple[Tensor, SourceNoise]:
        return torch.zeros(1, num_samples, num_harmonics, device=self.device), self


@dataclass(frozen=True, slots=True, eq=False)
class VocoderState:
    """How the last chunk of this turn ended, all tails of length 0 before the first; and the noise that comes next.

    mel_tail:    [1, M, 8] float32
    source_tail: [1, 3840] float32
    speech_tail: [1, 3840] float32; rendered, faded, not yet given out
    """

    mel_tail: Tensor
    source_tail: Tensor
    speech_tail: Tensor
    noise: SourceNoise


@dataclass(frozen=True, slots=True, eq=False)
class VocoderRow:
    """One session's chunk in a common run.

    mel: [1, M, T] floating; T ≥ 8 unless `is_last`
    """

    mel: Tensor
    state: VocoderState
    is_last: bool

    @property
    def num_frames(self) -> int:
        """Frames that the network sees: those of the chunk before come again."""
        return self.state.mel_tail.shape[-1] + self.mel.shape[-1]


class Vocoder:
    """Runs HiFT chunk by chunk. Holds no session's state."""

    def __init__(self, hift: Hift) -> None:
        self.hift = hift
        self._like = hift.f0_predictor.classifier.weight

    def at_turn_start(self, noise: SourceNoise) -> VocoderState:
        new = self._like.new_zeros
        return VocoderState(new(1, self.hift.config.num_mel_bins, 0), new(1, 0), new(1, 0), noise)

    def speak(self, rows: Sequence[VocoderRow]) -> list[tuple[Tensor, VocoderState]]:
        """The next samples of a turn, for each of several sessions.

        rows: with equally many frames
        Returns: per row [1, n] float32 within ±1.08, n as in `spliced`, and the state after them.
        """
        num_samples = rows[0].num_frames * SAMPLES_PER_MEL_FRAME
        pieces = [torch.cat((row.state.mel_tail, row.mel.to(self._like.dtype)), dim=-1) for row in rows]
        draws = [row.state.noise.draw(num_samples, self.hift.config.num_harmonics) for row in rows]
        mel, drawn = torch.cat(pieces), torch.cat([values for values, _ in draws])
        new_source = self.hift.source(self.hift.pitch_hz(mel), drawn)
        source = torch.cat(
            [_continued(row.state.source_tail, own) for row, own in zip(rows, new_source.chunk(len(rows)), strict=True)]
        )
        speech = self.hift.filter(mel, source)
        ended: list[tuple[Tensor, VocoderState]] = []
        for index, (row, (_, noise)) in enumerate(zip(rows, draws, strict=True)):
            own = slice(index, index + 1)
            samples, speech_tail = spliced(speech[own], row.state.speech_tail, is_last=row.is_last)
            tails = mel[own, :, -OVERLAP_FRAMES:].clone(), source[own, -OVERLAP_SAMPLES:].clone()
            ended.append((samples, VocoderState(*tails, speech_tail, noise)))
        return ended


def _continued(tail: Tensor, source: Tensor) -> Tensor:
    """The source that was heard already, then the new one. tail: [1, 3840 or 0], source: [1, n] float32 -> [1, n]."""
    return torch.cat((tail, source[:, tail.shape[-1] :]), dim=-1)


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
