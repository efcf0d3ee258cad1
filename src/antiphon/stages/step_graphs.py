"""A decoder's whole forward pass as CUDA graphs, one for each shape of step that is worth one.

All launches of a step are recorded once, at start, and replayed by one call, so that the host is not what a step waits
for. What changes from step to step is in buffers of fixed places: `step_packing.py`. A step that fits no shape is run
launch by launch, by the same function. Shown on a GPU by tests/test_cuda.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor

from antiphon.kernels.kv_cache import KVCache, StepLayout
from antiphon.kernels.paged_attention.tiles import TileKind, Tiling
from antiphon.kernels.transfer import NUM_STAGING, Staging
from antiphon.models.minicpmo.captured import Recorder
from antiphon.stages.step_packing import MAX_SEGMENTS, PackedRows, StepBuffer, StepShape, in_two, layout_in

Forward = Callable[[Tensor, StepLayout, KVCache], Tensor]
"""(embeds [N, hidden], step, cache) → states [N, hidden]."""

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512)


def recorded_numbers(most: int) -> tuple[int, ...]:
    """For how many rows, and how many draws, graphs are recorded; smaller ones first, up to `most`."""
    return (*(number for number in _ROWS if number < most), most)


def step_shapes(max_rows: int, max_keys: int, block_size: int, tiling: Tiling) -> tuple[StepShape, ...]:
    """For steps that decode only, and for mixed ones; smaller ones first."""
    small, large = map(tiling.tokens_per_tile, TileKind)
    decoding = [decoding_shape(size, max_keys, block_size, tiling) for size in recorded_numbers(max_rows)]

    def mixed(num_tokens: int) -> StepShape:
        one = decoding_shape(min(num_tokens, max_rows), max_keys, block_size, tiling)
        if not tiling.has_large:
            # Each row's last tile may be partly empty.
            return replace(one, num_tokens=num_tokens, num_tiles=(one.num_rows + num_tokens // small, 0))
        # A row in large tiles has more tokens than a small one holds.
        num_large = num_tokens // (small + 1) + num_tokens // large
        return replace(one, num_tokens=num_tokens, num_tiles=(one.num_rows, num_large))

    return (*decoding, *map(mixed, _TOKENS))


def decoding_shape(num_rows: int, max_keys: int, block_size: int, tiling: Tiling) -> StepShape:
    """Of rows with a token each."""
    # Each segment's last block, and the ring's first, may be partly empty.
    blocks_per_row = -(-max_keys // block_size) + MAX_SEGMENTS + 1
    return StepShape(num_rows, num_rows, (num_rows, 0), max_keys, num_rows * blocks_per_row, tiling)


class _Captured:
    """One shape's graph with its buffers. Not reentrant: a replay overwrites what the one before it gave."""

    def __init__(self, forward: Forward, cache: KVCache, shape: StepShape, embeds: Tensor, recorder: Recorder) -> None:
        """embeds: [shape.num_tokens, hidden], zeros; inputs will be copied there."""
        device = cache.keys.device
        self.shape = shape
        self._staging = cycle([_Staged(shape) for _ in range(NUM_STAGING)])
        self._buffer = torch.empty(shape.num_bytes, dtype=torch.uint8, device=device)
        self._embeds = embeds
        # Nothing but padding: the launches are the same, and nothing is written.
        self._upload(PackedRows.of((), shape.tiling))
        self._replay = recorder.record(
            lambda: forward(self._embeds, layout_in(*in_two(self._buffer, shape), shape, (), cache.block_size), cache)
        )

    def run(self, rows: PackedRows, embeds: Tensor) -> Tensor:
        """embeds: [N, hidden], inputs of all tokens. Returns their states, [N, hidden]."""
        self._upload(rows)
        self._embeds[: embeds.shape[0]].copy_(embeds)
        return self._replay()[: embeds.shape[0]].clone()

    def _upload(self, rows: PackedRows) -> None:
        staged = next(self._staging)
        staged.staging.make_free()
        staged.staging.send(self._buffer, self.shape.num_head_bytes + staged.buffer.fill(rows))


class _Staged:
    """A host buffer of a shape."""

    def __init__(self, shape: StepShape) -> None:
        self.staging = Staging(shape.num_bytes)
        self.buffer = StepBuffer(shape, *in_two(self.staging.host, shape))


class StepGraphs:
    """Owns the graphs of one decoder, none at first. Who replays them is the only one who runs the forward function."""

    def __init__(self, forward: Forward, cache: KVCache, hidden_size: int, dtype: torch.dtype) -> None:
        """hidden_size, dtype: of the inputs."""
        self._forward = forward
        self._cache = cache
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._captured: list[_Captured] = []

    def capture(self, shapes: Iterable[StepShape], recorder: Recorder) -> Iterator[int]:
        """Yields after each how many are left."""
        # The largest first: what it needs is then room for the others.
        largest_first = sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)
        for num_done, shape in enumerate(largest_first, start=1):
            device = self._cache.keys.device
            embeds = torch.zeros((shape.num_tokens, self._hidden_size), dtype=self._dtype, device=device)
            captured = _Captured(self._forward, self._cache, shape, embeds, recorder)
            self._captured.insert(0, captured)
            yield len(largest_first) - num_done

    def fitting(self, shape: StepShape) -> _Captured | None:
        """The smallest that holds such a step."""
        return next((captured for captured in self._captured if captured.shape.holds(shape)), None)
