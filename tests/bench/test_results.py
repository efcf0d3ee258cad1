"""Percentiles, spread, and results as JSON."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from antiphon.bench.results import (
    BenchResult,
    Count,
    Environment,
    Figure,
    Limit,
    Quantity,
    Series,
    Summary,
    Unit,
    percentile,
    read_results,
    write_result,
)
from antiphon.errors import ConfigError

SOMEWHERE = Environment("a device", "1.2", "2.11", "13.0", "3.6", "3.12", "abc", "a model", "bfloat16", "bench", "now")


def result(name: str = "step") -> BenchResult:
    figure = Figure.of(
        Quantity.STEP_TIME, "thinker", ("sessions", 3), Unit.MS, [[1.0, 2.0], [4.0]], [Limit("copy", 0.5)]
    )
    counts = (Count("refusals", "thinker", "sessions", 3, 2, ""),)
    return BenchResult(
        name, SOMEWHERE, (figure,), counts, (Series("memory", "x", "MB", (0.0, 1.0), (5.0, 6.0)),), ("?",)
    )


def test_percentiles_are_values_that_were_observed() -> None:
    hundred = [float(value) for value in range(1, 101)]
    assert [percentile(hundred, percent) for percent in (1, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert [percentile([1.0, 2.0, 3.0], percent) for percent in (1, 33, 34, 50, 67, 99)] == [1, 1, 2, 2, 3, 3]
    assert percentile([7.0], 50) == 7


@given(st.lists(st.floats(0, 1e9), min_size=1), st.integers(1, 100))
def test_so_many_percent_are_not_above_a_percentile_and_fewer_are_below(values: list[float], percent: int) -> None:
    found = percentile(sorted(values), percent)
    assert found in values
    assert sum(value <= found for value in values) * 100 >= percent * len(values)
    assert sum(value < found for value in values) * 100 < percent * len(values)


def test_a_summary_takes_values_in_any_order() -> None:
    summary = Summary.of([3.0, 1.0, 2.0])
    assert summary == Summary(num=3, mean=2, p50=2, p90=3, p99=3, max=3)


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(AssertionError, match="nothing"):
        Summary.of([])


def test_spread_is_how_far_the_medians_of_repetitions_are_apart() -> None:
    figure = Figure.of(Quantity.STEP_TIME, "x", ("rows", 1), Unit.MS, [[9.0, 10.0, 100.0], [11.0], [12.0]])
    assert figure.repetition_p50s == (10, 11, 12)
    assert figure.spread == pytest.approx(2 / 11)
    assert figure.summary.num == 5
    assert figure.summary.max == 100
    assert Figure.of(Quantity.STEP_TIME, "x", ("rows", 1), Unit.MS, [[5.0, 6.0]]).spread == 0
    assert Figure.of(Quantity.LATENESS, "x", ("rows", 1), Unit.MS, [[0.0], [0.0]]).spread == 0


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = write_result(tmp_path / "deep" / "folder", result())
    assert path.name == "step.json"
    write_result(path.parent, result("kernels"))
    assert read_results(path.parent) == (result("kernels"), result())
    write_result(path.parent, result())
    assert len(read_results(path.parent)) == 2


def test_a_folder_without_results_or_with_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no result"):
        read_results(tmp_path)
    (tmp_path / "other.json").write_text('{"name": "x"}')
    with pytest.raises(ConfigError, match=r"other\.json is no result"):
        read_results(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_result(tmp_path / "other.json", result())
