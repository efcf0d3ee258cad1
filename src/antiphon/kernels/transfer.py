"""Numbers between host and device without a wait: up at once, down when somebody reads them.

On a GPU both go through pinned memory, in order with the work of the current stream; elsewhere they are plain copies.
Not an operator. Shown by tests/kernels/test_transfer.py and, on a GPU, by tests/test_cuda.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


def upload(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device; on a CPU it is the tensor itself."""
    if device.type != "cuda":
        return host.to(device)
    # The allocator of pinned memory keeps the copy's source until the copy is done.
    return host.pin_memory().to(device, non_blocking=True)


class Download:
    """A tensor on its way to the host. Nobody may write to it afterwards.

    What is read lies in ordinary memory: it goes to other threads and may be kept there, and pinned memory is neither
    for keeping nor for giving away.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._events: tuple[torch.cuda.Event, ...] = ()
        self._numbers: list[int] | None = None
        self._host = tensor.detach()
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._events = (torch.cuda.current_stream(tensor.device).record_event(),)

    @property
    def is_there(self) -> bool:
        """`read` would not wait."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]  # torch's own lack

    def read(self) -> Tensor:
        """Wait for this copy, and for nothing that was launched after it."""
        if self._events:
            for event in self._events:
                event.synchronize()
            self._host, self._events = self._host.clone(), ()
        return self._host

    def read_ids(self) -> list[int]:
        """`read` of [n] whole numbers, for many who want one of them each."""
        if self._numbers is None:
            self._numbers = self.read().tolist()
        return self._numbers


NUM_STAGING = 3
"""Host buffers of what is run again and again: the device may still be copying from the last two."""


class Staging:
    """A host buffer that is filled and copied to a GPU again and again, without a wait if the copies are few.

    host: [n] uint8, pinned.
    """

    def __init__(self, num_bytes: int) -> None:
        self.host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own lack

    def make_free(self) -> None:
        """Wait until what was sent last is on the device; before the buffer is filled."""
        self._copied.synchronize()

    def send(self, destination: Tensor, num_bytes: int) -> None:
        """Copy the first bytes, in order with the work of the current stream."""
        destination[:num_bytes].copy_(self.host[:num_bytes], non_blocking=True)
        self._copied.record()
