"""How long device and host take for something, each by itself.

Times on a GPU are between events; for operators that are shorter than their launch, behind a kernel that keeps the
device busy until all is launched. On a CPU everything is wall time. Shown by tests/bench/test_timing.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_SPIN_CYCLES = 20_000_000
"""About 10 ms: time to launch hundreds of kernels."""
_FLUSHED_BYTES = 2**28
"""More than any cache holds: after so much was written, nothing else is in it."""
_NUM_IN_A_ROW = 8
"""So many that the first one's launch, for which the device waits, counts little."""
COPY_BYTES = 2**30
"""Read, and as many written, by the copy that bandwidth is measured with; on a CPU a sixteenth."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Of one step, from an idle device on. host_ms: until everything is launched. device_ms: between first and last.

    whole_ms: until the device is done.
    """

    host_ms: float
    device_ms: float
    whole_ms: float


def timed(step: Callable[[], object], device: torch.device) -> StepTime:
    """Run a step once."""
    if device.type != "cuda":
        started_s = time.perf_counter()
        step()
        took_ms = 1000 * (time.perf_counter() - started_s)
        return StepTime(took_ms, took_ms, took_ms)
    start, end = _event(), _event()
    torch.cuda.synchronize(device)
    start.record()
    started_s = time.perf_counter()
    step()
    launched_s = time.perf_counter()
    end.record()
    torch.cuda.synchronize(device)
    done_s = time.perf_counter()
    return StepTime(1000 * (launched_s - started_s), start.elapsed_time(end), 1000 * (done_s - started_s))


def in_a_row_ms(step: Callable[[], object], device: torch.device) -> float:
    """Of one of several steps, each launched as soon as the host can: on a GPU while the one before is under way."""

    def run() -> None:
        for _ in range(_NUM_IN_A_ROW):
            step()

    return timed(run, device).whole_ms / _NUM_IN_A_ROW


def operator_times_us(
    calls: Sequence[Callable[[], object]], device: torch.device, num_repetitions: int
) -> tuple[float, ...]:
    """Time of one call, once per repetition, in which all calls run one after the other.

    calls: the same work, each on operands of its own; on a GPU none of them is in a cache when a repetition begins.
    """
    for call in calls:
        call()
    if device.type == "cuda":
        flush = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)
        return tuple(_group_on_gpu_us(calls, device, flush) / len(calls) for _ in range(num_repetitions))
    return tuple(_group_us(calls) / len(calls) for _ in range(num_repetitions))


def _group_us(calls: Sequence[Callable[[], object]]) -> float:
    started_s = time.perf_counter()
    for call in calls:
        call()
    return 1e6 * (time.perf_counter() - started_s)


def _group_on_gpu_us(calls: Sequence[Callable[[], object]], device: torch.device, flush: torch.Tensor) -> float:
    start, end = _event(), _event()
    flush.zero_()
    torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001 - nothing public spins so long
    start.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize(device)
    return 1000 * start.elapsed_time(end)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own lack


def copy_bytes_per_s(device: torch.device, num_repetitions: int) -> float:
    """What a copy in the device's memory reads and writes in a second: the median of the repetitions."""
    num_bytes = COPY_BYTES if device.type == "cuda" else COPY_BYTES // 16
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    times_us = sorted(operator_times_us([lambda: to.copy_(source)], device, num_repetitions))
    return 2 * num_bytes / (times_us[len(times_us) // 2] / 1e6)
