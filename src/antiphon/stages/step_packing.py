"""A step's rows as the device wants them: one buffer of fixed places, filled on the host and copied in one go.

The places depend on a `StepShape` only, so that a captured graph finds every step of its shape where it was captured.
Who is in a step, and what a graph is, is known elsewhere. Shown by tests/stages/test_step_packing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from antiphon.core.context import Context, Placement
from antiphon.kernels.kv_cache import RowSpan, StepLayout
from antiphon.kernels.paged_attention.tiles import (
    NO_ROW,
    PART_NUMBERS,
    TILE_NUMBERS,
    TOKEN_NUMBERS,
    TileKind,
    Tiles,
    Tiling,
)

MAX_SEGMENTS = 3
"""Of a context: prompt, `previous` with the suffix, ring."""

_NUM_COLUMNS = 4
_INT64_BYTES, _INT32_BYTES = 8, 4


class Row(NamedTuple):
    """One session's part of a step: where its tokens go, and what they attend to. A tuple, as `Placement` is."""

    context: Context
    placement: Placement


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's buffer has room for. num_tiles: small and large ones. max_keys: of one row. num_blocks: of all."""

    num_tokens: int
    num_rows: int
    num_tiles: tuple[int, int]
    max_keys: int
    num_blocks: int
    tiling: Tiling

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
    def num_parts(self) -> tuple[int, int]:
        """Of small and of large tiles."""
        num_small, num_large = map(self.tiling.most_parts, self.num_tiles)
        return num_small, num_large

    @property
    def num_bytes(self) -> int:
        return self.num_head_bytes + self.num_block_bytes

    @property
    def num_block_bytes(self) -> int:
        """Blocks are last, because how many there are changes most."""
        return _INT32_BYTES * self.num_blocks

    @property
    def num_head_bytes(self) -> int:
        """Of all that is not blocks."""
        return sum(self.head_sizes)

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Bytes of what is in the head, one after the other, and of what fills it up: heads may follow heads."""
        sizes = (
            _INT64_BYTES * _NUM_COLUMNS * self.num_tokens,
            _INT32_BYTES * 4 * self.num_rows,
            _INT32_BYTES * 3 * MAX_SEGMENTS * self.num_rows,
            _INT32_BYTES * TOKEN_NUMBERS * self.num_tokens,
            *(_INT32_BYTES * PART_NUMBERS * number for number in self.num_parts),
        )
        return (*sizes, -sum(sizes) % _INT64_BYTES)


@dataclass(frozen=True, slots=True)
class _Places:
    """Views of a step's buffer, which has the layout of `StepShape`. Shapes as in `StepLayout`."""

    columns: Tensor
    spans: Tensor
    segments: Tensor
    token_parts: Tensor
    parts: tuple[Tensor, Tensor]
    blocks: Tensor

    @staticmethod
    def of(head: Tensor, blocks: Tensor, shape: StepShape) -> _Places:
        """head: [shape.num_head_bytes] uint8. blocks: [shape.num_block_bytes] uint8."""
        columns, *rest, _ = torch.split(head, [*shape.head_sizes])
        spans, segments, token_parts, small, large = (part.view(torch.int32) for part in rest)
        return _Places(
            columns.view(torch.int64).view(_NUM_COLUMNS, -1),
            spans.view(-1, 4),
            segments.view(-1, MAX_SEGMENTS, 3),
            token_parts.view(-1, TOKEN_NUMBERS),
            (small.view(-1, PART_NUMBERS), large.view(-1, PART_NUMBERS)),
            blocks.view(torch.int32),
        )


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A step's rows as numbers, in the order in which `StepBuffer` writes them. shape: exactly theirs.

    columns: positions, ring positions, key positions and slots of all tokens. spans: per row the four of `RowSpan`.
    segments: per row `MAX_SEGMENTS` times three numbers, as in `StepLayout`. tiles: per kind and tile the first five
    numbers of `Tiles`. tables: int32, the block tables of the rows.
    """

    shape: StepShape
    columns: tuple[list[int], list[int], list[int], list[int]]
    spans: list[RowSpan]
    segments: list[int]
    tiles: tuple[list[int], list[int]]
    tables: list[bytes]

    @staticmethod
    def of(rows: Sequence[Row], tiling: Tiling) -> PackedRows:
        """One pass over the rows: this is what the host does for each of them in every step."""
        positions: list[int] = []
        ring_positions: list[int] = []
        key_positions: list[int] = []
        slots: list[int] = []
        spans: list[RowSpan] = []
        segments: list[int] = []
        small: list[int] = []
        large: list[int] = []
        tables: list[bytes] = []
        num_blocks = max_keys = 0
        small_tile, large_tile = map(tiling.tokens_per_tile, TileKind)
        end = 0
        for index, (context, (own_slots, first, key_shift)) in enumerate(rows):
            start, shift = end, context.shift
            slots += own_slots
            end = len(slots)
            num_keys = first + end - start
            if end - start == 1:
                positions.append(first)
                ring_positions.append(first + shift)
                key_positions.append(first + key_shift)
            else:
                positions += range(first, num_keys)
                ring_positions += range(first + shift, num_keys + shift)
                key_positions += range(first + key_shift, num_keys + key_shift)
            num_anchor_keys = min(context.num_anchor_tokens, num_keys)
            spans.append(RowSpan(start, end, num_keys, num_anchor_keys))
            max_keys = max(max_keys, num_keys)
            own = context.segments()
            assert len(own) <= MAX_SEGMENTS, f"{len(own)} segments, room for {MAX_SEGMENTS}"
            for segment in own:
                segments += (num_blocks, segment.first_slot, segment.num_tokens)
                num_blocks += len(segment.blocks)
            segments += _NO_SEGMENTS[len(own)]
            tables.append(context.block_table)
            if end - start > small_tile and tiling.has_large:
                for token in range(start, end, large_tile):
                    large += (index, token, end, num_keys, num_anchor_keys)
            else:
                for token in range(start, end, small_tile):
                    small += (index, token, end, num_keys, num_anchor_keys)
        num_tiles = len(small) // TILE_NUMBERS, len(large) // TILE_NUMBERS
        shape = StepShape(len(slots), len(spans), num_tiles, max_keys, num_blocks, tiling)
        return PackedRows(
            shape, (positions, ring_positions, key_positions, slots), spans, segments, (small, large), tables
        )


class StepBuffer:
    """A step of some shape on the host, to be filled and copied."""

    def __init__(self, shape: StepShape, head: Tensor, blocks: Tensor) -> None:
        """head, blocks: as in `in_two`; they are written to."""
        self.shape = shape
        places = _Places.of(head, blocks, shape)
        self._columns = places.columns.numpy()
        self._spans = places.spans.flatten().numpy()
        self._segments = places.segments.flatten().numpy()
        self._token_parts = places.token_parts.numpy()
        self._parts = [parts.numpy() for parts in places.parts]
        self._blocks = places.blocks.numpy()

    def fill(self, rows: PackedRows) -> int:
        """Write the rows, and padding behind them. Returns how many bytes of the blocks are of any use."""
        assert self.shape.holds(rows.shape), f"{rows.shape} does not fit into {self.shape}"
        num_tokens, num_blocks = rows.shape.num_tokens, rows.shape.num_blocks
        self._columns[:, :num_tokens] = rows.columns
        self._columns[:3, num_tokens:] = 0
        self._columns[3, num_tokens:] = _NO_SLOT
        spans = [*chain.from_iterable(rows.spans)]
        for places, numbers in (
            (self._spans, spans),
            (self._segments, rows.segments),
        ):
            places[: len(numbers)] = numbers
            places[len(numbers) :] = 0
        self._token_parts[:] = 0
        for kind, places, tiles in zip(TileKind, self._parts, rows.tiles, strict=True):
            num_parts = 0
            if tiles:
                parts = self.shape.tiling.parts_of(np.array(tiles, dtype=np.int32).reshape(-1, TILE_NUMBERS))
                self.shape.tiling.tell_tokens(parts, kind, self._token_parts)
                num_parts = len(parts)
                places[:num_parts] = parts
            places[num_parts:, 0] = NO_ROW
        self._blocks[:num_blocks] = np.frombuffer(b"".join(rows.tables), dtype=np.int32)
        return _INT32_BYTES * num_blocks


def in_two(buffer: Tensor, shape: StepShape) -> tuple[Tensor, Tensor]:
    """A buffer of [shape.num_bytes] uint8 as what a step needs, and its blocks."""
    return buffer[: shape.num_head_bytes], buffer[shape.num_head_bytes :]


def layout_in(head: Tensor, blocks: Tensor, shape: StepShape, rows: Sequence[RowSpan], block_size: int) -> StepLayout:
    """A filled buffer as a step, wherever it is. head, blocks: as in `in_two`."""
    places = _Places.of(head, blocks, shape)
    positions, ring_positions, key_positions, slots = places.columns
    return StepLayout(
        positions=positions,
        ring_positions=ring_positions,
        key_positions=key_positions,
        slots=slots,
        rows=tuple(rows),
        spans=places.spans,
        segments=places.segments,
        blocks=places.blocks,
        tiles=(Tiles(TileKind.SMALL, places.parts[0]), Tiles(TileKind.LARGE, places.parts[1])),
        token_parts=places.token_parts,
        block_size=block_size,
        max_keys=shape.max_keys,
    )


_NO_SEGMENTS = tuple((0,) * (3 * (MAX_SEGMENTS - num_segments)) for num_segments in range(MAX_SEGMENTS + 1))
"""The numbers of those that a context with so many segments does not have."""


class ChainBuffer:
    """Several steps of the same rows, one token of each in a step, on the host; their blocks stand there once.

    shape: of each step. host: [num_bytes] uint8, one head after the other, then the blocks.
    """

    def __init__(self, shape: StepShape, num_steps: int, host: Tensor) -> None:
        self.shape = shape
        heads, blocks = chain_parts(host, shape, num_steps)
        self._first = StepBuffer(shape, heads[0], blocks)
        self._heads = heads.numpy()
        columns, spans, _, _, parts, *_ = np.split(self._heads, np.cumsum(shape.head_sizes), axis=1)
        self._columns = columns.view(np.int64).reshape(num_steps, _NUM_COLUMNS, -1)
        self._spans = spans.view(np.int32).reshape(num_steps, -1, 4)
        self._parts = parts.view(np.int32).reshape(num_steps, -1, PART_NUMBERS)
        self._numbers = np.arange(num_steps)[:, None]

    @staticmethod
    def num_bytes(shape: StepShape, num_steps: int) -> int:
        return num_steps * shape.num_head_bytes + shape.num_block_bytes

    def fill(self, rows: Sequence[Row]) -> int:
        """Write rows whose tokens are as many as the steps. Returns how many bytes of the buffer are of any use."""
        num_rows, num_block_bytes = len(rows), self._first.fill(PackedRows.of(first_tokens(rows), self.shape.tiling))
        self._heads[1:] = self._heads[0]
        if not num_rows:
            return self._heads.nbytes + num_block_bytes
        self._columns[:, :3, :num_rows] += self._numbers[:, :, None]
        self._columns[:, 3, :num_rows] = np.array([row.placement.slots for row in rows]).T
        self._spans[:, :num_rows, _NUM_KEYS] += self._numbers.astype(np.int32)
        self._parts[:, :, 1 + _NUM_KEYS] += self._numbers.astype(np.int32)
        return self._heads.nbytes + num_block_bytes


def first_tokens(rows: Sequence[Row]) -> list[Row]:
    """The same rows, as if each had its first token only."""
    return [Row(row.context, row.placement._replace(slots=row.placement.slots[:1])) for row in rows]


def chain_parts(buffer: Tensor, shape: StepShape, num_steps: int) -> tuple[Tensor, Tensor]:
    """A `ChainBuffer`'s bytes, wherever they are, as [num_steps, head] and blocks."""
    num_head_bytes = num_steps * shape.num_head_bytes
    return buffer[:num_head_bytes].view(num_steps, -1), buffer[num_head_bytes:]


_NUM_KEYS = RowSpan._fields.index("num_keys")
_NO_SLOT = -1
