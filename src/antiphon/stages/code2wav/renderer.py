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

from antiphon.core.codec_buffer import CodecBuffer, Window
from antiphon.errors import AntiphonError, InputError, InternalError
from antiphon.models.minicpmo.flow import SILENCE_TOKEN, FlowRow, MelSynthesizer
from antiphon.models.minicpmo.flow_cache import SpeechState, Voice
from antiphon.models.minicpmo.vocoder import SourceNoise, SpeechVocoder, TurnState, VocoderRow
from antiphon.stages.code2wav.state import Code2WavState
from antiphon.units import OUTPUT_SAMPLES_PER_UNIT

_PCM16_SCALE = 32767
_PCM16_RANGE = 32768

_MAX_ROWS_PER_SOLVE = 16
"""Bounds a solve's memory: at the released dimensions the new entries of one session's chunk are 66 MB."""


def rows_per_solve(device: torch.device) -> int:
    """How many sessions may share a solve.

    One on the CPU: how a product, a convolution or an activation rounds there depends on how many rows lie in the
    tensor and where, so rows would hear each other; and sharing would gain a tenth at most.
    """
    return 1 if device.type == "cpu" else _MAX_ROWS_PER_SOLVE


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
    """Writes the sessions' states; shares flow and vocoder among them."""

    def __init__(self, synthesizer: MelSynthesizer, vocoder: SpeechVocoder, max_rows: int) -> None:
        """max_rows: sessions in one solve, as of `rows_per_solve`; more take turns."""
        self._synthesizer = synthesizer
        self._vocoder = vocoder
        self.max_rows = max_rows

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
        """Forget the turn: it ended or was interrupted. The voice and the noise go on."""
        state.buffer.reset()
        state.speech = SpeechState.at_turn_start(state.voice)
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
        while unfinished := [work for work in works if work.error is None and work.windows]:
            self._render_next(unfinished)
        for work in works:
            _fenced(_join, [work])
        return [self._ended(work) for work in works]

    def _cut(self, works: Sequence[_Work]) -> None:
        """Add the tokens to the buffer, and see which windows are ready. Raises: InputError."""
        (work,) = works
        tokens, vocab_size = work.row.codec_tokens, self._synthesizer.flow.config.vocab_size
        wrong = [token for token in tokens if not 0 <= token < vocab_size]
        if wrong:
            raise InputError(f"codec tokens go from 0 to {vocab_size - 1}, got {wrong[0]}; the chunk was not spoken")
        work.windows = work.buffer.push(tokens, is_flush=work.row.is_flush, is_last=work.row.is_turn_end)

    def _render_next(self, works: Sequence[_Work]) -> None:
        """The next window of each."""
        for group in self._alike(works, lambda work: (len(work.windows[0].tokens), work.windows[0].is_last)):
            _fenced(self._synthesize, group)
        sung = [work for work in works if work.error is None]
        for group in self._alike(sung, lambda work: (work.vocoder_row.num_frames,)):
            _fenced(self._vocode, group)

    def _alike(self, works: Sequence[_Work], shape: Callable[[_Work], tuple[int, ...]]) -> Iterator[Sequence[_Work]]:
        """Groups of equal shape, none larger than a solve."""
        groups: dict[tuple[int, ...], list[_Work]] = {}
        for work in works:
            groups.setdefault(shape(work), []).append(work)
        for group in groups.values():
            for start in range(0, len(group), self.max_rows):
                yield group[start : start + self.max_rows]

    def _synthesize(self, works: Sequence[_Work]) -> None:
        rows = [FlowRow(work.windows[0].tokens, work.row.state.voice, work.speech) for work in works]
        results = self._synthesizer.speak(rows, is_last=works[0].windows[0].is_last)
        for work, (mel, speech) in zip(works, results, strict=True):
            work.mel, work.speech = mel.mT, speech

    def _vocode(self, works: Sequence[_Work]) -> None:
        for work, (samples, vocoder) in zip(
            works, self._vocoder.speak([work.vocoder_row for work in works]), strict=True
        ):
            work.pieces.append(samples[0])
            work.vocoder = vocoder
            del work.windows[0]

    def _ended(self, work: _Work) -> Tensor | AntiphonError:
        """Write the session's state, unless the row failed."""
        if work.error is not None:
            return work.error
        state = work.row.state
        state.buffer, state.speech, state.vocoder = work.buffer, work.speech, work.vocoder
        if work.row.is_turn_end:
            self.reset_turn(state)
        return work.pcm


@dataclass(slots=True, eq=False)
class _Work:
    """A row on its way. Its session's state stays as it was until all is rendered.

    windows: those that are not rendered yet
    mel:     [1, M, T] floating, of the first of them, once the flow is done
    pcm:     the result, once all windows are rendered
    error:   what ended the row; None as long as nothing did
    """

    row: ChunkRow
    buffer: CodecBuffer
    speech: SpeechState
    vocoder: TurnState
    windows: list[Window] = field(default_factory=list)
    mel: Tensor = field(default_factory=lambda: torch.empty(0))
    pieces: list[Tensor] = field(default_factory=list)
    pcm: Tensor = field(default_factory=lambda: torch.empty(0))
    error: AntiphonError | None = None

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
            works[0].error = _as_ours(error)
        else:
            for work in works:
                _fenced(do, [work])


def _as_ours(error: Exception) -> AntiphonError:
    if isinstance(error, AntiphonError):
        return error
    ours = InternalError(f"the chunk was not spoken: {type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours


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
