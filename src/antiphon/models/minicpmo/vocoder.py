"""Mel chunks to one continuous waveform: what any vocoder does for a turn, and the one of minicpmo-utils 1.0.5.

The reference of 1.0.5 vocodes a chunk together with the last 8 mel frames, continues the old source
signal through them and fades the two renderings of those 160 ms into each other (REFERENCE 9.7). Equally long pieces
of several sessions are one batch. Not PCM, not units: `stages/code2wav`. Not 1.0.7: `causal_vocoder.py`. Tests: golden
code2wav, tests/models/test_hift.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from antiphon.kernels.sampling.draws import generator_seed, uniforms
from antiphon.models.minicpmo.hift import Hift
from antiphon.units import SAMPLES_PER_MEL_FRAME

OVERLAP_FRAMES = 8
OVERLAP_SAMPLES = OVERLAP_FRAMES * SAMPLES_PER_MEL_FRAME


class SourceNoise(Protocol):
    """Where the noise in the vocoder's source comes from; one per session, immutable, so that a chunk can be redone."""

    def draw(self, num_samples: int, num_harmonics: int) -> tuple[Tensor, SourceNoise]:
        """[1, num_samples, num_harmonics] float32, standard normal, on the vocoder's device; and the noise after it."""

    def draw_uniform(self, num_samples: int, num_harmonics: int) -> tuple[Tensor, SourceNoise]:
        """The same from 0 to 1. Two draws one after the other give what one of both lengths gives."""


@dataclass(frozen=True, slots=True)
class SeededNoise:
    """The normal case: a session's own random numbers, so that nobody else changes its output."""

    seed: int
    device: torch.device
    num_drawn_samples: int = 0

    def draw(self, num_samples: int, num_harmonics: int) -> tuple[Tensor, SourceNoise]:
        seed = generator_seed(self.seed, self.num_drawn_samples)
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(1, num_samples, num_harmonics, generator=generator, device=self.device)
        return values, self._after(num_samples)

    def draw_uniform(self, num_samples: int, num_harmonics: int) -> tuple[Tensor, SourceNoise]:
        after = self._after(num_samples)
        counters = torch.arange(self.num_drawn_samples, after.num_drawn_samples, device=self.device)
        return uniforms(torch.full_like(counters, self.seed), counters, num_harmonics)[None], after

    def _after(self, num_samples: int) -> SeededNoise:
        return replace(self, num_drawn_samples=self.num_drawn_samples + num_samples)


@dataclass(frozen=True, slots=True)
class NoNoise:
    """Zeros, to compare waveforms."""

    device: torch.device

    def draw(self, num_samples: int, num_harmonics: int) -> tuple[Tensor, SourceNoise]:
        return torch.zeros(1, num_samples, num_harmonics, device=self.device), self

    def draw_uniform(self, num_samples: int, num_harmonics: int) -> tuple[Tensor, SourceNoise]:
        return self.draw(num_samples, num_harmonics)


class TurnState(Protocol):
    """How the last chunk of a turn ended. It goes back to the vocoder that made it; nobody else looks into it."""

    @property
    def noise(self) -> SourceNoise:
        """What comes next, in this turn and after it."""

    def num_frames(self, num_new_frames: int, *, is_last: bool) -> int:
        """Frames that a run with so many new ones computes: rows of one run have equally many."""


@dataclass(frozen=True, slots=True, eq=False)
class VocoderRow:
    """One session's chunk in a common run.

    mel: [1, M, T] floating; for 1.0.5, T ≥ 8 unless `is_last`
    """

    mel: Tensor
    state: TurnState
    is_last: bool

    @property
    def num_frames(self) -> int:
        return self.state.num_frames(self.mel.shape[-1], is_last=self.is_last)


class SpeechVocoder(Protocol):
    """What code2wav needs of a vocoder. It holds no session's state."""

    def at_turn_start(self, noise: SourceNoise) -> TurnState: ...

    def speak(self, rows: Sequence[VocoderRow]) -> Sequence[tuple[Tensor, TurnState]]:
        """The next samples of a turn, for each of several sessions.

        rows: with equally many frames
        Returns: per row [1, n] float32, and the state after them. As many samples as the chunk has frames, after 160 ms
        of silence at a turn's start; the last chunk ends with the 160 ms that were held back until then.
        """


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

    def num_frames(self, num_new_frames: int, *, is_last: bool) -> int:
        """The frames of the chunk before come again."""
        return self.mel_tail.shape[-1] + num_new_frames


class Vocoder:
    """Runs the HiFT of 1.0.5 chunk by chunk. Holds no session's state."""

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
        states = [_own(row.state) for row in rows]
        pieces = [
            torch.cat((state.mel_tail, row.mel.to(self._like.dtype)), dim=-1)
            for state, row in zip(states, rows, strict=True)
        ]
        draws = [state.noise.draw(num_samples, self.hift.config.num_harmonics) for state in states]
        mel, drawn = torch.cat(pieces), torch.cat([values for values, _ in draws])
        new_source = self.hift.source(self.hift.pitch_hz(mel), drawn)
        source = torch.cat(
            [_continued(state.source_tail, own) for state, own in zip(states, new_source.chunk(len(rows)), strict=True)]
        )
        speech = self.hift.filter(mel, source)
        ended: list[tuple[Tensor, VocoderState]] = []
        for index, (row, state, (_, noise)) in enumerate(zip(rows, states, draws, strict=True)):
            own = slice(index, index + 1)
            samples, speech_tail = spliced(speech[own], state.speech_tail, is_last=row.is_last)
            tails = mel[own, :, -OVERLAP_FRAMES:].clone(), source[own, -OVERLAP_SAMPLES:].clone()
            ended.append((samples, VocoderState(*tails, speech_tail, noise)))
        return ended


def _own(state: TurnState) -> VocoderState:
    assert isinstance(state, VocoderState), f"{type(state).__name__} is of another vocoder"
    return state


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
