"""Mel chunks to one continuous waveform with the causal vocoder of minicpmo-utils 1.0.7: no fades, nothing twice.

A frame's samples follow from the frames before it and a few after it, so a chunk is rendered with as much of the past
as the network looks back to, and what needs frames that are not there yet waits: 160 ms, as in the reference
(REFERENCE 9.8). However a turn is cut, it sounds the same. The noise is a session's own, where the reference repeats
one table of 300 s for everybody and in every turn. Test: tests/models/test_causal_vocoder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.models.minicpmo.causal_hift import (
    FILTER_LOOKAHEAD_FRAMES,
    PITCH_LOOKAHEAD_FRAMES,
    CausalHift,
    history_frames,
)
from antiphon.models.minicpmo.vocoder import SourceNoise, TurnState, VocoderRow
from antiphon.units import SAMPLES_PER_MEL_FRAME

DELAY_FRAMES = PITCH_LOOKAHEAD_FRAMES + FILTER_LOOKAHEAD_FRAMES


@dataclass(frozen=True, slots=True, eq=False)
class CausalState:
    """What a turn's next chunk is rendered with; tails of length 0 and a phase of 0 before the first.

    Counted from the turn's start, with R frames received:

        0 ...... H frames of history ...... R - 8 .. 5 .. R - 3 .. 3 .. R
                 |--------------- mel_tail ------------------------------|
                 |--------------- source_tail ---------|
        samples are given out up to here  ^            ^ the pitch is known, and the source's phase is `phase`

    mel_tail:    [1, M, at most H + 8] float32
    source_tail: [1, 480 · at most H + 5] float32
    phase:       [1, harmonics] float64, in turns
    """

    mel_tail: Tensor
    source_tail: Tensor
    phase: Tensor
    noise: SourceNoise

    def num_frames(self, num_new_frames: int, *, is_last: bool) -> int:
        """From the start of the tails to where the pitch can be known."""
        num_frames = self.mel_tail.shape[-1] + num_new_frames
        return num_frames if is_last else max(0, num_frames - PITCH_LOOKAHEAD_FRAMES)

    @property
    def num_spoken_frames(self) -> int:
        """Frames at the start of the tails whose samples were given out."""
        return max(0, self.mel_tail.shape[-1] - DELAY_FRAMES)


class CausalVocoder:
    """Runs the HiFT of 1.0.7 chunk by chunk. Holds no session's state."""

    def __init__(self, hift: CausalHift) -> None:
        self.hift = hift
        self._like = hift.m_source.l_linear.weight
        # The pitch reaches back two frames per convolution but the first; the tail of the mel serves it as well.
        pitch_history = 2 * (hift.config.num_pitch_convs - 1)
        self.num_history_frames = max(history_frames(hift.config), pitch_history - FILTER_LOOKAHEAD_FRAMES)

    def at_turn_start(self, noise: SourceNoise) -> CausalState:
        config, new = self.hift.config, self._like.new_zeros
        phase = new(1, config.num_harmonics, dtype=torch.float64)
        return CausalState(new(1, config.num_mel_bins, 0), new(1, 0), phase, noise)

    def speak(self, rows: Sequence[VocoderRow]) -> list[tuple[Tensor, CausalState]]:
        """As in `SpeechVocoder`; chunks of any length, also of none."""
        num_frames = rows[0].num_frames
        states = [_own(row.state) for row in rows]
        mels = [
            torch.cat((state.mel_tail, row.mel.to(self._like.dtype)), dim=-1)
            for state, row in zip(states, rows, strict=True)
        ]
        if num_frames == 0:
            silence = self._like.new_zeros(1, 0)
            return [(silence, replace(state, mel_tail=mel)) for state, mel in zip(states, mels, strict=True)]
        ahead = num_frames + PITCH_LOOKAHEAD_FRAMES
        pitch_hz = self.hift.pitch_hz(torch.cat([F.pad(mel, (0, ahead - mel.shape[-1])) for mel in mels]))
        excited = [self._excited(*own) for own in zip(states, mels, pitch_hz.chunk(len(rows)), strict=True)]
        speech = self.hift.filter(
            torch.cat([mel[..., :num_frames] for mel in mels]), torch.cat([after.source_tail for after in excited])
        )
        spoken = zip(rows, states, excited, speech.chunk(len(rows)), strict=True)
        return [self._cut(*own) for own in spoken]

    def _excited(self, state: CausalState, mel: Tensor, pitch_hz: Tensor) -> CausalState:
        """The state with all of `mel` and with the source of the frames whose pitch is new.

        mel: [1, M, T] float32; pitch_hz: [1, F] float32, both from the start of the tails
        """
        new_pitch = pitch_hz[:, state.source_tail.shape[-1] // SAMPLES_PER_MEL_FRAME :]
        num_samples = new_pitch.shape[1] * SAMPLES_PER_MEL_FRAME
        drawn, noise = state.noise.draw_uniform(num_samples, self.hift.config.num_harmonics)
        source, phase = self.hift.source(new_pitch, state.phase, drawn)
        return CausalState(mel, torch.cat((state.source_tail, source), dim=-1), phase, noise)

    def _cut(
        self, row: VocoderRow, before: CausalState, excited: CausalState, speech: Tensor
    ) -> tuple[Tensor, CausalState]:
        """What of a row's speech is new and complete, and the state without what nothing needs any more.

        speech: [1, 480 F] float32, from the start of the tails
        """
        start = before.num_spoken_frames
        if row.is_last:
            return speech[:, start * SAMPLES_PER_MEL_FRAME :], self.at_turn_start(excited.noise)
        end = excited.num_spoken_frames
        samples = speech[:, start * SAMPLES_PER_MEL_FRAME : end * SAMPLES_PER_MEL_FRAME]
        if start == 0 and end > 0:
            samples = F.pad(samples, (DELAY_FRAMES * SAMPLES_PER_MEL_FRAME, 0))
        num_old = max(0, end - self.num_history_frames)
        tails = (
            excited.mel_tail[..., num_old:].clone(),
            excited.source_tail[:, num_old * SAMPLES_PER_MEL_FRAME :].clone(),
        )
        return samples, CausalState(*tails, excited.phase, excited.noise)


def _own(state: TurnState) -> CausalState:
    assert isinstance(state, CausalState), f"{type(state).__name__} is of another vocoder"
    return state
