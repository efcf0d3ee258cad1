"""The page that people read."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from antiphon.bench.report import report_lines, write_report
from antiphon.bench.results import BenchResult, Count, Figure, Limit, Quantity, Series, Unit, write_result
from antiphon.errors import ConfigError
from bench.test_results import SOMEWHERE


def result() -> BenchResult:
    figures = [
        Figure.of(quantity, case, ("sessions", size), Unit.MS, [[size * 1.0], [size * 2.0]], limits)
        for size in (1, 8)
        for quantity, case, limits in (
            (Quantity.STEP_TIME, "thinker", [Limit("copy", 0.5)]),
            (Quantity.STEP_HOST_TIME, "thinker", []),
            (Quantity.STEP_TIME, "talker", []),
        )
    ]
    series = (Series("host memory", "8 sessions", "MB", (0.0, 1.0), (5.0, 6.0)),)
    counts = (Count("sessions refused", "thinker", "sessions", 8, 0),)
    return BenchResult("step", SOMEWHERE, tuple(figures), counts, series, ("Read this first.",))


def test_the_page_says_where_it_ran_and_never_mixes_quantities() -> None:
    lines = report_lines(result())
    page = "\n".join(lines)
    for fact in ("a device", "driver 1.2", "torch 2.11", "triton 3.6", "Python 3.12", "antiphon abc", "`bench`", "now"):
        assert fact in page
    assert "Read this first." in lines
    headings = [line for line in lines if line.startswith("###")]
    assert headings == [
        "### Time of a step, until the device is done",
        "### Time of a step on the host, until all is launched",
        "### Counted",
    ]
    start, end = (lines.index(heading) for heading in headings[:2])
    assert sum("thinker" in line or "talker" in line for line in lines[start:end]) == 4


def test_a_row_has_percentiles_repetitions_spread_and_what_it_is_compared_with() -> None:
    (row,) = [line for line in report_lines(result()) if line.startswith("| thinker | 8 sessions") and "copy" in line]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells == ["thinker", "8 sessions", "ms", "8.00", "16.00", "16.00", "16.00", "2", "2", "100.0 %", cells[-1]]
    assert cells[-1] == "copy 0.50, 16.00 x"


def test_what_did_not_happen_is_told_as_well() -> None:
    assert "| thinker | 8 sessions | sessions refused | 0 |" in [
        line.replace("0  |", "0 |") for line in report_lines(result())
    ]


def test_a_report_has_a_plot_for_each_quantity_over_sizes_and_for_each_series(tmp_path: Path) -> None:
    write_result(tmp_path, result())
    page = write_report(tmp_path).read_text()
    plots = sorted(path.name for path in tmp_path.glob("*.png"))
    assert plots == ["step-host-memory.png", "step-step-host-time-sessions.png", "step-step-time-sessions.png"]
    for name in plots:
        assert f"({name})" in page
        with Image.open(tmp_path / name) as image:
            assert min(image.size) > 300


def test_what_was_measured_over_sessions_and_over_tokens_has_two_plots(tmp_path: Path) -> None:
    over = [
        Figure.of(Quantity.STEP_TIME, "thinker", (per, number), Unit.MS, [[0.001 * number**2]], [])
        for per in ("sessions", "tokens")
        for number in (1, 100)
    ]
    write_result(tmp_path, BenchResult("step", SOMEWHERE, tuple(over)))
    write_report(tmp_path)
    plots = sorted(path.name for path in tmp_path.glob("*.png"))
    assert plots == ["step-step-time-sessions.png", "step-step-time-tokens.png"]


def test_what_was_measured_at_one_size_is_drawn_side_by_side(tmp_path: Path) -> None:
    at_once = [
        Figure.of(quantity, "staggered", ("sessions", 8), unit, [[3.0, 5.0]], [Limit("late above", 4.0)])
        for quantity, unit in ((Quantity.FIRST_PCM, Unit.MS), (Quantity.LATENESS, Unit.MS), (Quantity.LOADING, Unit.S))
    ]
    write_result(tmp_path, BenchResult("duplex", SOMEWHERE, tuple(at_once)))
    assert "(duplex-ms.png)" in write_report(tmp_path).read_text()
    assert [path.name for path in tmp_path.glob("*.png")] == ["duplex-ms.png"], "of one number there is no plot"


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no result"):
        write_report(tmp_path)
