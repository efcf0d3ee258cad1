"""Where an operator is tested: its reference on the CPU, its kernel under Triton's interpreter, and on a GPU."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from enum import Enum

import torch


class Place(Enum):
    """Checks take one first and choose the operator and the device by it."""

    REFERENCE = "reference"
    INTERPRETED = "interpreted kernel"
    GPU = "kernel on the gpu"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self is Place.GPU else "cpu")


def half_dtypes(place: Place) -> tuple[torch.dtype, ...]:
    """Of the interpreter's half types only one rounds as the hardware does."""
    return (torch.float16,) if place is Place.INTERPRETED else (torch.float16, torch.bfloat16)


def places() -> tuple[Place, ...]:
    """Those that this machine has."""
    return tuple(place for place in Place if place is not Place.GPU or torch.cuda.is_available())


Run = Callable[..., None]
"""Takes a check, a function of a test module, and its arguments after the place; they may have to be pickled."""


def run_by_name(file: str, name: str, *arguments: object) -> None:
    """Call a function of a file: other processes cannot import the modules that pytest collects."""
    runpy.run_path(file)[name](*arguments)
