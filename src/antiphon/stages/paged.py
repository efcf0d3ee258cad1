"""A decoder with the paged cache that its sessions share: turns rows of contexts into one forward pass.

Not a scheduler: who is in a step is the caller's choice. Used by thinker and talker alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.core.blocks import BlockPool
from antiphon.core.context import Context, Placement, Segment
from antiphon.kernels.kv_cache import KVCache, RowLayout, SegmentLayout, StepLayout
from antiphon.kernels.rotate_keys.op import rotate_keys
from antiphon.kernels.transfer import upload
from antiphon.models.minicpmo.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """num_blocks: KV blocks for all sessions. block_size: slots in a block."""

    num_blocks: int
    block_size: int = 16

    @staticmethod
    def for_tokens(num_tokens: int, num_segments: int, block_size: int = 16) -> CacheConfig:
        """Room for one context of `num_tokens`: each segment, and the ring's first block, may be partly empty."""
        return CacheConfig(-(-num_tokens // block_size) + num_segments + 1, block_size)


@dataclass(frozen=True, slots=True)
class Row:
    """One session's part of a step: where its tokens go, and what they attend to."""

    context: Context
    placement: Placement


class PagedDecoder:
    """Owns the cache of one network and its blocks; the only one who writes either.

    forward: the network, (embeds [N, hidden], step, cache) → states [N, hidden].
    """

    def __init__(
        self,
        forward: Callable[[Tensor, StepLayout, KVCache], Tensor],
        decoder: DecoderConfig,
        cache: CacheConfig,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._forward = forward
        self.rope_theta = decoder.rope_theta
        self.pool = BlockPool(cache.num_blocks, cache.block_size)
        shape = (decoder.num_layers, cache.num_blocks, cache.block_size, decoder.num_kv_heads, decoder.head_dim)
        self.cache = KVCache(
            torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype)
        )

    @property
    def block_bytes(self) -> int:
        """Memory of one block, keys and values of all layers."""
        return self.cache.num_bytes // self.pool.num_blocks

    def run(self, rows: Sequence[Row], embeds: Tensor) -> Tensor:
        """One forward pass over all rows. embeds: [N, hidden], inputs of all their tokens, in order of rows.

        Returns their states, [N, hidden].
        """
        return self._forward(embeds, self._layout(rows), self.cache)

    def rotate(self, placement: Placement, by_positions: int) -> None:
        """Rotate stored keys in place, all layers."""
        slots = upload(torch.tensor(placement.slots, dtype=torch.int64), self.cache.keys.device)
        rotate_keys(self.cache.keys, slots, by_positions, self.rope_theta)

    def _layout(self, rows: Sequence[Row]) -> StepLayout:
        layouts: list[RowLayout] = []
        positions: list[int] = []
        ring_positions: list[int] = []
        key_positions: list[int] = []
        slots: list[int] = []
        for row in rows:
            placed, start = row.placement, len(slots)
            own = range(placed.first_position, placed.first_position + len(placed.slots))
            slots += placed.slots
            positions += own
            ring_positions += (position + row.context.shift for position in own)
            key_positions += (position + placed.key_shift for position in own)
            *anchor, ring = map(_segment_layout, row.context.segments())
            layouts.append(RowLayout(start, len(slots), own.stop, tuple(anchor), ring))
        assert len(set(slots)) == len(slots), "a slot is written twice in one step"
        columns = torch.tensor([positions, ring_positions, key_positions, slots], dtype=torch.int64)
        at, ring_at, key_at, to = upload(columns, self.cache.keys.device)
        return StepLayout(at, ring_at, key_at, to, tuple(layouts), self.pool.block_size)


def _segment_layout(segment: Segment) -> SegmentLayout:
    return SegmentLayout(tuple(segment.blocks), segment.first_slot, segment.num_tokens)
