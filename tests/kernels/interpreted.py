"""Kernels as Triton's interpreter runs them, in a process of its own, and as a GPU does where there is one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
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


@contextmanager
def interpreting() -> Iterator[Executor]:
    """Triton reads the variable when it is imported, and in this process others may need the compiler."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
            yield process
