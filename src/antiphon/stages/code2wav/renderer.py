"""Runs flow and vocoder for sessions: codec tokens in, PCM out, chunks of several sessions in common solves.

A chunk that fails leaves its session as it was and its neighbours unharmed. Not the loop with its messages, not who is
served first. Tests: tests/stages/test_code2wav.py, golden code2wav (`buffering`, `post`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.core.batch_grid import BatchGrid
from antiphon.core.codec_buffer import CHUNK_TOKENS, CodecBuffer, Window
from antiphon.errors import AntiphonError, InputError, ResourceExhausted, as_ours
from antiphon.models.minicpmo.captured import NumRuns, Recorder
from antiphon.models.minicpmo.flow import LONGEST_CHUNK_TOKENS, SILENCE_TOKEN, MelSynthesizer
from antiphon.models.minicpmo.flow_cache import SpeechState, Voice
from antiphon.models.minicpmo.flow_inputs import FlowRow
from antiphon.models.minicpmo.vocoder import SourceNoise, SpeechVocoder, TurnState, VocoderRow
from antiphon.stages.code2wav.state import Code2WavState
from antiphon.units import OUTPUT_SAMPLES_PER_UNIT

_PCM16_SCALE = 32767
_PCM16_RANGE = 32768


def grid_on(device: torch.device, grid: BatchGrid) -> BatchGrid:
    """How many sessions may share a solve.

    One on the CPU: how a product, a convolution or an activation rounds there depends on how many rows lie in the
    tensor and where, so rows would hear each other; and sharing would gain a tenth at most.
    """
    return BatchGrid((1,)) if device.type == "cpu" else grid


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRow:
    """Codec tokens that a session wants to hear.

    is_turn_end: all that is left is rendered, and the state is ready for the next turn
    is_flush:    render what there is (a turn's first unit) instead of waiting for a second of tokens
    """

    state: Code2WavState
    codec_tokens: Sequence[int]
    is_turn_end: bool
    is_flush: bool


class Renderer:
    """Writes the sessions' states; shares flow and vocoder among them.

    A session is seated in the arena from a turn's first window to the turn's end, and holds nothing otherwise.
    """

    def __init__(self, synthesizer: MelSynthesizer, vocoder: SpeechVocoder, grid: BatchGrid) -> None:
        """grid: sessions in one solve, as of `grid_on`; more take turns."""
        self._synthesizer = synthesizer
        self._arena = synthesizer.arena
        self._vocoder = vocoder
        self._grid = grid

    @property
    def max_rows(self) -> int:
        """Sessions in one solve."""
        return self._grid.largest

    @property
    def num_seated(self) -> int:
        """Sessions in a turn."""
        return self._arena.num_seated

    @property
    def num_runs(self) -> NumRuns:
        """Solves of the flow and runs of the vocoder."""
        return self._synthesizer.num_runs + self._vocoder.num_runs

    def capture(self, nums_tokens: Sequence[int], voice_frames: int, recorder: Recorder) -> Iterator[int]:
        """Record solves of all sizes of the grid for chunks up to so many tokens, and the vocoder's runs.

        voice_frames: of the longest voice that is served by what is recorded. Yields, after each, how many solves are
        left, then how many runs.
        """
        sizes = self._grid.sizes
        nums_frames = [self._arena.shape.frames_of(tokens) for tokens in (CHUNK_TOKENS, LONGEST_CHUNK_TOKENS)]
        yield from self._synthesizer.capture(sizes, nums_tokens, voice_frames, recorder)
        yield from self._vocoder.capture(sizes, nums_frames, recorder)

    def num_fitting(self, states: Sequence[Code2WavState]) -> int:
        """How many of these sessions, the first ones, could begin a turn together now."""
        return self._arena.num_fitting([state.voice.num_frames for state in states])

    def open(self, voice: Voice, noise: SourceNoise) -> Code2WavState:
        """A session's state, before its first turn. The voice is shared, the noise is the session's own."""
        lookahead = self._synthesizer.flow.config.encoder.lookahead_tokens
        return Code2WavState(
            voice=voice,
            buffer=CodecBuffer(SILENCE_TOKEN, lookahead),
            speech=SpeechState.at_turn_start(voice),
            vocoder=self._vocoder.at_turn_start(noise),
        )

    def reset_turn(self, state: Code2WavState) -> None:
        """Forget the turn: it ended or was interrupted. Its room is free; the voice and the noise go on."""
        state.buffer.reset()
        self._arena.keep_only(SpeechState.at_turn_start(state.voice), [state.speech])
        state.speech = SpeechState.at_turn_start(state.voice)
        if state.num_reserved_frames:
            self._arena.unseat(state.num_reserved_frames)
            state.num_reserved_frames = 0
        state.vocoder = self._vocoder.at_turn_start(state.vocoder.noise)

    def speak(self, rows: Sequence[ChunkRow]) -> list[Tensor | AntiphonError]:
        """Take one chunk of each session; returns per row what can be heard of its turn by now, or why it failed.

        The state of a row that failed is as before, whatever failed; the other rows are served. Raises nothing.
        Returns: [n] float32, 24 kHz, in steps of 16-bit PCM. Before the turn's end n is 0 (all tokens are held) or at
        least 24000, filled with silence on the left; at its end any length.
        """
        assert len({row.state for row in rows}) == len(rows), "two rows of one session; its chunks follow one another"
        works = [_Work(row, copy.deepcopy(row.state.buffer), row.state.speech, row.state.vocoder) for row in rows]
        for work in works:
            _fenced(self._cut, [work])
        for together in self._rounds(works):
            while unfinished := [work for work in together if work.error is None and work.windows]:
                self._render_next(unfinished)
            for work in together:
                _fenced(_join, [work])
                self._settle(work)
        return [work.pcm if work.error is None else work.error for work in works]

    def _cut(self, works: Sequence[_Work]) -> None:
        """Add the tokens to the buffer, see which windows are ready, and take a seat for the turn's first.

        Raises: InputError; ResourceExhausted if nobody asked `num_fitting`.
        """
        (work,) = works
        state, tokens, vocab_size = work.row.state, work.row.codec_tokens, self._synthesizer.flow.config.vocab_size
        wrong = [token for token in tokens if not 0 <= token < vocab_size]
        if wrong:
            raise InputError(f"codec tokens go from 0 to {vocab_size - 1}, got {wrong[0]}; the chunk was not spoken")
        work.windows = work.buffer.push(tokens, is_flush=work.row.is_flush, is_last=work.row.is_turn_end)
        if work.num_kept_windows > self._arena.size.max_windows:
            raise InputError(
                f"a chunk of {len(tokens)} codec tokens makes {work.num_kept_windows} windows; there is room for "
                f"{self._arena.size.max_windows}; send shorter chunks"
            )
        if work.windows and not state.num_reserved_frames:
            if not self._arena.num_fitting([state.voice.num_frames]):
                raise ResourceExhausted("as many sessions speak as there is room for; wait until a turn ends")
            state.num_reserved_frames = self._arena.seat(state.voice.num_frames)

    def _rounds(self, works: Sequence[_Work]) -> Iterator[Sequence[_Work]]:
        """Those together whose windows the arena can take before it frees what they replace."""
        together: list[_Work] = []
        for work in [work for work in works if work.error is None]:
            num_windows = sum(one.num_kept_windows for one in together)
            if num_windows + work.num_kept_windows > self._arena.size.max_windows:
                yield together
                together = []
            together.append(work)
        yield together

    def _render_next(self, works: Sequence[_Work]) -> None:
        """The next window of each."""
        for group in self._alike(works, lambda work: self._synthesizer.kind_of(work.flow_row)):
            _fenced(self._synthesize, group)
        sung = [work for work in works if work.error is None]
        for group in self._alike(sung, lambda work: self._vocoder.kind_of(work.vocoder_row)):
            _fenced(self._vocode, group)

    def _alike(self, works: Sequence[_Work], shape: Callable[[_Work], tuple[int, ...]]) -> Iterator[Sequence[_Work]]:
        """Groups of equal shape, none larger than the grid's largest."""
        groups: dict[tuple[int, ...], list[_Work]] = {}
        for work in works:
            groups.setdefault(shape(work), []).append(work)
        for group in groups.values():
            start = 0
            for size in self._grid.split(len(group)):
                yield group[start : start + size]
                start += size

    def _synthesize(self, works: Sequence[_Work]) -> None:
        results = self._synthesizer.speak([work.flow_row for work in works])
        for work, (mel, speech) in zip(works, results, strict=True):
            work.mel, work.speech = mel.mT, speech
            work.passed.append(speech)

    def _vocode(self, works: Sequence[_Work]) -> None:
        for work, (samples, vocoder) in zip(
            works, self._vocoder.speak([work.vocoder_row for work in works]), strict=True
        ):
            work.pieces.append(samples[0])
            work.vocoder = vocoder
            del work.windows[0]

    def _settle(self, work: _Work) -> None:
        """Write the session's state, unless the row failed, and free what it does not remember any more."""
        state = work.row.state
        if work.error is not None:
            self._arena.keep_only(state.speech, work.passed)
            return
        self._arena.keep_only(work.speech, [state.speech, *work.passed])
        state.buffer, state.speech, state.vocoder = work.buffer, work.speech, work.vocoder
        if work.row.is_turn_end:
            self.reset_turn(state)


@dataclass(slots=True, eq=False)
class _Work:
    """A row on its way. Its session's state stays as it was until all is rendered.

    windows: those that are not rendered yet
    passed:  states of its speech after the rendered ones
    mel:     [1, M, T] floating, of the first of them, once the flow is done
    pcm:     the result, once all windows are rendered
    error:   what ended the row; None as long as nothing did
    """

    row: ChunkRow
    buffer: CodecBuffer
    speech: SpeechState
    vocoder: TurnState
    windows: list[Window] = field(default_factory=list)
    passed: list[SpeechState] = field(default_factory=list)
    mel: Tensor = field(default_factory=lambda: torch.empty(0))
    pieces: list[Tensor] = field(default_factory=list)
    pcm: Tensor = field(default_factory=lambda: torch.empty(0))
    error: AntiphonError | None = None

    @property
    def num_kept_windows(self) -> int:
        """Of those, how many the flow remembers: all but a turn's last."""
        return sum(not window.is_last for window in self.windows)

    @property
    def flow_row(self) -> FlowRow:
        window = self.windows[0]
        return FlowRow(window.tokens, self.row.state.voice, self.speech, is_last=window.is_last)

    @property
    def vocoder_row(self) -> VocoderRow:
        return VocoderRow(self.mel, self.vocoder, is_last=self.windows[0].is_last)


def _fenced(do: Callable[[Sequence[_Work]], None], works: Sequence[_Work]) -> None:
    """Do it for all together; if that fails, for each alone, so that only those at fault end.

    do: changes nothing before it can no longer fail
    """
    try:
        do(works)
    except Exception as error:  # noqa: BLE001 - whatever one session's chunk breaks must not reach the others
        if len(works) == 1:
            works[0].error = as_ours(error, "the chunk was not spoken")
        else:
            for work in works:
                _fenced(do, [work])


def _join(works: Sequence[_Work]) -> None:
    (work,) = works
    empty = work.row.state.voice.speaker.new_zeros(0)
    work.pcm = unit_pcm(work.pieces, is_turn_end=work.row.is_turn_end) if work.pieces else empty


def unit_pcm(pieces: Sequence[Tensor], *, is_turn_end: bool) -> Tensor:
    """Join a unit's samples, round them as 16-bit PCM and fill the unit.

    The reference's way: clip, scale by 32767, cut off the fraction, read back by 1/32768; a unit that is short and
    not its turn's last starts with silence (REFERENCE 9.7).
    pieces: [n] float32 each -> [n] float32.
    """
    samples = torch.cat([*pieces])
    pcm = (samples.clamp(-1, 1) * _PCM16_SCALE).trunc() / _PCM16_RANGE
    missing = 0 if is_turn_end else max(0, OUTPUT_SAMPLES_PER_UNIT - len(pcm))
    return F.pad(pcm, (missing, 0))
