"""The tensors behind the blocks, and how a step's rows lie in them. Types only; the operators are in their folders.

Who may write which slot is decided in `core`; nothing here allocates blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from antiphon.kernels.key_slots.op import key_slots
from antiphon.kernels.paged_attention.tiles import Tiles


@dataclass(frozen=True, slots=True)
class Scales:
    """What stored numbers are to be multiplied by; one for each key and each value of a head, never 0.

    keys, values: [..., num_blocks, num_kv_heads, block_size] float32, contiguous, on the cache's device. The scales of
    a head's keys in a block lie side by side, since a program of the attention reads those of one head only.
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer: `KVCache` without its first dimension."""

    keys: Tensor
    values: Tensor
    scales: Scales | None = None

    @property
    def has_its_scales(self) -> bool:
        """Scales are there if, and only if, the numbers need them, and they are as many as they should be."""
        is_scaled = self.keys.dtype is torch.float8_e4m3fn
        if self.scales is None:
            return not is_scaled
        num_blocks, block_size, num_kv_heads, _ = self.keys.shape
        shape = (num_blocks, num_kv_heads, block_size)
        return is_scaled and all(x.shape == shape and x.is_contiguous() for x in (self.scales.keys, self.scales.values))


@dataclass(frozen=True, slots=True)
class KVCache:
    """keys, values: [num_layers, num_blocks, block_size, num_kv_heads, head_dim], contiguous, one dtype and device.

    scales: if these are float8_e4m3fn, with num_layers in front; else the numbers are what they are.
    """

    keys: Tensor
    values: Tensor
    scales: Scales | None = None

    @staticmethod
    def empty(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> KVCache:
        """Zeros. shape: of the keys. dtype: of what is stored."""
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        if dtype is not torch.float8_e4m3fn:
            return KVCache(keys, values)
        num_layers, num_blocks, block_size, num_kv_heads, _ = shape
        ones = (torch.ones((num_layers, num_blocks, num_kv_heads, block_size), device=device) for _ in range(2))
        return KVCache(keys, values, Scales(*ones))

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def num_bytes(self) -> int:
        scales = (self.scales.keys, self.scales.values) if self.scales is not None else ()
        return sum(tensor.nbytes for tensor in (self.keys, self.values, *scales))

    def layers(self) -> Iterator[LayerCache]:
        if self.scales is None:
            yield from map(LayerCache, self.keys, self.values)
        else:
            scales = map(Scales, self.scales.keys, self.scales.values)
            yield from map(LayerCache, self.keys, self.values, scales)


class RowSpan(NamedTuple):
    """One session in a step.

    token_start, token_end: its part of the step's tokens.
    num_keys: keys up to the last new token. What stands behind it is later, or not written yet, and is never read.
    num_anchor_keys: of them, those seen through the query rotated to its position; the others, through the one rotated
    to its position + shift.
    """

    token_start: int
    token_end: int
    num_keys: int
    num_anchor_keys: int


@dataclass(frozen=True)
class StepLayout:
    """A step of N tokens over R rows, on the device. Tokens behind the last row's are padding, as are further rows.

    positions: [N] int64, of each token in its context.
    ring_positions: [N] int64, position + the row's shift: what a query is rotated to for ring keys.
    key_positions: [N] int64, what the token's own key is rotated to.
    slots: [N] int64, where the token's key and value go; no slot twice; -1 for padding.
    rows: on the host; row r's tokens are token_start:token_end, in order of position.
    spans: [R, 4] int32, the same numbers; zeros for padding.
    segments: [R, S, 3] int32; per row its runs of tokens in order of position: where in `blocks` a run's blocks begin,
    the offset of its first token in the first of them, how many tokens it has.
    blocks: [B] int32.
    tiles: how tokens and keys are shared out in the attention, small tiles and large ones.
    token_parts: [N, 4] int32, where the parts of a token's tile leave what they found (`Tiling.tell_tokens`).
    max_keys: no row has more.
    """

    positions: Tensor
    ring_positions: Tensor
    key_positions: Tensor
    slots: Tensor
    rows: tuple[RowSpan, ...]
    spans: Tensor
    segments: Tensor
    blocks: Tensor
    tiles: tuple[Tiles, Tiles]
    token_parts: Tensor
    block_size: int
    max_keys: int

    @cached_property
    def key_slots(self) -> Tensor:
        """[R, max_keys] int32, slots of each row's keys in order of position; behind them anything."""
        return key_slots(self.blocks, self.segments, self.spans, self.block_size, self.max_keys)
