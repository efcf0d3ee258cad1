"""Who runs a kernel: Triton's interpreter, in the process of the fixture `interpreter`, and a GPU if there is one."""

from __future__ import annotations

from enum import Enum

import pytest
import torch


class Runner(Enum):
    INTERPRETER = "interpreter"
    GPU = "cuda"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self is Runner.INTERPRETER else "cuda")


def runners() -> list[object]:
    """Parameters of a test that shows what a kernel computes."""
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
    return [Runner.INTERPRETER, pytest.param(Runner.GPU, marks=no_gpu)]
