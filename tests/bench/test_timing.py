"""Times of host and device."""

from __future__ import annotations

from antiphon.bench.timing import copy_bytes_per_s, in_a_row_ms, operator_times_us, timed
from build import CPU


def test_a_step_runs_once_and_its_host_is_its_device_on_a_cpu() -> None:
    ran: list[int] = []
    time = timed(lambda: ran.append(1), CPU)
    assert ran == [1]
    assert time.host_ms == time.device_ms == time.whole_ms > 0


def test_of_steps_that_follow_one_another_a_part_is_told() -> None:
    ran: list[int] = []
    assert in_a_row_ms(lambda: ran.append(1), CPU) > 0
    assert len(ran) > 1


def test_an_operator_runs_on_all_its_operands_once_to_warm_up_and_once_per_repetition() -> None:
    ran: list[str] = []
    times = operator_times_us([lambda: ran.append("a"), lambda: ran.append("b")], CPU, 3)
    assert ran == 4 * ["a", "b"]
    assert len(times) == 3
    assert all(time > 0 for time in times)


def test_a_copy_moves_something() -> None:
    assert copy_bytes_per_s(CPU, 2) > 1e6
