"""What one solve of the flow is told, as tensors of a shape: every number that differs from call to call is in them.

So a solve can be captured once and run again with other numbers. All integers are one tensor, which goes up in one
copy. Rows of a solve are filled up to its longest chunk and to its longest list. Test: tests/models/test_flow.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from antiphon.kernels.frame_norm.contract import ConvTails, tail_source
from antiphon.kernels.vocoder_attention.contract import Entries, Reading, Sink, voice_row
from antiphon.models.minicpmo.flow_cache import Parts, SpeechState, Tails, Voice, Writing
from antiphon.models.minicpmo.flow_encoder import Positions
from antiphon.models.minicpmo.speech_arena import SpeechArena


@dataclass(frozen=True, slots=True, eq=False)
class FlowRow:
    """One session's chunk in a common solve: its codec tokens, and what they are read beside.

    tokens: unless the chunk is a turn's last, the final ones are only looked at and must come again
    """

    tokens: Sequence[int]
    voice: Voice
    speech: SpeechState
    is_last: bool

    def num_rendered(self, lookahead_tokens: int) -> int:
        return len(self.tokens) - (0 if self.is_last else lookahead_tokens)


@dataclass(frozen=True, slots=True)
class SolveShape:
    """num_tokens: rendered ones of the longest chunk. max_listed: what the longest list has room for."""

    num_rows: int
    num_tokens: int
    lookahead_tokens: int
    frames_per_token: int
    max_listed: Parts[int]

    @property
    def num_frames(self) -> int:
        return self.num_tokens * self.frames_per_token

    @property
    def chunk(self) -> Parts[int]:
        """Entries of the longest chunk."""
        return Parts(self.num_tokens, self.num_frames, self.num_frames)


@dataclass(frozen=True, slots=True, eq=False)
class SolveNumbers:
    """The integers of B rows, views of `flat`, all int64; T of a sort are its entries of the longest chunk.

    tokens:       [B, L + lookahead], and nums_tokens [B] how many of them are real
    lengths:      [B] per sort, entries of each chunk
    listed:       [B, M] per sort, and nums [B], tables [B, 3], places [B T]: as in `Reading` and `Sink`
    noise_starts: [B], where in the noise each chunk begins
    tail_sources: [B], and tail_places [B]: as in `ConvTails`
    """

    flat: Tensor
    tokens: Tensor
    nums_tokens: Tensor
    lengths: Parts[Tensor]
    listed: Parts[Tensor]
    nums: Parts[Tensor]
    tables: Parts[Tensor]
    places: Parts[Tensor]
    noise_starts: Tensor
    tail_sources: Tensor
    tail_places: Tensor

    @staticmethod
    def on_host(shape: SolveShape) -> SolveNumbers:
        """Of a solve of nothing: its rows read, store and mean nothing."""
        B = shape.num_rows
        per_row = shape.num_tokens + shape.lookahead_tokens + 1 + sum(shape.max_listed.all) + sum(shape.chunk.all)
        numbers = SolveNumbers.cut(torch.zeros(B * (per_row + 3 * 5 + 3), dtype=torch.int64), shape)
        for places in numbers.places.all:
            places.fill_(-1)
        return numbers

    @staticmethod
    def cut(flat: Tensor, shape: SolveShape) -> SolveNumbers:
        cutter, B = _Cutter(flat), shape.num_rows
        numbers = SolveNumbers(
            flat,
            tokens=cutter.next(B, shape.num_tokens + shape.lookahead_tokens),
            nums_tokens=cutter.next(B),
            lengths=shape.chunk.map(lambda _: cutter.next(B)),
            listed=shape.max_listed.map(lambda number: cutter.next(B, number)),
            nums=shape.chunk.map(lambda _: cutter.next(B)),
            tables=shape.chunk.map(lambda _: cutter.next(B, 3)),
            places=shape.chunk.map(lambda number: cutter.next(B * number)),
            noise_starts=cutter.next(B),
            tail_sources=cutter.next(B),
            tail_places=cutter.next(B),
        )
        assert cutter.start == len(flat), f"{cutter.start} numbers are used of {len(flat)}"
        return numbers


@dataclass(slots=True, eq=False)
class _Cutter:
    """Takes views off a tensor, one after the other."""

    flat: Tensor
    start: int = field(default=0)

    def next(self, *shape: int) -> Tensor:
        number = 1
        for side in shape:
            number *= side
        self.start += number
        return self.flat[self.start - number : self.start].view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """Where what a solve leaves behind goes: the arena, or a voice that is being built."""

    entries: Parts[Entries]
    tails: Tails


def filled(
    shape: SolveShape,
    rows: Sequence[FlowRow],
    writings: Sequence[Writing | None],
    arena: SpeechArena,
    destination: Destination,
) -> SolveNumbers:
    """The numbers of a solve, on the host. writings: None where nothing is remembered, as of a turn's last chunk."""
    numbers = SolveNumbers.on_host(shape)
    # Arrays, because they take a list several times as fast as a tensor does, and here are the most numbers of a step.
    tokens, nums_tokens = numbers.tokens.numpy(), numbers.nums_tokens.numpy()
    starts, tail_sources, tail_places = (
        one.numpy() for one in (numbers.noise_starts, numbers.tail_sources, numbers.tail_places)
    )
    lengths, listed, nums, tables, places = (
        [part.numpy() for part in parts.all]
        for parts in (numbers.lengths, numbers.listed, numbers.nums, numbers.tables, numbers.places)
    )
    for index, (row, writing) in enumerate(zip(rows, writings, strict=True)):
        rendered = row.num_rendered(shape.lookahead_tokens)
        own_shape = SolveShape(1, rendered, shape.lookahead_tokens, shape.frames_per_token, shape.max_listed)
        tokens[index, : len(row.tokens)] = row.tokens
        nums_tokens[index] = len(row.tokens)
        starts[index] = row.speech.num_past_frames
        tail_sources[index] = tail_source(destination.tails.convs, row.speech.tails.convs)
        tail_places[index] = -1 if writing is None else writing.tail_place
        voice = arena.entries.zip(row.voice.entries, voice_row)
        for sort, reads in enumerate(row.speech.reads.all):
            lengths[sort][index] = own_shape.chunk.all[sort]
            tables[sort][index] = voice.all[sort]
            listed[sort][index, : len(reads)] = np.fromiter(reads, np.int64, len(reads))
            nums[sort][index] = len(reads)
            if writing is not None:
                start, taken = index * shape.chunk.all[sort], writing.places.all[sort]
                places[sort][start : start + len(taken)] = taken
    return numbers


@dataclass(frozen=True, slots=True, eq=False)
class SolveInputs:
    """All that a solve of B rows is told.

    numbers:    on the flow's device
    speakers:   [B, M] float32
    lookahead:  [B, C, 2] float32, and upsampling [B, C, 4]: as in `Tails`, of the chunks before
    condition:  [B, T, M] float32, the known mel of these frames; [1, 1, M] zeros where nothing is known
    positions:  of chunks and lists of this shape
    voices:     per row, and befores, the estimator's tails of the chunks before: where there are no addresses
    """

    shape: SolveShape
    numbers: SolveNumbers
    speakers: Tensor
    lookahead: Tensor
    upsampling: Tensor
    condition: Tensor
    positions: Positions
    destination: Destination
    voices: tuple[Voice, ...]
    befores: tuple[Tensor, ...]

    def readings(self, arena: SpeechArena) -> Parts[Reading]:
        numbers, voices = self.numbers, self.voices

        def reading(entries: Entries, own: list[Entries], index: int) -> Reading:
            return Reading(
                arena=entries,
                voices=tuple(own),
                listed=numbers.listed.all[index],
                nums=numbers.nums.all[index],
                table=numbers.tables.all[index],
                lengths=numbers.lengths.all[index],
            )

        return Parts(
            reading(arena.entries.tokens, [voice.entries.tokens for voice in voices], 0),
            reading(arena.entries.frames, [voice.entries.frames for voice in voices], 1),
            reading(arena.entries.steps, [voice.entries.steps for voice in voices], 2),
        )

    @property
    def sinks(self) -> Parts[Sink]:
        return self.destination.entries.zip(self.numbers.places, Sink)

    @property
    def conv_tails(self) -> ConvTails:
        numbers = self.numbers
        return ConvTails(
            self.destination.tails.convs,
            self.befores,
            numbers.tail_sources,
            numbers.tail_places,
            numbers.lengths.frames,
        )
