"""Who else speaks while a golden stream does. Its numbers must be the same in any company; `tests/test_golden.py`.

The others say other things, one with the stream's own voice and one with another; all begin their turns together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor

from antiphon.models.minicpmo.flow import MelSynthesizer
from antiphon.models.minicpmo.flow_cache import SpeechState, Voice
from antiphon.models.minicpmo.flow_inputs import Destination, FlowRow
from antiphon.models.minicpmo.flow_solve import Solve
from antiphon.models.minicpmo.speech_arena import ArenaSize
from antiphon.models.minicpmo.vocoder import SourceNoise, SpeechVocoder, TurnState, VocoderRow

ROOM = ArenaSize(max_speaking=3, max_frames=2000, max_windows=120)
"""Of the arena: what a golden stream remembers is not given back."""

RowT = TypeVar("RowT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class _Seating:
    """sizes: sessions in each of the solves that a chunk of everybody takes.

    place: the golden stream's in the first of them.
    """

    sizes: tuple[int, ...]
    place: int


class Company(Enum):
    ALONE = _Seating((1,), 0)
    SHARED = _Seating((1, 1), 0)
    """The voice is used by another session, which is solved by itself."""
    BATCHED = _Seating((3,), 1)
    """Of another voice, of the golden stream, of the same voice: in one solve."""
    SPLIT = _Seating((2, 1), 1)
    """The same in two."""

    @property
    def place(self) -> int:
        return self.value.place

    def solved(self, rows: Sequence[RowT], solve: Callable[[Sequence[RowT]], Sequence[ResultT]]) -> Iterator[ResultT]:
        start = 0
        for size in self.value.sizes:
            yield from solve(rows[start : start + size])
            start += size

    def voices(self, own: Voice, stranger: Voice) -> list[Voice]:
        """Of the others, in order."""
        return [stranger] * self.place + [own] * (sum(self.value.sizes) - self.place - 1)


@dataclass(slots=True, eq=False)
class _Other:
    voice: Voice
    speech: SpeechState
    vocoder: TurnState
    mel: Tensor


class Turn:
    """A golden stream's turn and those of the others. What is returned is the stream's."""

    def __init__(
        self,
        company: Company,
        synthesizer: MelSynthesizer,
        vocoder: SpeechVocoder,
        voices: tuple[Voice, Voice],
        noise: SourceNoise,
    ) -> None:
        """voices: the stream's, and one of a stranger."""
        self._company = company
        self._synthesizer = synthesizer
        self._vocoder = vocoder
        self._others = [
            _Other(voice, SpeechState.at_turn_start(voice), vocoder.at_turn_start(noise), torch.empty(0))
            for voice in company.voices(*voices)
        ]

    def sing(self, row: FlowRow) -> tuple[Tensor, SpeechState]:
        rows = [FlowRow(row.tokens[::-1], other.voice, other.speech, row.is_last) for other in self._others]
        rows.insert(self._company.place, row)
        results = [*self._company.solved(rows, self._synthesizer.speak)]
        own = results.pop(self._company.place)
        for other, (mel, speech) in zip(self._others, results, strict=True):
            kept = SpeechState.at_turn_start(other.voice) if row.is_last else speech
            self._synthesizer.arena.keep_only(kept, [other.speech])
            other.mel, other.speech = mel.mT, kept
        return own

    def vocode(self, row: VocoderRow) -> tuple[Tensor, TurnState]:
        """The others' mel is what they sang last, or nothing, as the stream's."""
        num_frames = row.mel.shape[-1]
        rows = [VocoderRow(other.mel[..., :num_frames], other.vocoder, row.is_last) for other in self._others]
        rows.insert(self._company.place, row)
        results = [*self._company.solved(rows, self._vocoder.speak)]
        own = results.pop(self._company.place)
        for other, (_, vocoder) in zip(self._others, results, strict=True):
            other.vocoder = vocoder
        return own


def remembered(synthesizer: MelSynthesizer, row: FlowRow) -> tuple[Tensor, SpeechState]:
    """A turn's last chunk once more, alone, and what the reference remembers of it though nobody will read it."""
    arena = synthesizer.arena
    writing = arena.take(len(row.tokens))
    no_condition = torch.zeros(1, 1, synthesizer.flow.config.num_mel_bins)
    inputs = synthesizer.inputs([row], [writing], Destination(arena.entries, arena.tails), no_condition)
    solve = Solve(synthesizer.weights, arena, inputs)
    mel = solve.run(nullcontext())
    synthesizer.keep_ends(solve.ends, [writing], arena.tails)
    return mel, row.speech.followed_by(writing, row.voice, arena.retention, synthesizer.rules.kept_tokens)
