"""A second stream of a stage: what its steps need some time, but need not stand in line with.

Whatever is computed there, with what it remembers, is made there, and only there written: then nobody has to wait for
the stage's own stream. What goes to it is handed over. Not an operator. Shown on a GPU by tests/test_cuda.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Beside:
    """On a CPU it is nothing. What was launched before on the default stream, weights and recordings, is done first."""

    def __init__(self, device: torch.device, priority: int) -> None:
        """priority: as of a CUDA stream."""
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        if device.type == "cuda":
            stream = torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]  # torch's own lack
            stream.wait_stream(torch.cuda.default_stream(device))
            self._streams = (stream,)

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is launched within goes there. It may not read what the current stream is still writing."""
        if not self._streams:
            yield
            return
        (stream,) = self._streams
        with torch.cuda.stream(stream):
            yield

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        """The current stream waits for all that was launched there, and may use these of its tensors."""
        for stream in self._streams:
            current = torch.cuda.current_stream(stream.device)
            current.wait_stream(stream)
            for tensor in tensors:
                # Their memory is used again there, and not before this stream has done with it.
                tensor.record_stream(current)
