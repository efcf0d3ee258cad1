"""Mel chunks to one continuous waveform with the causal vocoder of minicpmo-utils 1.0.7: no fades, nothing twice.

A frame's samples follow from the frames before it and a few after it, so a chunk is rendered with as much of the past
as the network looks back to, and what needs frames that are not there yet waits: 160 ms, as in the reference
(REFERENCE 9.8). However a turn is cut, it sounds the same. The noise is a session's own, where the reference repeats
one table of 300 s for everybody and in every turn. Test: tests/models/test_causal_vocoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.transfer import upload
from antiphon.models.minicpmo.captured import (
    NumRuns,
    Recorder,
    fastest_convolutions,
    smallest,
    tensor_core_convolutions,
)
from antiphon.models.minicpmo.causal_hift import (
    FILTER_LOOKAHEAD_FRAMES,
    PITCH_LOOKAHEAD_FRAMES,
    CausalHift,
    history_frames,
)
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.hift_extent import WHOLE, Extent, Ragged
from antiphon.models.minicpmo.vocoder import SourceNoise, TurnState, VocoderRow, lengthened
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
    def num_source_frames(self) -> int:
        """Whose source is known."""
        return self.source_tail.shape[-1] // SAMPLES_PER_MEL_FRAME

    @property
    def num_spoken_frames(self) -> int:
        """Frames at the start of the tails whose samples were given out."""
        return max(0, self.mel_tail.shape[-1] - DELAY_FRAMES)


@dataclass(frozen=True, slots=True, eq=False)
class CausalInputs:
    """What a run of the network on pieces of B sessions reads; F frames can be rendered, S have a source already.

    mel:         [B, M, F + 3] float32, zeros behind the end of turns
    source_tail: [B, 480 S] float32
    phase:       [B, harmonics] float64
    noise:       [B, 480 (F - S), harmonics] float32
    num_frames:  [B] int64, how many of F are real; all, but where a turn ends
    """

    mel: Tensor
    source_tail: Tensor
    phase: Tensor
    noise: Tensor
    num_frames: Tensor


Excited = tuple[Tensor, Tensor, Tensor]
"""Samples and source, [B, 480 F] float32, and the phase after them, [B, harmonics] float64."""


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    inputs: CausalInputs
    replay: Callable[[], Excited]


class CausalVocoder:
    """Runs the HiFT of 1.0.7 chunk by chunk. Holds no session's state."""

    def __init__(self, hift: CausalHift, compute: Compute = Compute.FLOAT32) -> None:
        """compute: decides in which numbers a recorded run convolves; the pitch is float64 always."""
        self.hift = hift
        self.num_runs = NumRuns()
        self._compute = compute
        self._like = hift.m_source.l_linear.weight
        # The pitch reaches back two frames per convolution but the first; the tail of the mel serves it as well.
        pitch_history = 2 * (hift.config.num_pitch_convs - 1)
        self.num_history_frames = max(history_frames(hift.config), pitch_history - FILTER_LOOKAHEAD_FRAMES)
        self._recorded: dict[tuple[int, ...], _Recorded] = {}

    def at_turn_start(self, noise: SourceNoise) -> CausalState:
        config, new = self.hift.config, self._like.new_zeros
        phase = new(1, config.num_harmonics, dtype=torch.float64)
        return CausalState(new(1, config.num_mel_bins, 0), new(1, 0), phase, noise)

    def capture(self, nums_rows: Sequence[int], nums_new_frames: Sequence[int], recorder: Recorder) -> Iterator[int]:
        """Record runs of so many sessions, at a turn's start and when the tails are full.

        Their chunks have the first number of new frames, or end a turn with up to the largest.
        """
        usual, longest = nums_new_frames[0], max(nums_new_frames)
        full = self.num_history_frames + DELAY_FRAMES, self.num_history_frames + FILTER_LOOKAHEAD_FRAMES
        kinds = [
            (num_rows, num_frames, num_source)
            for num_rows in sorted(nums_rows, reverse=True)
            for num_mel, num_source in (full, (0, 0))
            for num_frames in (num_mel + longest, num_mel + usual - PITCH_LOOKAHEAD_FRAMES)
        ]
        for index, kind in enumerate(kinds):
            self._recorded[kind] = self._record(*kind, recorder)
            yield len(kinds) - index - 1

    def _record(self, num_rows: int, num_frames: int, num_old_frames: int, recorder: Recorder) -> _Recorded:
        config, new = self.hift.config, self._like.new_zeros
        inputs = CausalInputs(
            mel=new(num_rows, config.num_mel_bins, num_frames + PITCH_LOOKAHEAD_FRAMES),
            source_tail=new(num_rows, num_old_frames * SAMPLES_PER_MEL_FRAME),
            phase=new(num_rows, config.num_harmonics, dtype=torch.float64),
            noise=new(num_rows, (num_frames - num_old_frames) * SAMPLES_PER_MEL_FRAME, config.num_harmonics),
            num_frames=new(num_rows, dtype=torch.int64) + num_frames,
        )
        extent = Ragged(inputs.num_frames)

        def run() -> Excited:
            return self._run(inputs, extent, tensor_core_convolutions(self._compute))

        with fastest_convolutions():
            return _Recorded(inputs, recorder.record(run))

    def kind_of(self, row: VocoderRow) -> tuple[int, ...]:
        """By what is known of their source, and by their length; ends of turns by that of recordings that hold them."""
        num_old_frames, num_frames = _own(row.state).num_source_frames, row.num_frames
        if row.is_last and num_frames:
            sizes = (size for _, size, old in self._recorded if old == num_old_frames and size >= num_frames)
            num_frames = min(sizes, default=num_frames)
        return num_old_frames, num_frames

    def speak(self, rows: Sequence[VocoderRow]) -> list[tuple[Tensor, CausalState]]:
        """As in `SpeechVocoder`; chunks of any length, also of none."""
        ((num_old_frames, num_frames),) = {self.kind_of(row) for row in rows}
        states = [_own(row.state) for row in rows]
        mels = [
            torch.cat((state.mel_tail, row.mel.to(self._like.dtype)), dim=-1)
            for state, row in zip(states, rows, strict=True)
        ]
        if num_frames == 0:
            silence = self._like.new_zeros(1, 0)
            return [(silence, replace(state, mel_tail=mel)) for state, mel in zip(states, mels, strict=True)]
        nums_frames = [row.num_frames for row in rows]
        num_harmonics = self.hift.config.num_harmonics
        draws = [
            state.noise.draw_uniform((own - num_old_frames) * SAMPLES_PER_MEL_FRAME, num_harmonics)
            for state, own in zip(states, nums_frames, strict=True)
        ]
        num_new_samples = (num_frames - num_old_frames) * SAMPLES_PER_MEL_FRAME
        parts = (
            [lengthened(mel, num_frames + PITCH_LOOKAHEAD_FRAMES) for mel in mels],
            [state.source_tail for state in states],
            [state.phase for state in states],
            [lengthened(values.mT, num_new_samples).mT for values, _ in draws],
        )
        lengths = upload(torch.tensor(nums_frames), self._like.device)
        recorded = smallest(self._recorded, len(rows), num_frames, num_old_frames)
        if recorded is None:
            mel, source_tail, phase, drawn = map(torch.cat, parts)
            extent = WHOLE if min(nums_frames) == num_frames else Ragged(lengths)
            inputs = CausalInputs(mel, source_tail, phase, drawn, lengths)
            speech, source, phase = self._run(inputs, extent, nullcontext())
        else:
            inputs = recorded.inputs
            for part, there in zip(parts, (inputs.mel, inputs.source_tail, inputs.phase, inputs.noise), strict=True):
                torch.cat(part, out=there[: len(rows)])
            inputs.num_frames[: len(rows)].copy_(lengths)
            # The next replay overwrites them.
            speech, source, phase = (one[: len(rows)].clone() for one in recorded.replay())
        self.num_runs = self.num_runs.one_more(is_replayed=recorded is not None)
        ended = []
        for index, (row, state, mel, (_, noise)) in enumerate(zip(rows, states, mels, draws, strict=True)):
            own, end = slice(index, index + 1), row.num_frames * SAMPLES_PER_MEL_FRAME
            excited = CausalState(mel, source[own, :end], phase[own].clone(), noise)
            ended.append(self._cut(row, state, excited, speech[own, :end]))
        return ended

    def _run(self, inputs: CausalInputs, extent: Extent, while_filtering: AbstractContextManager[None]) -> Excited:
        """while_filtering: is entered around all that no phase is summed up from.

        Where pieces are filled up, the phase goes on through what is not real: a turn that has ended needs none.
        """
        num_old_frames = inputs.source_tail.shape[-1] // SAMPLES_PER_MEL_FRAME
        pitch_hz = self.hift.pitch_hz(inputs.mel)
        source, phase = self.hift.source(pitch_hz[:, num_old_frames:], inputs.phase, inputs.noise)
        source = torch.cat((inputs.source_tail, source), dim=-1)
        with while_filtering:
            speech = self.hift.filter(inputs.mel[..., : pitch_hz.shape[1]], source, extent)
        return speech, source, phase

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
