"""A step's rows in one buffer: what the device reads there is what the contexts say, with and without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from antiphon.core.blocks import BlockPool
from antiphon.core.context import Context
from antiphon.core.window import SlideMode, SlidePlan
from antiphon.kernels.kv_cache import StepLayout
from antiphon.kernels.paged_attention.tiles import Tiling
from antiphon.stages.step_graphs import decoding_shape, step_shapes
from antiphon.stages.step_packing import (
    ChainBuffer,
    PackedRows,
    Row,
    StepBuffer,
    StepShape,
    chain_parts,
    in_two,
    layout_in,
)
from core.brute_force import slots_of

GROUP = 4
UNCUT = Tiling(GROUP, has_large=True, num_parts=1, parts_per_tile=1, least_keys=10_000)
NUM_STEPS = 3
CUT = replace(UNCUT, num_parts=9, least_keys=2)


def contexts() -> tuple[Context, Context, Context]:
    """One with a prompt and a ring that starts inside a block, one with a suffix and an empty ring, one with a unit."""
    pool = BlockPool(64, 4)
    slid, fresh, plain = (Context(pool, SlideMode.ROTATE_QUERY, 1000) for _ in range(3))
    slid.append_prompt(6)
    for unit in range(3):
        slid.append(5)
        slid.close_unit(unit, ())
    slid.slide(SlidePlan(1, ()))
    fresh.append_prompt(3)
    fresh.append_suffix((1, 2))
    plain.append(9)
    return slid, fresh, plain


def step_rows() -> list[Row]:
    slid, fresh, plain = contexts()
    return [Row(slid, slid.append(1)), Row(fresh, fresh.append(30)), Row(plain, plain.append(2))]


def packed(rows: Sequence[Row], shape: StepShape) -> StepLayout:
    host, own = leftovers(shape), PackedRows.of(rows, UNCUT)
    buffer = StepBuffer(shape, *in_two(host, shape))
    buffer.fill(own)
    return layout_in(*in_two(host, shape), shape, own.spans, 4)


def leftovers(shape: StepShape) -> Tensor:
    return torch.full((shape.num_bytes,), 255, dtype=torch.uint8)


def shape_of(rows: Sequence[Row]) -> StepShape:
    return PackedRows.of(rows, UNCUT).shape


@pytest.mark.parametrize("room", [0, 5])
def test_the_device_reads_what_the_contexts_say(room: int) -> None:
    rows = step_rows()
    exact = shape_of(rows)
    shape = StepShape(
        exact.num_tokens + room,
        exact.num_rows + room,
        (exact.num_tiles[0] + room, exact.num_tiles[1] + room),
        exact.max_keys + room,
        exact.num_blocks + room,
        UNCUT,
    )
    step = packed(rows, shape)
    num_tokens = 0
    for index, row in enumerate(rows):
        placed = row.placement
        own = slice(num_tokens, num_tokens + len(row.placement.slots))
        num_tokens = own.stop
        positions = torch.arange(placed.first_position, placed.first_position + len(row.placement.slots))
        assert torch.equal(step.positions[own], positions)
        assert torch.equal(step.ring_positions[own], positions + row.context.shift)
        assert torch.equal(step.key_positions[own], positions + placed.key_shift)
        assert step.slots[own].tolist() == [*placed.slots]
        span = step.rows[index]
        assert (span.token_start, span.token_end) == (own.start, own.stop)
        assert step.spans[index].tolist() == [own.start, own.stop, span.num_keys, span.num_anchor_keys]
        assert span.num_anchor_keys == row.context.num_anchor_tokens
        slots = [slot for segment in row.context.segments() for slot in slots_of(segment, 4)]
        assert step.key_slots[index, : span.num_keys].tolist() == slots[: span.num_keys]
    assert step.slots[num_tokens:].tolist() == [-1] * room
    assert not step.spans[len(rows) :].any()


def test_every_token_is_in_one_tile_of_its_row_and_padding_in_none() -> None:
    rows = step_rows()
    shape = shape_of(rows)
    step = packed(rows, replace(shape, num_tiles=(shape.num_tiles[0] + 2, shape.num_tiles[1] + 1)))
    small, large = (tiles.parts.tolist() for tiles in step.tiles)
    assert [part for part in small if part[0] >= 0] == [[0, 0, 1, 17, 6, 0, 1], [2, 31, 33, 11, 0, 0, 1]]
    assert [len(small), len(large)] == [8, 6], "each may be cut once"
    assert [part for part in large if part[0] >= 0] == [[1, 1, 31, 35, 5, 0, 1], [1, 17, 31, 35, 5, 0, 1]]
    assert not step.token_parts.any()


def test_the_fewer_tiles_a_step_has_the_finer_their_keys_are_cut() -> None:
    rows = step_rows()
    room = replace(shape_of(rows), num_tiles=(20, 20), tiling=CUT)
    for own in (rows, rows[:1]):
        step = packed(own, room)
        for tiles in step.tiles:
            assert len(tiles.parts) == 40
            parts = [part for part in tiles.parts.tolist() if part[0] >= 0]
            for number, (*_, part, num_parts) in enumerate(parts):
                tile = parts[number - part : number - part + num_parts]
                assert tile == [[*tile[0][:5], one, num_parts] for one in range(num_parts)]
    small, _ = packed(rows[:1], room).tiles
    assert (small.parts[:, 0] >= 0).sum() == 9, "17 keys in parts of 2"


def test_a_token_knows_the_parts_of_its_tile() -> None:
    rows = step_rows()
    shape = replace(shape_of(rows), tiling=CUT)
    step = packed(rows, shape)
    for token, (first, num_parts, first_query, is_large) in enumerate(step.token_parts.tolist()):
        parts = step.tiles[is_large].parts[first : first + num_parts].tolist()
        assert [(part, number) for *_, part, number in parts] == [(one, num_parts) for one in range(num_parts)]
        assert {start + first_query // GROUP for _, start, *_ in parts} == {token}


def test_a_piece_of_a_row_sees_only_what_stands_before_its_end() -> None:
    context = Context(BlockPool(64, 4), SlideMode.ROTATE_QUERY, 1000)
    placed = context.append(30)
    piece = placed._replace(slots=placed.slots[:10])
    (span,) = packed([Row(context, piece)], shape_of([Row(context, piece)])).rows
    assert (span.num_keys, span.num_anchor_keys) == (10, 0)


def test_a_buffer_is_used_again_without_a_trace_of_the_step_before() -> None:
    rows = step_rows()
    shape = shape_of(rows)
    host, last = leftovers(shape), PackedRows.of(rows[2:], UNCUT)
    buffer = StepBuffer(shape, *in_two(host, shape))
    buffer.fill(PackedRows.of(rows, UNCUT))
    num_bytes = buffer.fill(last)
    again, alone = layout_in(*in_two(host, shape), shape, last.spans, 4), packed(rows[2:], shape)
    assert num_bytes < shape.num_block_bytes
    for one, other in ((again.slots, alone.slots), (again.spans, alone.spans), (again.positions, alone.positions)):
        assert torch.equal(one, other)
    tiles = zip(again.tiles, alone.tiles, strict=True)
    assert all(torch.equal(one.parts[:, 0], other.parts[:, 0]) for one, other in tiles)


@pytest.mark.parametrize("tiling", [UNCUT, CUT])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5])
def test_each_step_of_a_chain_is_where_it_would_be_alone(num_rows: int, tiling: Tiling) -> None:
    pool = BlockPool(64, 4)
    contexts = [Context(pool, SlideMode.ROTATE_QUERY, 1000) for _ in range(num_rows)]
    for number, context in enumerate(contexts):
        context.append(5 + number)
    rows = [Row(context, context.append(NUM_STEPS)) for context in contexts]
    shape = decoding_shape(num_rows, 40, 4, tiling)
    host = torch.full((ChainBuffer.num_bytes(shape, NUM_STEPS),), 255, dtype=torch.uint8)
    ChainBuffer(shape, NUM_STEPS, host).fill(rows)
    heads, blocks = chain_parts(host, shape, NUM_STEPS)
    for number, head in enumerate(heads):
        step = layout_in(head, blocks, shape, (), 4)
        placed = [row.placement for row in rows]
        assert step.positions.tolist() == [one.first_position + number for one in placed]
        assert step.slots.tolist() == [one.slots[number] for one in placed]
        small, _ = step.tiles
        tiles = {(row, keys) for row, _, _, keys, *_ in small.parts.tolist() if row >= 0}
        assert tiles == {(row, one.first_position + number + 1) for row, one in enumerate(placed)}


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 16, 17, 40])
def test_a_shape_of_the_grid_holds_every_step_of_its_size(num_tokens: int) -> None:
    """However the tokens are shared out among rows, the first shape with enough tokens and rows has enough tiles."""
    for num_rows in {1, 2, num_tokens} & {*range(1, num_tokens + 1)}:
        pool = BlockPool(200, 4)
        rows = []
        for index in range(num_rows):
            context = Context(pool, SlideMode.ROTATE_QUERY, 1000)
            own = num_tokens // num_rows + (num_tokens % num_rows if index == 0 else 0)
            rows.append(Row(context, context.append(own)))
        wanted = shape_of(rows)
        shapes = [shape for shape in step_shapes(40, 100, 4, UNCUT) if shape.holds(wanted)]
        assert shapes, wanted
        assert shapes[0].num_tokens <= max(16, 2 * num_tokens)
