"""Operands of `vocoder_attention`: what is remembered, what a row of it is read, and where new entries go.

An entry is a key and a value per guidance row and head, of a token or of a mel frame, in one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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

    arena:  entries of all sessions
    voices: per session the entries of its voice, of the arena's dtype
    listed: [R, M] int32, per session its entries in order: e ≥ 0 is the arena's entry e, e < 0 the voice's -1 - e
    nums:   [R] int32, how many of M a session reads; what comes after them is padding
    counts: the same numbers on the host
    table:  [R, 3] int64, addresses of the voice's keys and values, and how many entries the voice has
    """

    arena: Entries
    voices: tuple[Entries, ...]
    listed: Tensor
    nums: Tensor
    counts: tuple[int, ...]
    table: Tensor

    @staticmethod
    def of(arena: Entries, voices: Sequence[Entries], lists: Sequence[Sequence[int]]) -> Reading:
        """lists: per session its entries, as `listed`."""
        device, counts = arena.keys.device, tuple(map(len, lists))
        longest = max(counts)
        padded = [[*own, *[0] * (longest - len(own))] for own in lists]
        rows = [[voice.keys.data_ptr(), voice.values.data_ptr(), voice.keys.shape[1]] for voice in voices]
        return Reading(
            arena=arena,
            voices=tuple(voices),
            listed=torch.tensor(padded, dtype=torch.int32, device=device).reshape(len(counts), longest),
            nums=torch.tensor(counts, dtype=torch.int32, device=device),
            counts=counts,
            table=torch.tensor(rows, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sink:
    """Where the entries of R chunks of T entries go, in every layer.

    places: [R T] int64, session after session; [0] if nothing of the chunks is remembered
    """

    entries: Entries
    places: Tensor

    @staticmethod
    def of(entries: Entries, places: Sequence[int]) -> Sink:
        return Sink(entries, torch.tensor(places, dtype=torch.int64, device=entries.keys.device))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """keys, values: [R G, H, T, D] floating; rounded to the dtype of the entries."""
        if not len(self.places):
            return
        for new, stored in ((keys, self.entries.keys[layer]), (values, self.entries.values[layer])):
            by_entry = new.reshape(-1, stored.shape[1], *new.shape[1:]).permute(0, 3, 1, 2, 4).flatten(0, 1)
            stored.index_copy_(0, self.places, by_entry.to(stored.dtype))
