"""Devices and dtypes by their names in the settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from antiphon.config import Dtype
from antiphon.errors import ConfigError

DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """Raises: ConfigError if torch has no such device here."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Run without gradients on a device, on its default stream.

    Streams of their own would let stages overlap on one GPU. With them, four of eleven runs of several engines in one
    process aborted on an H200, perhaps because graphs of a stopped engine went with the garbage while the next one ran.
    They are freed when their engine stops now; until that was seen to help, stages in threads share the default stream.
    """
    with torch.inference_mode():
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device):
            yield
