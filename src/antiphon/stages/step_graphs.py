"""A decoder's whole forward pass as CUDA graphs, one for each shape of step that is worth one.

All launches of a step are recorded once, at start, and replayed by one call, so that the host is not what a step waits
for. What changes from step to step is in buffers of fixed places: `step_packing.py`. A step that fits no shape is run
launch by launch, by the same function. Shown on a GPU by tests/test_cuda.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor
from torch.cuda import _POOL_HANDLE

from antiphon.kernels.kv_cache import KVCache, StepLayout
from antiphon.kernels.paged_attention.tiles import TileKind, tokens_per_tile
from antiphon.stages.step_packing import MAX_SEGMENTS, PackedRows, StepBuffer, StepShape, layout_in

Forward = Callable[[Tensor, StepLayout, KVCache], Tensor]
"""(embeds [N, hidden], step, cache) → states [N, hidden]."""

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_TOKENS = (16, 32, 64, 128, 256, 512)

_NUM_STAGING = 3
"""Host buffers of a shape: the device may still be copying from the last two."""


def step_shapes(max_rows: int, max_keys: int, block_size: int, group_size: int) -> tuple[StepShape, ...]:
    """For steps that decode only, and for mixed ones; smaller ones first. group_size: query heads per key head."""
    small = tokens_per_tile(TileKind.SMALL, group_size)
    large = tokens_per_tile(TileKind.LARGE, group_size)
    # Each segment's last block, and the ring's first, may be partly empty.
    blocks_per_row = -(-max_keys // block_size) + MAX_SEGMENTS + 1

    def shape(num_tokens: int, num_rows: int, num_large: int) -> StepShape:
        return StepShape(num_tokens, num_rows, (num_rows, num_large), max_keys, num_rows * blocks_per_row)

    sizes = [size for size in _ROWS if size < max_rows]
    decoding = [shape(size, size, 0) for size in (*sizes, max_rows)]
    # A row in large tiles has more tokens than a small one holds.
    mixed = [shape(size, min(size, max_rows), size // (small + 1) + size // large) for size in _TOKENS]
    return tuple(decoding + mixed)


class _Captured:
    """One shape's graph with its buffers. Not reentrant: a replay overwrites what the one before it gave."""

    def __init__(self, forward: Forward, cache: KVCache, shape: StepShape, hidden_size: int, pool: _Pool) -> None:
        device = cache.keys.device
        self.shape = shape
        self._staging = cycle([_Staging(shape) for _ in range(_NUM_STAGING)])
        self._buffer = torch.empty(shape.num_bytes, dtype=torch.uint8, device=device)
        self._embeds = torch.zeros((shape.num_tokens, hidden_size), dtype=pool.dtype, device=device)
        # Nothing but padding: the launches are the same, and nothing is written.
        self._upload(PackedRows.of((), group_size=1))
        step = layout_in(self._buffer, shape, (), cache.block_size)
        forward(self._embeds, step, cache)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        step = layout_in(self._buffer, shape, (), cache.block_size)
        with torch.cuda.graph(self._graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local"):
            self._states = forward(self._embeds, step, cache)

    def run(self, rows: PackedRows, embeds: Tensor) -> Tensor:
        """embeds: [N, hidden], inputs of all tokens. Returns their states, [N, hidden]."""
        self._upload(rows)
        self._embeds[: embeds.shape[0]].copy_(embeds)
        self._graph.replay()
        return self._states[: embeds.shape[0]].clone()

    def _upload(self, rows: PackedRows) -> None:
        staging = next(self._staging)
        staging.copied.synchronize()
        num_bytes = staging.buffer.fill(rows)
        self._buffer[:num_bytes].copy_(staging.buffer.host[:num_bytes], non_blocking=True)
        staging.copied.record()


class _Staging:
    """A host buffer. copied: what was in it last is on the device."""

    def __init__(self, shape: StepShape) -> None:
        self.buffer = StepBuffer(shape, pinned=True)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own lack


@dataclass(frozen=True, slots=True)
class _Pool:
    """What all graphs of a decoder share, because only one of them runs at a time: memory, and the stream of capture.

    cuBLAS has one workspace per stream of capture. Decoders that shared it would write into each other's products.
    """

    handle: _POOL_HANDLE
    stream: torch.cuda.Stream
    dtype: torch.dtype


class StepGraphs:
    """Owns the graphs of one decoder. Between two replays nobody else may run its forward function."""

    def __init__(self, captured: Sequence[_Captured]) -> None:
        self._captured = captured

    @staticmethod
    def capture(
        forward: Forward, cache: KVCache, shapes: Iterable[StepShape], hidden_size: int
    ) -> Iterator[StepGraphs]:
        """One step per shape, so that whoever waits can be told how far it is; the last one has all of them."""
        stream = torch.cuda.Stream(cache.keys.device)  # type: ignore[no-untyped-call]  # torch's own lack
        pool = _Pool(torch.cuda.graph_pool_handle(), stream, cache.keys.dtype)
        captured: list[_Captured] = []
        # The largest first: what it needs is then room for the others.
        for shape in sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True):
            captured.insert(0, _Captured(forward, cache, shape, hidden_size, pool))
            yield StepGraphs(tuple(captured))

    def fitting(self, shape: StepShape) -> _Captured | None:
        """The smallest that holds such a step."""
        return next((captured for captured in self._captured if captured.shape.holds(shape)), None)
