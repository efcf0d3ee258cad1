"""A step's rows as the device wants them: one buffer of fixed places, filled on the host and copied in one go.

The places depend on a `StepShape` only, so that a captured graph finds every step of its shape where it was captured.
Who is in a step, and what a graph is, is known elsewhere. Shown by tests/stages/test_step_packing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from antiphon.core.context import Context, Placement
from antiphon.kernels.kv_cache import RowSpan, StepLayout
from antiphon.kernels.paged_attention.tiles import TileKind, Tiles, tiles_of

MAX_SEGMENTS = 3
"""Of a context: prompt, `previous` with the suffix, ring."""

_NUM_COLUMNS = 4
_INT64_BYTES, _INT32_BYTES = 8, 4


@dataclass(frozen=True, slots=True)
class Row:
    """One session's part of a step: where its tokens go, and what they attend to."""

    context: Context
    placement: Placement

    @property
    def num_tokens(self) -> int:
        return len(self.placement.slots)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's buffer has room for. num_tiles: small and large ones. max_keys: of one row. num_blocks: of all."""

    num_tokens: int
    num_rows: int
    num_tiles: tuple[int, int]
    max_keys: int
    num_blocks: int

    @staticmethod
    def of(rows: Sequence[Row], group_size: int) -> StepShape:
        """Exactly these. group_size: query heads per key head."""
        num_tiles = dict.fromkeys(TileKind, 0)
        for row in rows:
            kind, size = tiles_of(row.num_tokens, group_size)
            num_tiles[kind] += -(-row.num_tokens // size)
        segments = [segment for row in rows for segment in row.context.segments()]
        return StepShape(
            num_tokens=sum(row.num_tokens for row in rows),
            num_rows=len(rows),
            num_tiles=(num_tiles[TileKind.SMALL], num_tiles[TileKind.LARGE]),
            max_keys=max((_num_keys(row) for row in rows), default=0),
            num_blocks=sum(len(segment.blocks) for segment in segments),
        )

    def holds(self, other: StepShape) -> bool:
        """Whether a step of that shape fits into this one."""
        return (
            other.num_tokens <= self.num_tokens
            and other.num_rows <= self.num_rows
            and other.num_tiles[0] <= self.num_tiles[0]
            and other.num_tiles[1] <= self.num_tiles[1]
            and other.max_keys <= self.max_keys
            and other.num_blocks <= self.num_blocks
        )

    @property
    def num_bytes(self) -> int:
        return self._blocks_at + _INT32_BYTES * self.num_blocks

    @property
    def _blocks_at(self) -> int:
        """In bytes: blocks are last, because how many there are changes most."""
        numbers = (4 + 3 * MAX_SEGMENTS) * self.num_rows + 2 * sum(self.num_tiles)
        return _INT64_BYTES * _NUM_COLUMNS * self.num_tokens + _INT32_BYTES * numbers


@dataclass(frozen=True, slots=True)
class _Places:
    """Views of a step's buffer, which has the layout of `StepShape`. Shapes as in `StepLayout`."""

    columns: Tensor
    spans: Tensor
    segments: Tensor
    tiles: tuple[Tensor, Tensor]
    blocks: Tensor

    @staticmethod
    def of(buffer: Tensor, shape: StepShape) -> _Places:
        """buffer: [shape.num_bytes] uint8."""
        sizes = [
            _INT64_BYTES * _NUM_COLUMNS * shape.num_tokens,
            _INT32_BYTES * 4 * shape.num_rows,
            _INT32_BYTES * 3 * MAX_SEGMENTS * shape.num_rows,
            *(_INT32_BYTES * 2 * number for number in shape.num_tiles),
            _INT32_BYTES * shape.num_blocks,
        ]
        columns, *rest = torch.split(buffer, sizes)
        spans, segments, small, large, blocks = (part.view(torch.int32) for part in rest)
        return _Places(
            columns.view(torch.int64).view(_NUM_COLUMNS, -1),
            spans.view(-1, 4),
            segments.view(-1, MAX_SEGMENTS, 3),
            (small.view(-1, 2), large.view(-1, 2)),
            blocks,
        )


class StepBuffer:
    """A step of some shape on the host, to be filled and copied. pinned: whether the copy can run by itself."""

    def __init__(self, shape: StepShape, group_size: int, *, pinned: bool) -> None:
        self.shape = shape
        self.host = torch.zeros(shape.num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._group_size = group_size
        places = _Places.of(self.host, shape)
        self._columns = places.columns.numpy()
        self._spans = places.spans.numpy()
        self._segments = places.segments.numpy()
        self._tiles = [tiles.numpy() for tiles in places.tiles]
        self._blocks = places.blocks.numpy()

    def fill(self, rows: Sequence[Row]) -> tuple[tuple[RowSpan, ...], int]:
        """Write the rows, and padding behind them.

        Returns their spans, and how many bytes of the buffer are of any use.
        """
        spans: list[RowSpan] = []
        tiles: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        num_tokens = num_blocks = 0
        for index, row in enumerate(rows):
            placed, shift = row.placement, row.context.shift
            start, num_tokens = num_tokens, num_tokens + row.num_tokens
            own = np.arange(placed.first_position, placed.first_position + row.num_tokens)
            self._columns[0, start:num_tokens] = own
            self._columns[1, start:num_tokens] = own + shift
            self._columns[2, start:num_tokens] = own + placed.key_shift
            self._columns[3, start:num_tokens] = placed.slots
            num_blocks = self._write_segments(index, row.context, num_blocks)
            num_keys = _num_keys(row)
            spans.append(RowSpan(start, num_tokens, num_keys, min(row.context.num_anchor_tokens, num_keys)))
            kind, size = tiles_of(row.num_tokens, self._group_size)
            tiles[kind is TileKind.LARGE].extend((index, first) for first in range(start, num_tokens, size))
        self._columns[:3, num_tokens:] = 0
        self._columns[3, num_tokens:] = _NO_SLOT
        self._spans[len(spans) :] = 0
        self._spans[: len(spans)] = [
            (span.token_start, span.token_end, span.num_keys, span.num_anchor_keys) for span in spans
        ] or np.empty((0, 4))
        for places, own_tiles in zip(self._tiles, tiles, strict=True):
            places[len(own_tiles) :, 0] = _NO_ROW
            places[: len(own_tiles)] = own_tiles or np.empty((0, 2))
        used = self.host.shape[0] - _INT32_BYTES * (len(self._blocks) - num_blocks)
        return tuple(spans), used

    def _write_segments(self, index: int, context: Context, num_blocks: int) -> int:
        """The row's block tables, behind `num_blocks` of others; returns how many there are then."""
        segments = context.segments()
        assert len(segments) <= MAX_SEGMENTS, f"{len(segments)} segments, room for {MAX_SEGMENTS}"
        places = self._segments[index]
        places[len(segments) :] = 0
        for place, segment in zip(places, segments, strict=False):
            start, num_blocks = num_blocks, num_blocks + len(segment.blocks)
            place[:] = start, segment.first_slot, segment.num_tokens
            self._blocks[start:num_blocks] = np.frombuffer(segment.blocks, dtype=np.int32)
        return num_blocks


def layout_in(buffer: Tensor, shape: StepShape, rows: tuple[RowSpan, ...], block_size: int) -> StepLayout:
    """A filled buffer as a step, wherever it is. buffer: [shape.num_bytes] uint8."""
    places = _Places.of(buffer, shape)
    positions, ring_positions, key_positions, slots = places.columns
    return StepLayout(
        positions=positions,
        ring_positions=ring_positions,
        key_positions=key_positions,
        slots=slots,
        rows=rows,
        spans=places.spans,
        segments=places.segments,
        blocks=places.blocks,
        tiles=tuple(Tiles(kind, tiles) for kind, tiles in zip(TileKind, places.tiles, strict=True)),
        block_size=block_size,
        max_keys=shape.max_keys,
    )


_NO_SLOT = -1
_NO_ROW = -1


def _num_keys(row: Row) -> int:
    """Up to the row's last token."""
    return row.placement.first_position + row.num_tokens
