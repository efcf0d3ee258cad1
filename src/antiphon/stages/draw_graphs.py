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

from antiphon.kernels.transfer import upload
from antiphon.stages.draw_table import DrawTable

Draw = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(states [M, hidden], whole [K, M] int64, fractions [F, M] float32) → ids [M] int64, which the table has recorded."""

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_NUM_STAGING = 3
"""Host buffers of a size: the device may still be copying from the last two."""


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

    def __init__(self, draw: Draw, table: DrawTable, padding: DrawColumns) -> None:
        """padding: one draw that is nobody's, in the table's `NOBODY`."""
        self._draw = draw
        self._table = table
        self._padding = padding
        self._captured: list[_Captured] = []
        self._table_version = 0
        self.num_eager = 0

    def capture(self, max_draws: int, max_window_tokens: int, hidden_size: int, dtype: torch.dtype) -> Iterator[int]:
        """Record up to so many draws, before the first one; on a GPU only. Yields how many graphs are left each time.

        max_window_tokens: of the histories; a longer one makes the table move, and the graphs useless.
        """
        self._table.reserve(2 * max_draws, max_window_tokens)
        self._table_version = self._table.version
        sizes = [*(size for size in _SIZES if size < max_draws), max_draws]
        device = self._table.device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own lack
        pool = torch.cuda.graph_pool_handle()
        for number, size in enumerate(reversed(sizes), start=1):
            one = _Captured(self._padding, size, torch.zeros((size, hidden_size), dtype=dtype, device=device))
            # Launched once so that every kernel is there, then recorded.
            self._draw(*one.operands)
            torch.cuda.synchronize(device)
            with torch.cuda.graph(one.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                one.ids = self._draw(*one.operands)
            self._captured.insert(0, one)
            yield len(sizes) - number

    def run(self, states: Tensor, columns: DrawColumns) -> Tensor:
        """states: [M, hidden]. Returns ids [M] int64, on the device, until the next call."""
        number = columns.num_draws
        if self._table.version == self._table_version:
            for one in self._captured:
                if number <= one.ids.shape[0]:
                    return one.run(states, columns)
        self.num_eager += 1
        return self._draw(states, *on_device(columns, self._table.device))


class _Captured:
    """The graph for one number of draws, and its operands."""

    def __init__(self, padding: DrawColumns, size: int, states: Tensor) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.ids = torch.empty(size, dtype=torch.int64, device=states.device)
        self._states = states
        num_whole, num_fractions = len(padding.whole), len(padding.fractions)
        self._sizes = [8 * num_whole * size, 4 * num_fractions * size]
        self._buffer = torch.empty(sum(self._sizes), dtype=torch.uint8, device=states.device)
        self._staging = cycle([_Staging(padding, self._sizes) for _ in range(_NUM_STAGING)])
        self._shapes = ((num_whole, size), (num_fractions, size))
        self._upload(DrawColumns([[] for _ in padding.whole], [[] for _ in padding.fractions]))

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        whole, fractions = torch.split(self._buffer, self._sizes)
        return (
            self._states,
            whole.view(torch.int64).view(self._shapes[0]),
            fractions.view(torch.float32).view(self._shapes[1]),
        )

    def run(self, states: Tensor, columns: DrawColumns) -> Tensor:
        self._upload(columns)
        self._states[: states.shape[0]].copy_(states)
        self.graph.replay()
        return self.ids[: states.shape[0]]

    def _upload(self, columns: DrawColumns) -> None:
        staging = next(self._staging)
        staging.copied.synchronize()
        staging.fill(columns)
        self._buffer.copy_(staging.host, non_blocking=True)
        staging.copied.record()


class _Staging:
    """A host buffer. copied: what was in it last is on the device."""

    def __init__(self, padding: DrawColumns, sizes: list[int]) -> None:
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own lack
        self.host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        whole, fractions = torch.split(self.host, sizes)
        self._whole = whole.view(torch.int64).view(len(padding.whole), -1).numpy()
        self._fractions = fractions.view(torch.float32).view(len(padding.fractions), -1).numpy()
        self._padding = np.array(padding.whole), np.array(padding.fractions)

    def fill(self, columns: DrawColumns) -> None:
        number = columns.num_draws
        self._whole[:, :number] = columns.whole
        self._whole[:, number:] = self._padding[0]
        self._fractions[:, :number] = columns.fractions
        self._fractions[:, number:] = self._padding[1]
