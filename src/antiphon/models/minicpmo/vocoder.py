"""Mel chunks to one continuous waveform: what any vocoder does for a turn, and the one of minicpmo-utils 1.0.5.

The reference of 1.0.5 vocodes a chunk together with the last 8 mel frames, continues the old source
signal through them and fades the two renderings of those 160 ms into each other (REFERENCE 9.7). Pieces of several
sessions are one batch, whatever their lengths (`hift_extent.py`). Not PCM, not units: `stages/code2wav`. Not 1.0.7:
`causal_vocoder.py`. Tests: golden code2wav, tests/models/test_hift.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.sampling.draws import generator_seed, uniforms
from antiphon.kernels.transfer import upload
from antiphon.models.minicpmo.captured import (
    NumRuns,
    Recorder,
    fastest_convolutions,
    smallest,
    tensor_core_convolutions,
)
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.hift import Hift
from antiphon.models.minicpmo.hift_extent import WHOLE, Extent, Ragged
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

    @property
    def num_runs(self) -> NumRuns: ...

    def at_turn_start(self, noise: SourceNoise) -> TurnState: ...

    def capture(self, nums_rows: Sequence[int], nums_new_frames: Sequence[int], recorder: Recorder) -> Iterator[int]:
        """Record runs of so many sessions whose chunks have so many frames, the usual number first.

        Yields after each how many are left.
        """

    def kind_of(self, row: VocoderRow) -> tuple[int, ...]:
        """Rows of one kind can be in one run."""

    def speak(self, rows: Sequence[VocoderRow]) -> Sequence[tuple[Tensor, TurnState]]:
        """The next samples of a turn, for each of several sessions.

        rows: of one kind
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

    @property
    def goes_on(self) -> bool:
        """There is a chunk before."""
        return self.mel_tail.shape[-1] > 0


@dataclass(frozen=True, slots=True, eq=False)
class PieceInputs:
    """What a run of the network on pieces of B sessions reads.

    mel:         [B, M, T] float32, the old frames and the new ones
    noise:       [B, 480 T, harmonics] float32
    source_tail: [B, 3840] float32, and speech_tail: of the chunks before; anything at the start of turns
    goes_on:     [B, 1] bool, whether there is a chunk before
    num_frames:  [B] int64, how many of T are real; behind them the mel is zero and the noise anything
    """

    mel: Tensor
    noise: Tensor
    source_tail: Tensor
    speech_tail: Tensor
    goes_on: Tensor
    num_frames: Tensor


Rendered = tuple[Tensor, Tensor]
"""Samples [B, 480 T] float32 that go on from the chunk before, and their source of the same shape."""


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    inputs: PieceInputs
    replay: Callable[[], Rendered]


class Vocoder:
    """Runs the HiFT of 1.0.5 chunk by chunk. Holds no session's state."""

    def __init__(self, hift: Hift, compute: Compute = Compute.FLOAT32) -> None:
        """compute: decides in which numbers a recorded run convolves; pitch and source are float32 always."""
        self.hift = hift
        self.num_runs = NumRuns()
        self._compute = compute
        self._like = hift.f0_predictor.classifier.weight
        self._fade = _fade(self._like.device)
        self._recorded: dict[tuple[int, ...], _Recorded] = {}

    def at_turn_start(self, noise: SourceNoise) -> VocoderState:
        new = self._like.new_zeros
        return VocoderState(new(1, self.hift.config.num_mel_bins, 0), new(1, 0), new(1, 0), noise)

    def capture(self, nums_rows: Sequence[int], nums_new_frames: Sequence[int], recorder: Recorder) -> Iterator[int]:
        """Record runs of so many sessions with up to so many new frames each.

        Yields after each how many are left.
        """
        kinds = [
            (num_rows, OVERLAP_FRAMES + num_new_frames)
            for num_rows in sorted(nums_rows, reverse=True)
            for num_new_frames in sorted(nums_new_frames, reverse=True)
        ]
        for index, (num_rows, num_frames) in enumerate(kinds):
            self._recorded[num_rows, num_frames] = self._record(num_rows, num_frames, recorder)
            yield len(kinds) - index - 1

    def _record(self, num_rows: int, num_frames: int, recorder: Recorder) -> _Recorded:
        new = self._like.new_zeros
        inputs = PieceInputs(
            mel=new(num_rows, self.hift.config.num_mel_bins, num_frames),
            noise=new(num_rows, num_frames * SAMPLES_PER_MEL_FRAME, self.hift.config.num_harmonics),
            source_tail=new(num_rows, OVERLAP_SAMPLES),
            speech_tail=new(num_rows, OVERLAP_SAMPLES),
            goes_on=new(num_rows, 1, dtype=torch.bool),
            num_frames=new(num_rows, dtype=torch.int64) + num_frames,
        )
        extent = Ragged(inputs.num_frames)

        def run() -> Rendered:
            return self._run(inputs, extent, tensor_core_convolutions(self._compute))

        with fastest_convolutions():
            return _Recorded(inputs, recorder.record(run))

    def kind_of(self, row: VocoderRow) -> tuple[int, ...]:
        """Rows that the same recordings hold, however long they are; others by their length."""
        num_frames = row.num_frames
        return (min((size for _, size in self._recorded if size >= num_frames), default=num_frames),)

    def speak(self, rows: Sequence[VocoderRow]) -> list[tuple[Tensor, VocoderState]]:
        """The next samples of a turn, for each of several sessions.

        rows: of one kind
        Returns: per row [1, n] float32 within ±1.08, n as in `spliced`, and the state after them.
        """
        ((num_frames,),) = {self.kind_of(row) for row in rows}
        recorded = smallest(self._recorded, len(rows), num_frames)
        states = [_own(row.state) for row in rows]
        pieces = [
            torch.cat((state.mel_tail, row.mel.to(self._like.dtype)), dim=-1)
            for state, row in zip(states, rows, strict=True)
        ]
        nums_frames = [row.num_frames for row in rows]
        num_harmonics = self.hift.config.num_harmonics
        draws = [
            state.noise.draw(own * SAMPLES_PER_MEL_FRAME, num_harmonics)
            for state, own in zip(states, nums_frames, strict=True)
        ]
        numbers = torch.tensor([[state.goes_on for state in states], nums_frames])
        goes_on, lengths = upload(numbers, self._like.device)
        parts = (
            [lengthened(piece, num_frames) for piece in pieces],
            [lengthened(values.mT, num_frames * SAMPLES_PER_MEL_FRAME).mT for values, _ in draws],
            [_filled(state.source_tail) for state in states],
            [_filled(state.speech_tail) for state in states],
        )
        if recorded is None:
            extent = WHOLE if min(nums_frames) == num_frames else Ragged(lengths)
            mel, drawn, source_tail, speech_tail = map(torch.cat, parts)
            inputs = PieceInputs(mel, drawn, source_tail, speech_tail, goes_on.bool()[:, None], lengths)
            speech, source = self._run(inputs, extent, nullcontext())
        else:
            inputs = recorded.inputs
            places = inputs.mel, inputs.noise, inputs.source_tail, inputs.speech_tail
            for part, place in zip(parts, places, strict=True):
                torch.cat(part, out=place[: len(rows)])
            inputs.goes_on[: len(rows)].copy_(goes_on[:, None])
            inputs.num_frames[: len(rows)].copy_(lengths)
            speech, source = recorded.replay()
        self.num_runs = self.num_runs.one_more(is_replayed=recorded is not None)
        ended: list[tuple[Tensor, VocoderState]] = []
        for index, (row, state, piece, (_, noise)) in enumerate(zip(rows, states, pieces, draws, strict=True)):
            own, end = slice(index, index + 1), piece.shape[-1] * SAMPLES_PER_MEL_FRAME
            samples, speech_tail = cut(speech[own, :end], is_first=not state.goes_on, is_last=row.is_last)
            source_tail = source[own, max(0, end - OVERLAP_SAMPLES) : end].clone()
            ended.append((samples, VocoderState(piece[..., -OVERLAP_FRAMES:].clone(), source_tail, speech_tail, noise)))
        return ended

    def _run(self, inputs: PieceInputs, extent: Extent, while_filtering: AbstractContextManager[None]) -> Rendered:
        """while_filtering: is entered around all that no phase is summed up from."""
        new_source = self.hift.source(self.hift.pitch_hz(inputs.mel, extent), inputs.noise, extent)
        heard = inputs.source_tail[:, : new_source.shape[1]]
        head = torch.where(inputs.goes_on, heard, new_source[:, :OVERLAP_SAMPLES])
        source = torch.cat((head, new_source[:, OVERLAP_SAMPLES:]), dim=-1)
        with while_filtering:
            speech = self.hift.filter(inputs.mel, source, extent)
        return overlapped(speech, inputs.speech_tail, inputs.goes_on, self._fade), source


def lengthened(x: Tensor, size: int) -> Tensor:
    """Zeros behind x [..., n], up to a size."""
    return F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x


def _filled(tail: Tensor) -> Tensor:
    """A state's tail of 3840 samples; zeros for one of none."""
    return tail if tail.shape[-1] else tail.new_zeros(1, OVERLAP_SAMPLES)


def _own(state: TurnState) -> VocoderState:
    assert isinstance(state, VocoderState), f"{type(state).__name__} is of another vocoder"
    return state


def spliced(speech: Tensor, tail: Tensor, *, is_last: bool) -> tuple[Tensor, Tensor]:
    """Join a rendered chunk to the one before it.

    speech: [B, n] float32, from the first of the overlapped frames on
    tail:   [B, 3840] float32, the end of the chunk before; [B, 0] at a turn's start, which has 160 ms of silence
            instead, unless this is all of the turn
    Returns: what can be given out, and the end that cannot ([B, 3840]; the last chunk gives it out all the same).
    """
    goes_on = torch.full((len(speech), 1), tail.shape[-1] > 0, device=tail.device)
    before = tail if tail.shape[-1] else tail.new_zeros(len(tail), OVERLAP_SAMPLES)
    joined = overlapped(speech, before, goes_on, _fade(tail.device))
    return cut(joined, is_first=not tail.shape[-1], is_last=is_last)


def overlapped(speech: Tensor, tail: Tensor, goes_on: Tensor, fade: tuple[Tensor, Tensor]) -> Tensor:
    """Fade the end of the chunk before into the samples of the same time, where there is one.

    speech: [B, n] float32. tail, goes_on: as in `PieceInputs`. fade: of `_fade`. Returns: [B, n] float32.
    """
    head = speech[:, :OVERLAP_SAMPLES]
    fade_in, fade_out = (one[: head.shape[1]] for one in fade)
    faded = (head * fade_in + tail[:, : head.shape[1]] * fade_out).to(speech.dtype)
    return torch.cat((torch.where(goes_on, faded, head), speech[:, OVERLAP_SAMPLES:]), dim=-1)


def cut(speech: Tensor, *, is_first: bool, is_last: bool) -> tuple[Tensor, Tensor]:
    """What can be given out of joined samples [B, n], and the end that cannot, as of `spliced`; both of their own."""
    new_tail = speech[:, -OVERLAP_SAMPLES:].clone()
    if is_last:
        return speech.clone(), new_tail
    silence = speech.new_zeros(len(speech), OVERLAP_SAMPLES if is_first else 0)
    return torch.cat((silence, speech[:, :-OVERLAP_SAMPLES]), dim=-1), new_tail


def _fade(device: torch.device) -> tuple[Tensor, Tensor]:
    """The halves of a symmetric Hamming window, [3840] float64. They add up to 1.08, not 1, as in the reference."""
    window = torch.hamming_window(2 * OVERLAP_SAMPLES, periodic=False, dtype=torch.float64, device=device)
    fade_in, fade_out = window.chunk(2)
    return fade_in, fade_out
