"""The tensors behind the blocks, and how a step's rows lie in them. Types only; the operators are in their folders.

Who may write which slot is decided in `core`; nothing here allocates blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from antiphon.kernels.transfer import upload


@dataclass(frozen=True, slots=True)
class KVCache:
    """keys, values: [num_layers, num_blocks, block_size, num_kv_heads, head_dim], contiguous, one dtype and device."""

    keys: Tensor
    values: Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def num_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """A run of tokens of one row. blocks: in order; first_slot: offset of the first token in the first block."""

    blocks: tuple[int, ...]
    first_slot: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RowLayout:
    """One session in a step: its new tokens, and all keys of its context, the new ones included.

    token_start, token_end: its part of the step's tokens.
    num_keys: keys up to the last new token. What stands behind it is later, or not written yet, and is never read.
    anchor: segments seen through the query rotated to its position.
    ring: segment seen through the query rotated to its position + shift.
    """

    token_start: int
    token_end: int
    num_keys: int
    anchor: tuple[SegmentLayout, ...]
    ring: SegmentLayout


@dataclass(frozen=True)
class StepLayout:
    """A step of N tokens over R rows, on the device.

    positions: [N] int64, of each token in its context.
    ring_positions: [N] int64, position + the row's shift: what a query is rotated to for ring keys.
    key_positions: [N] int64, what the token's own key is rotated to.
    slots: [N] int64, where the token's key and value go; no slot twice.
    rows: R layouts; row r's tokens are token_start:token_end, in order of position.
    """

    positions: Tensor
    ring_positions: Tensor
    key_positions: Tensor
    slots: Tensor
    rows: tuple[RowLayout, ...]
    block_size: int

    @cached_property
    def key_slots(self) -> tuple[tuple[Tensor, int], ...]:
        """Per row: slots [num_keys] int64 in order of position, and how many of them are anchor keys."""
        if not self.rows:
            return ()
        slots = upload(torch.cat([self._row_slots(row) for row in self.rows]), self.slots.device)
        num_anchor_keys = [min(sum(part.num_tokens for part in row.anchor), row.num_keys) for row in self.rows]
        return tuple(zip(torch.split(slots, [row.num_keys for row in self.rows]), num_anchor_keys, strict=True))

    def _row_slots(self, row: RowLayout) -> Tensor:
        parts = [self._segment_slots(segment) for segment in (*row.anchor, row.ring)]
        return torch.cat(parts)[: row.num_keys]

    def _segment_slots(self, segment: SegmentLayout) -> Tensor:
        blocks = torch.tensor(segment.blocks, dtype=torch.int64)
        slots = (blocks[:, None] * self.block_size + torch.arange(self.block_size)).flatten()
        return slots[segment.first_slot : segment.first_slot + segment.num_tokens]
