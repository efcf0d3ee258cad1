"""A decoder with the paged cache that its sessions share: turns rows of contexts into one forward pass.

Not a scheduler: who is in a step is the caller's choice. Used by thinker and talker alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from antiphon.core.blocks import BlockPool
from antiphon.core.cache_dtype import CacheDtype
from antiphon.core.context import Placement
from antiphon.kernels.kv_cache import KVCache
from antiphon.kernels.paged_attention.tiles import Tiling
from antiphon.kernels.rotate_keys.op import rotate_keys
from antiphon.kernels.transfer import upload
from antiphon.models.minicpmo.captured import NumRuns, Recorder
from antiphon.models.minicpmo.config import DecoderConfig
from antiphon.stages.step_graphs import Forward, StepGraphs, step_shapes
from antiphon.stages.step_packing import PackedRows, Row, StepBuffer, in_two, layout_in


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """num_blocks: KV blocks for all sessions. block_size: slots in a block. dtype: of what is in them."""

    num_blocks: int
    block_size: int = 16
    dtype: CacheDtype = CacheDtype.MODEL

    @staticmethod
    def for_tokens(num_tokens: int, num_segments: int, block_size: int = 16) -> CacheConfig:
        """Room for one context of `num_tokens`: each segment, and the ring's first block, may be partly empty."""
        return CacheConfig(-(-num_tokens // block_size) + num_segments + 1, block_size)

    def make(self, decoder: DecoderConfig, dtype: torch.dtype, device: torch.device) -> KVCache:
        """The tensors of such a decoder. dtype: of the model."""
        shape = (decoder.num_layers, self.num_blocks, self.block_size, decoder.num_kv_heads, decoder.head_dim)
        match self.dtype:
            case CacheDtype.MODEL:
                return KVCache.empty(shape, dtype, device)
            case CacheDtype.FLOAT8_E4M3:
                return KVCache.empty(shape, torch.float8_e4m3fn, device)
            case never:
                assert_never(never)


class PagedDecoder:
    """Owns the cache of one network and its blocks; the only one who writes either.

    forward: the network, (embeds [N, hidden], step, cache) → states [N, hidden]. dtype: of the network.
    """

    def __init__(
        self,
        forward: Forward,
        decoder: DecoderConfig,
        cache: CacheConfig,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._forward = forward
        self.num_runs = NumRuns()
        self.rope_theta = decoder.rope_theta
        self.pool = BlockPool(cache.num_blocks, cache.block_size)
        self.kept_in = cache.dtype
        self.cache = cache.make(decoder, dtype, device)
        sizes = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
        self.tiling = Tiling.of(*sizes, is_float8=self.cache.scales is not None)
        self._graphs = StepGraphs(forward, self.cache, decoder.hidden_size, dtype)

    @property
    def block_bytes(self) -> int:
        """Memory of one block, keys and values of all layers, with their scales."""
        return self.cache.num_bytes // self.pool.num_blocks

    def capture(self, max_rows: int, max_tokens: int, recorder: Recorder) -> Iterator[int]:
        """Record the steps of up to so many rows, of up to so many tokens each, before the first step; on a GPU only.

        Yields how many are left each time one is done.
        """
        max_keys = min(max_tokens, self.pool.num_blocks * self.pool.block_size)
        shapes = step_shapes(max_rows, max_keys, self.pool.block_size, self.tiling)
        yield from self._graphs.capture(shapes, recorder)

    def run(self, rows: Sequence[Row], embeds: Tensor) -> Tensor:
        """One forward pass over all rows. embeds: [N, hidden], inputs of all their tokens, in order of rows.

        Returns their states, [N, hidden].
        """
        packed = PackedRows.of(rows, self.tiling)
        slots = packed.columns[3]
        assert len({*slots}) == len(slots), "a slot is written twice in one step"
        captured = self._graphs.fitting(packed.shape)
        self.num_runs = self.num_runs.one_more(is_replayed=captured is not None)
        if captured is not None:
            return captured.run(packed, embeds)
        shape = packed.shape
        host = torch.zeros(shape.num_bytes, dtype=torch.uint8)
        StepBuffer(shape, *in_two(host, shape)).fill(packed)
        parts = in_two(upload(host, self.cache.keys.device), shape)
        step = layout_in(*parts, shape, packed.spans, self.pool.block_size)
        return self._forward(embeds, step, self.cache)

    def rotate(self, placement: Placement, by_positions: int) -> None:
        """Rotate stored keys in place, all layers; only where they are as the model computes them."""
        assert self.kept_in is CacheDtype.MODEL, f"keys in {self.kept_in} are rotated again; `check_slide` refuses it"
        slots = upload(torch.tensor(placement.slots, dtype=torch.int64), self.cache.keys.device)
        rotate_keys(self.cache.keys, slots, by_positions, self.rope_theta)
