"""`antiphon bench kernels`: every operator at the sizes of the model, beside the copy of as many bytes.

The cases are in `kernel_cases.py`; here they are timed. A rival is another way to do the same, timed in the same run.
Shown by tests/bench/test_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from antiphon.bench.kernel_case import KernelCase, Launch, Sizes
from antiphon.bench.kernel_cases import kernel_cases
from antiphon.bench.results import BenchResult, Count, Figure, Limit, Quantity, Summary, Unit
from antiphon.bench.target import Target
from antiphon.bench.timing import COPY_BYTES, copy_bytes_per_s, operator_times_us

GROUP_BYTES = 2**28
"""Operators that move less are called several times in a repetition, on as many operands."""
MAX_CALLS = 16
"""In a repetition: so many are launched while the device is kept busy."""


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """only: names of operators, all if it is empty. num_repetitions: after one to warm up."""

    sizes: Sizes
    only: tuple[str, ...]
    num_repetitions: int


def run_kernels(target: Target, plan: KernelPlan) -> BenchResult:
    with torch.inference_mode():
        bandwidth = copy_bytes_per_s(target.device, plan.num_repetitions)
        cases = kernel_cases(target.source.config(), plan.sizes, target.device, target.torch_dtype)
        measured = [
            (case, figure)
            for case in cases
            if not plan.only or case.kernel in plan.only
            for figure in _figures(case, target, plan.num_repetitions, bandwidth)
        ]
    return BenchResult(
        name="kernels",
        environment=target.environment(),
        figures=tuple(figure for _, figure in measured),
        counts=(
            Count("read and written by a copy", "copy", "bytes", COPY_BYTES, bandwidth / 1e9, "GB/s"),
            *(count for case, figure in measured for count in _rates(case, figure)),
        ),
        notes=(
            "A value is the mean of one repetition's calls on operands of their own, which lie in no cache. `copy` is "
            "the time of a copy that moves as many bytes at the bandwidth measured in this run.",
        ),
    )


def _figures(case: KernelCase, target: Target, num_repetitions: int, bandwidth: float) -> Iterator[Figure]:
    limits = [Limit("copy", 1e6 * case.num_bytes / bandwidth)]
    for rival in case.rivals:
        times_us = _times_us(case, rival.make, target, num_repetitions)
        yield _figure(case, f"{rival.name} as {case.case}", times_us, ())
        limits.append(Limit(rival.name, Summary.of(times_us).p50))
    yield _figure(case, f"{case.kernel}: {case.case}", _times_us(case, case.make, target, num_repetitions), limits)


def _rates(case: KernelCase, figure: Figure) -> Iterator[Count]:
    """Of the median."""
    per_s = 1e6 / figure.summary.p50
    yield Count("moved", figure.case, case.per, case.number, case.num_bytes * per_s / 1e9, "GB/s")
    if case.num_flops:
        yield Count("computed", figure.case, case.per, case.number, case.num_flops * per_s / 1e12, "TFLOP/s")


def _figure(case: KernelCase, name: str, times_us: tuple[float, ...], limits: list[Limit] | tuple[()]) -> Figure:
    repetitions = [[one] for one in times_us]
    return Figure.of(Quantity.KERNEL_TIME, name, (case.per, case.number), Unit.US, repetitions, limits)


def _times_us(case: KernelCase, make: Callable[[], Launch], target: Target, num_repetitions: int) -> tuple[float, ...]:
    num_calls = min(MAX_CALLS, -(-GROUP_BYTES // case.num_bytes)) if target.device.type == "cuda" else 1
    times_us = operator_times_us([make() for _ in range(num_calls)], target.device, num_repetitions)
    target.forget()
    return times_us
