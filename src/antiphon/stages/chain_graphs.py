"""Chains: several steps in which each row feeds what it draws, in one CUDA graph; what the host does is done once.

A step of a small network takes the device less time than the host, so such steps are launched several at a time. Only
for rows of which it is known beforehand how they draw. Shown by tests/stages/test_talker.py, which runs chains launch
by launch, and on a GPU by tests/test_cuda.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from antiphon.kernels.kv_cache import KVCache
from antiphon.kernels.paged_attention.tiles import Tiling
from antiphon.kernels.transfer import NUM_STAGING, Download, Staging, upload
from antiphon.models.minicpmo.captured import NumRuns, Recorder
from antiphon.stages.draw_graphs import ColumnBuffer, Draw, DrawColumns
from antiphon.stages.draw_table import DrawTable
from antiphon.stages.step_graphs import Forward, decoding_shape, recorded_numbers
from antiphon.stages.step_packing import (
    ChainBuffer,
    PackedRows,
    Row,
    StepShape,
    chain_parts,
    first_tokens,
    layout_in,
)


@dataclass(frozen=True, slots=True)
class ChainParts:
    """What a chain is made of.

    embed: ids [R] int64 → inputs [R, hidden]. draw: as `Draw`; it records in the table what is fed next. padding: of
    columns. tiling: of the decoder.
    """

    forward: Forward
    cache: KVCache
    embed: Callable[[Tensor], Tensor]
    draw: Draw
    table: DrawTable
    padding: DrawColumns
    tiling: Tiling


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """A chain's numbers on the device. heads: [num_steps, head]. draws: of each step, as `Draw` takes them."""

    heads: Tensor
    blocks: Tensor
    draws: tuple[tuple[Tensor, Tensor], ...]


class ChainGraphs:
    """Runs chains of `num_steps`; owns the graphs, if any were captured.

    num_steps: 1 where nobody wants chains.
    """

    def __init__(self, parts: ChainParts, num_steps: int) -> None:
        self.num_steps = num_steps
        self.num_runs = NumRuns()
        self._parts = parts
        self._captured: list[_Captured] = []
        self._table_version = 0

    def capture(self, max_rows: int, max_keys: int, recorder: Recorder) -> Iterator[int]:
        """Record chains of up to so many rows, behind up to so many keys, after the table's room was reserved.

        Before the first one; on a GPU only. Yields after each how many are left.
        """
        if self.num_steps == 1:
            return
        self._table_version = self._parts.table.version
        sizes = recorded_numbers(max_rows)
        for num_done, size in enumerate(reversed(sizes), start=1):
            shape = decoding_shape(size, max_keys, self._parts.cache.block_size, self._parts.tiling)
            self._captured.insert(0, _Captured(self._parts, shape, self.num_steps, recorder))
            yield len(sizes) - num_done

    def run(self, rows: Sequence[Row], draws: Sequence[DrawColumns]) -> tuple[Download, Tensor]:
        """A chain of each row: its first token is its slot's newest draw.

        rows: R, of as many tokens as there are steps. draws: of each step, R each.
        Returns ids, [R * num_steps] int64, row after row, and states in the same order, [R * num_steps, hidden].
        """
        packed = PackedRows.of(first_tokens(rows), self._parts.tiling)
        last = packed.shape.max_keys + self.num_steps - 1
        is_there = self._parts.table.version == self._table_version
        fitting = (one for one in self._captured if is_there and one.holds(packed.shape, last))
        captured = next(fitting, None)
        self.num_runs = self.num_runs.one_more(is_replayed=captured is not None)
        if captured is not None:
            ids, states = captured.run(rows, draws)
            # Of one row the same numbers in another order would be no copy, and the next replay overwrites them.
            states = states[:, : len(rows)].transpose(0, 1).clone()
            return Download(ids[:, : len(rows)].mT.flatten()), states.flatten(0, 1)
        shape = decoding_shape(len(rows), last, self._parts.cache.block_size, self._parts.tiling)
        buffers = _Buffers(
            self._parts,
            shape,
            torch.zeros(ChainBuffer.num_bytes(shape, self.num_steps), dtype=torch.uint8),
            torch.zeros(self.num_steps * ColumnBuffer.num_bytes(self._parts.padding, len(rows)), dtype=torch.uint8),
            self.num_steps,
        )
        buffers.fill(rows, draws)
        device = self._parts.cache.keys.device
        inputs = _inputs_in(
            self._parts, shape, upload(buffers.steps, device), upload(buffers.draws, device), self.num_steps
        )
        ids, states = _chained(self._parts, shape, inputs, packed)
        return Download(ids.mT.flatten()), states.transpose(0, 1).flatten(0, 1)


class _Buffers:
    """A chain's numbers on the host. steps, draws: bytes; they are written to."""

    def __init__(self, parts: ChainParts, shape: StepShape, steps: Tensor, draws: Tensor, num_steps: int) -> None:
        self.steps = steps
        self.draws = draws
        self._chain = ChainBuffer(shape, num_steps, steps)
        self._columns = [ColumnBuffer(parts.padding, shape.num_rows, one) for one in draws.view(num_steps, -1)]

    def fill(self, rows: Sequence[Row], draws: Sequence[DrawColumns]) -> int:
        """Returns how many bytes of the steps are of any use."""
        for buffer, columns in zip(self._columns, draws, strict=True):
            buffer.fill(columns)
        return self._chain.fill(rows)


def _inputs_in(parts: ChainParts, shape: StepShape, steps: Tensor, draws: Tensor, num_steps: int) -> _Inputs:
    heads, blocks = chain_parts(steps, shape, num_steps)
    columns = (ColumnBuffer.parts(parts.padding, shape.num_rows, one) for one in draws.view(num_steps, -1))
    return _Inputs(heads, blocks, tuple(columns))


def _chained(parts: ChainParts, shape: StepShape, inputs: _Inputs, packed: PackedRows) -> tuple[Tensor, Tensor]:
    """All steps. packed: the rows' first tokens, which a CPU wants to know. Returns [K, R] and [K, R, hidden]."""
    ids, states = [], []
    for number, (head, (whole, fractions)) in enumerate(zip(inputs.heads, inputs.draws, strict=True)):
        spans = [span._replace(num_keys=span.num_keys + number) for span in packed.spans]
        step = layout_in(head, inputs.blocks, shape, spans, parts.cache.block_size)
        state = parts.forward(parts.embed(parts.table.fed_at(whole[0])), step, parts.cache)
        ids.append(parts.draw(state, whole, fractions))
        states.append(state)
    return torch.stack(ids), torch.stack(states)


class _Captured:
    """One number of rows' graph, with its buffers. A replay overwrites what the one before it gave."""

    def __init__(self, parts: ChainParts, shape: StepShape, num_steps: int, recorder: Recorder) -> None:
        device = parts.cache.keys.device
        self._shape = shape
        num_step_bytes = ChainBuffer.num_bytes(shape, num_steps)
        num_draw_bytes = num_steps * ColumnBuffer.num_bytes(parts.padding, shape.num_rows)
        self._staging = cycle([_Staged(parts, shape, num_steps) for _ in range(NUM_STAGING)])
        self._steps = torch.empty(num_step_bytes, dtype=torch.uint8, device=device)
        self._draws = torch.empty(num_draw_bytes, dtype=torch.uint8, device=device)
        nobody = DrawColumns([[] for _ in parts.padding.whole], [[] for _ in parts.padding.fractions])
        # Nothing but padding: the launches are the same, and nothing is written.
        self._upload((), [nobody] * num_steps)
        packed = PackedRows.of((), parts.tiling)
        self._replay = recorder.record(
            lambda: _chained(parts, shape, _inputs_in(parts, shape, self._steps, self._draws, num_steps), packed)
        )

    def holds(self, shape: StepShape, max_keys: int) -> bool:
        return self._shape.holds(shape) and max_keys <= self._shape.max_keys

    def run(self, rows: Sequence[Row], draws: Sequence[DrawColumns]) -> tuple[Tensor, Tensor]:
        """Ids and states of the recorded number of rows, padding behind them."""
        self._upload(rows, draws)
        return self._replay()

    def _upload(self, rows: Sequence[Row], draws: Sequence[DrawColumns]) -> None:
        staged = next(self._staging)
        staged.steps.make_free()
        staged.draws.make_free()
        num_bytes = staged.buffers.fill(rows, draws)
        staged.steps.send(self._steps, num_bytes)
        staged.draws.send(self._draws, self._draws.shape[0])


class _Staged:
    """Host buffers of a chain."""

    def __init__(self, parts: ChainParts, shape: StepShape, num_steps: int) -> None:
        self.steps = Staging(ChainBuffer.num_bytes(shape, num_steps))
        self.draws = Staging(num_steps * ColumnBuffer.num_bytes(parts.padding, shape.num_rows))
        self.buffers = _Buffers(parts, shape, self.steps.host, self.draws.host, num_steps)
