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
def own_stream(device: torch.device) -> Iterator[None]:
    """Run without gradients and, on CUDA, on a stream that nobody else uses."""
    with torch.inference_mode():
        if device.type != "cuda":
            yield
            return
        # What loading put on the default stream must be there before another stream reads it.
        torch.cuda.synchronize(device)
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]  # torch's
            yield
