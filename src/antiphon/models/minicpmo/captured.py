"""A function of tensors in fixed places as a CUDA graph: its launches are recorded once and replayed by one call.

What changes from call to call has to be in tensors that the function reads. Which functions: here `audio_chunks.py`,
`flow_graphs.py`, `vocoder.py` and `causal_vocoder.py`, in the stages `step_graphs.py`, `draw_graphs.py` and
`chain_graphs.py`. Shown on a GPU by tests/test_cuda.py and tests/test_cuda_vocoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch.cuda import _POOL_HANDLE

from antiphon.models.minicpmo.flow_compute import Compute

ResultT = TypeVar("ResultT")
RecordedT = TypeVar("RecordedT")


@dataclass(frozen=True, slots=True)
class NumRuns:
    """How much of the work is recorded: replays, and runs launch by launch of what fits no recording."""

    num_replayed: int = 0
    num_launched: int = 0

    def one_more(self, *, is_replayed: bool) -> NumRuns:
        return NumRuns(self.num_replayed + is_replayed, self.num_launched + (not is_replayed))

    def __add__(self, other: NumRuns) -> NumRuns:
        return NumRuns(self.num_replayed + other.num_replayed, self.num_launched + other.num_launched)


class Recorder(Protocol):
    """Makes what can be run again and again of what is run once."""

    def record(self, run: Callable[[], ResultT]) -> Callable[[], ResultT]:
        """run: waits for nothing, and reads what differs from call to call from tensors in fixed places.

        What is returned does the same. Its result is the same tensors every time, which others recorded here overwrite.
        """


@dataclass(frozen=True, slots=True)
class GraphRecorder:
    """Of graphs of which only one runs at a time: they share memory, and the stream that they are recorded on.

    cuBLAS has one workspace per stream of capture, so nobody else may record on it.
    graphs: all that were recorded. They are freed by `forget`: one that goes with the garbage goes in whichever thread
    and at whichever time, and takes the stream's workspace with it.
    """

    pool: _POOL_HANDLE
    stream: torch.cuda.Stream
    graphs: list[torch.cuda.CUDAGraph]

    @staticmethod
    def on(device: torch.device, priority: int = 0) -> GraphRecorder:
        """priority: of what is recorded, as of a CUDA stream; that on which it is replayed has no say."""
        stream = torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]  # torch's own lack
        return GraphRecorder(torch.cuda.graph_pool_handle(), stream, [])

    def forget(self) -> None:
        """Free all graphs; idempotent. None of them is replayed afterwards."""
        torch.cuda.synchronize(self.stream.device)
        while self.graphs:
            self.graphs.pop().reset()

    def record(self, run: Callable[[], ResultT]) -> Callable[[], ResultT]:
        # Once as it is, so that everything is compiled and chosen.
        run()
        torch.cuda.synchronize(self.stream.device)
        graph = torch.cuda.CUDAGraph()
        # Threads of other stages may be at work.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            result = run()
        self.graphs.append(graph)

        def replay() -> ResultT:
            graph.replay()
            return result

        return replay


def smallest(recorded: Mapping[tuple[int, ...], RecordedT], num_rows: int, *kind: int) -> RecordedT | None:
    """Of what was recorded for numbers of rows and kinds, what holds so many rows of a kind; None if nothing does.

    What stands in the rows that are too many was there before, and nobody hears it.
    """
    sizes = [size for size, *own in recorded if own == [*kind] and size >= num_rows]
    return recorded[min(sizes), *kind] if sizes else None


@contextmanager
def tensor_core_products(compute: Compute) -> Iterator[None]:
    """Matrix products of float32 go to tensor cores, if `compute` says so.

    The switch is the whole process's: only for recording, before other stages compute.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or compute is Compute.TF32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def tensor_core_convolutions(compute: Compute) -> Iterator[None]:
    """The same of convolutions, also for bfloat16, of which there are none."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = compute is not Compute.FLOAT32
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextmanager
def fastest_convolutions() -> Iterator[None]:
    """Of those that cuDNN has for a shape, which takes trying all of them. As `tensor_core_products`."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
