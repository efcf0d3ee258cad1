"""The draws of a step as CUDA graphs, one for each of some numbers of draws; elsewhere launch by launch.

From states to ids are some dozens of small launches, and the host would be what a step waits for. What differs between
draws is in columns of numbers, which are copied in one go. Shown on a GPU by tests/test_cuda.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from antiphon.kernels.transfer import NUM_STAGING, Staging, upload
from antiphon.models.minicpmo.captured import NumRuns, Recorder
from antiphon.stages.draw_table import DrawTable
from antiphon.stages.step_graphs import recorded_numbers

Draw = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(states [M, hidden], whole [K, M] int64, fractions [F, M] float32) → ids [M] int64, which the table has recorded."""


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """What M draws are made by. whole: K lists of M whole numbers. fractions: F lists of M."""

    whole: list[list[int]]
    fractions: list[list[float]]

    @property
    def num_draws(self) -> int:
        return len(self.whole[0])


def on_device(columns: DrawColumns, device: torch.device) -> tuple[Tensor, Tensor]:
    """[K, M] int64 and [F, M] float32."""
    whole = upload(torch.tensor(columns.whole, dtype=torch.int64), device)
    return whole, upload(torch.tensor(columns.fractions, dtype=torch.float32), device)


class DrawGraphs:
    """Makes draws; owns the graphs, if any were captured. A step is drawn before the next one begins."""

    def __init__(self, draw: Draw, table: DrawTable, padding: DrawColumns, dtype: torch.dtype) -> None:
        """padding: one draw that is nobody's, in the table's `NOBODY`. dtype: of states."""
        self._draw = draw
        self._dtype = dtype
        self._table = table
        self._padding = padding
        self._captured: list[_Captured] = []
        self._table_version = 0
        self.num_runs = NumRuns()

    def capture(self, max_draws: int, max_window_tokens: int, hidden_size: int, recorder: Recorder) -> Iterator[int]:
        """Record up to so many draws, before the first one; on a GPU only. Yields after each how many are left.

        max_window_tokens: of the histories; a longer one makes the table move, and the graphs useless.
        """
        self._table.reserve(2 * max_draws, max_window_tokens)
        self._table_version = self._table.version
        sizes = recorded_numbers(max_draws)
        for num_done, size in enumerate(reversed(sizes), start=1):
            states = torch.zeros((size, hidden_size), dtype=self._dtype, device=self._table.device)
            self._captured.insert(0, _Captured(self._draw, self._padding, states, recorder))
            yield len(sizes) - num_done

    def run(self, states: Tensor, columns: DrawColumns) -> Tensor:
        """states: [M, hidden]. Returns ids [M] int64, on the device, until the next call."""
        is_there = self._table.version == self._table_version
        fitting = (one for one in self._captured if is_there and columns.num_draws <= one.num_draws)
        captured = next(fitting, None)
        self.num_runs = self.num_runs.one_more(is_replayed=captured is not None)
        if captured is not None:
            return captured.run(states, columns)
        return self._draw(states, *on_device(columns, self._table.device))


class ColumnBuffer:
    """The columns of a number of draws as bytes of the host: whole numbers, then fractions."""

    def __init__(self, padding: DrawColumns, num_draws: int, host: Tensor) -> None:
        """host: [num_bytes] uint8; it is written to."""
        whole, fractions = ColumnBuffer.parts(padding, num_draws, host)
        self._whole, self._fractions = whole.numpy(), fractions.numpy()
        self._padding = np.array(padding.whole), np.array(padding.fractions)

    @staticmethod
    def num_bytes(padding: DrawColumns, num_draws: int) -> int:
        # A whole number of words, so that several buffers can stand behind each other.
        return -(-sum(_sizes(padding, num_draws)) // 8) * 8

    @staticmethod
    def parts(padding: DrawColumns, num_draws: int, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """[K, M] int64 and [F, M] float32 of a buffer, wherever it is."""
        num_whole, num_fractions = _sizes(padding, num_draws)
        whole, fractions = buffer[:num_whole], buffer[num_whole : num_whole + num_fractions]
        return (
            whole.view(torch.int64).view(len(padding.whole), -1),
            fractions.view(torch.float32).view(len(padding.fractions), -1),
        )

    def fill(self, columns: DrawColumns) -> None:
        """Write columns, and padding behind them."""
        number = columns.num_draws
        self._whole[:, :number] = columns.whole
        self._whole[:, number:] = self._padding[0]
        self._fractions[:, :number] = columns.fractions
        self._fractions[:, number:] = self._padding[1]


def _sizes(padding: DrawColumns, num_draws: int) -> tuple[int, int]:
    """In bytes, of whole numbers and fractions."""
    return 8 * len(padding.whole) * num_draws, 4 * len(padding.fractions) * num_draws


class _Captured:
    """The graph for one number of draws, and its operands."""

    def __init__(self, draw: Draw, padding: DrawColumns, states: Tensor, recorder: Recorder) -> None:
        """states: [num_draws, hidden]; written to from now on."""
        self.num_draws = states.shape[0]
        self._states = states
        num_bytes = ColumnBuffer.num_bytes(padding, self.num_draws)
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=states.device)
        self._staging = cycle([_Staged(padding, self.num_draws) for _ in range(NUM_STAGING)])
        self._upload(DrawColumns([[] for _ in padding.whole], [[] for _ in padding.fractions]))
        operands = ColumnBuffer.parts(padding, self.num_draws, self._buffer)
        self._replay = recorder.record(lambda: draw(states, *operands))

    def run(self, states: Tensor, columns: DrawColumns) -> Tensor:
        self._upload(columns)
        self._states[: states.shape[0]].copy_(states)
        return self._replay()[: states.shape[0]]

    def _upload(self, columns: DrawColumns) -> None:
        staged = next(self._staging)
        staged.staging.make_free()
        staged.columns.fill(columns)
        staged.staging.send(self._buffer, self._buffer.shape[0])


class _Staged:
    """A host buffer of a number of draws."""

    def __init__(self, padding: DrawColumns, num_draws: int) -> None:
        self.staging = Staging(ColumnBuffer.num_bytes(padding, num_draws))
        self.columns = ColumnBuffer(padding, num_draws, self.staging.host)
