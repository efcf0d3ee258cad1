"""Fixtures that run a check of an operator in every place that this machine has."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor

import pytest
import torch

from kernels.places import Place, Run, places, run_by_name


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Executor]:
    """A process of its own: Triton reads the variable when it is imported, and here others may need the compiler."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, and run on the GPU")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=torch.set_num_threads, initargs=(1,)) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            # It begins with its first task. This process must never see the variable.
            process.submit(torch.get_num_threads).result()
        yield process


@pytest.fixture(params=places(), ids=lambda place: place.value)
def at(request: pytest.FixtureRequest) -> Run:
    """Runs `check(place, *arguments)` where the place is."""
    return runner(request)


@pytest.fixture(params=[place for place in places() if place is not Place.REFERENCE], ids=lambda place: place.value)
def at_kernel(request: pytest.FixtureRequest) -> Run:
    """The same for checks that compare a kernel with its reference."""
    return runner(request)


def runner(request: pytest.FixtureRequest) -> Run:
    place: Place = request.param
    if place is not Place.INTERPRETED:
        return lambda check, *arguments: check(place, *arguments)
    process: Executor = request.getfixturevalue("interpreter")

    def run(check: Callable[..., None], *arguments: object) -> None:
        process.submit(run_by_name, inspect.getfile(check), check.__name__, place, *arguments).result()

    return run
