"""Operands of `vocoder_attention` and `entry_store`: what is remembered, what is read of it, and where new entries go.

An entry is a key and a value per guidance row and head, of a token or of a mel frame, in one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from antiphon.errors import ShapeError


class Products(Enum):
    """How float32 numbers are multiplied; bfloat16 ones have only one way."""

    FLOAT32 = "ieee"
    """As they are."""
    TF32 = "tf32"
    """By tensor cores, which see 10 bits of each factor's fraction."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """keys, values: [A, N, G, H, D] floating, contiguous; N entries in each of A layers, of G guidance rows."""

    keys: Tensor
    values: Tensor

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What R sessions read besides their own chunks: in every layer the same entries of two owners.

    arena:   entries of all sessions
    voices:  per session the entries of its voice, of the arena's dtype; only the reference reads it
    listed:  [R, M] int64, per session its entries in order: e ≥ 0 is the arena's entry e, e < 0 the voice's -1 - e
    nums:    [R] int64, how many of M a session reads; what comes after them is padding
    table:   [R, 3] int64, `voice_row` of each session's voice
    lengths: [R] int64, how much of its chunk is real; what comes after it is padding that nobody reads
    """

    arena: Entries
    voices: tuple[Entries, ...]
    listed: Tensor
    nums: Tensor
    table: Tensor
    lengths: Tensor

    @staticmethod
    def of(
        arena: Entries, voices: Sequence[Entries], lists: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> Reading:
        """lists: per session its entries, as `listed`. Raises: ShapeError, as `voice_row`."""
        device = arena.keys.device
        longest = max(map(len, lists))
        padded = [[*own, *[0] * (longest - len(own))] for own in lists]

        def numbers(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return Reading(
            arena=arena,
            voices=tuple(voices),
            listed=numbers(padded).reshape(len(lists), longest),
            nums=numbers([len(own) for own in lists]),
            table=numbers([voice_row(arena, voice) for voice in voices]),
            lengths=numbers(lengths),
        )


def voice_row(arena: Entries, voice: Entries) -> tuple[int, int, int]:
    """Where a voice's keys and values begin, in elements from the arena's first, and how many a layer has.

    Raises: ShapeError if they are entries of something else.
    """
    ours, own = arena.keys, voice.keys
    if (own.shape[0], own.shape[2:], own.dtype) != (ours.shape[0], ours.shape[2:], ours.dtype):
        raise ShapeError(
            f"a voice's entries {own.dtype} {tuple(own.shape)} do not fit the sessions' {ours.dtype} "
            f"{tuple(ours.shape)}"
        )
    pairs = ((arena.keys, voice.keys), (arena.values, voice.values))
    keys, values = ((b.data_ptr() - a.data_ptr()) // a.itemsize for a, b in pairs)
    return keys, values, voice.keys.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Sink:
    """Where the entries of R chunks of T entries go, in every layer.

    places: [R T] int64, session after session, none twice; -1 for what is not remembered
    """

    entries: Entries
    places: Tensor

    @staticmethod
    def of(entries: Entries, places: Sequence[int]) -> Sink:
        return Sink(entries, torch.tensor(places, dtype=torch.int64, device=entries.keys.device))
