"""Operands of `history_attention`: what sessions remember, each in memory of its own, and how much of it is filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.errors import ShapeError

NOBODY = -1
"""The length of a row that is no session's."""


@dataclass(frozen=True, slots=True)
class HistoryShape:
    """Of what one session remembers: keys and values, [num_layers, 2, num_heads, max_positions, head_dim]."""

    num_layers: int
    num_heads: int
    max_positions: int
    head_dim: int

    @property
    def of_tensor(self) -> tuple[int, int, int, int, int]:
        return self.num_layers, 2, self.num_heads, self.max_positions, self.head_dim


@dataclass(frozen=True, slots=True, eq=False)
class Histories:
    """What B sessions remember; no memory belongs to two of them.

    kv:      per session its keys and values, `HistoryShape.of_tensor`, contiguous; only the reference reads it
    origin:  any tensor on the device, of their dtype
    offsets: [B] int64, from the origin's first element to that of each session
    lengths: [B] int64, positions that are filled; NOBODY for a row that is no session's
    """

    shape: HistoryShape
    kv: tuple[Tensor, ...]
    origin: Tensor
    offsets: Tensor
    lengths: Tensor

    @staticmethod
    def of(shape: HistoryShape, kv: Sequence[Tensor], lengths: Sequence[int]) -> Histories:
        """Raises: ShapeError, as `offset`."""
        origin = kv[0]
        offsets = [offset(shape, origin, one) for one in kv]
        device = origin.device
        return Histories(
            shape,
            tuple(kv),
            origin,
            torch.tensor(offsets, dtype=torch.int64, device=device),
            torch.tensor(lengths, dtype=torch.int64, device=device),
        )


def offset(shape: HistoryShape, origin: Tensor, kv: Tensor) -> int:
    """Of a session's memory from the origin, in elements. Raises: ShapeError if it is memory of something else."""
    if kv.shape != shape.of_tensor or kv.dtype != origin.dtype or not kv.is_contiguous():
        raise ShapeError(
            f"a history is {origin.dtype} {shape.of_tensor}, contiguous; got {kv.dtype} {tuple(kv.shape)} with strides "
            f"{kv.stride()}"
        )
    return (kv.data_ptr() - origin.data_ptr()) // kv.itemsize
