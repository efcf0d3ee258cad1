"""Devices and dtypes by their names in the settings, and how stages share a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch

from antiphon.config import Dtype
from antiphon.errors import ConfigError

DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


class Precedence(Enum):
    """Whose work a device begins first when several stages have some; a CUDA stream's priority."""

    USUAL = 0
    FIRST = -1
    """Of stages of many small launches. They take little of a device, but between the large ones of another stage each
    of them would wait for a multiprocessor."""


def resolve_device(name: str) -> torch.device:
    """Raises: ConfigError if torch has no such device here."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


@contextmanager
def on_device(device: torch.device, precedence: Precedence) -> Iterator[None]:
    """Run without gradients on a device, on a stream of one's own, so that stages on one GPU overlap.

    What was launched before on the default stream, weights and recordings, is done first; what is launched here is done
    at the end, so that whoever comes afterwards finds memory that nobody uses.
    """
    with torch.inference_mode():
        if device.type != "cuda":
            yield
            return
        # What is left for the host is small, and to share it among its cores costs more than it saves. The number is
        # this thread's own.
        torch.set_num_threads(1)
        stream = torch.cuda.Stream(device, precedence.value)  # type: ignore[no-untyped-call]  # torch's own lack
        stream.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()
