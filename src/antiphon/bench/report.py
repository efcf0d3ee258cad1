"""A folder of results as a page that people read, with plots where matplotlib is there. Made again after every run.

The numbers are those of the JSON files, none is computed here but ratios. Shown by tests/bench/test_report.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from antiphon.bench.results import BenchResult, Count, Figure, Series, Unit, read_results
from antiphon.errors import ConfigError

REPORT_FILE = "report.md"
_WIDE = 20
"""Times that are further apart are drawn on a scale of logarithms."""
_DECIMALS = {Unit.US: 1, Unit.MS: 2, Unit.S: 2, Unit.DB: 3, Unit.PERCENT: 3, Unit.NATS: 6}


def write_report(folder: Path) -> Path:
    """Read all results of a folder and write the page and its plots beside them. Raises: ConfigError."""
    results = read_results(folder)
    has_plots = find_spec("matplotlib") is not None
    lines = ["# Measurements"]
    if not has_plots:
        lines += ["", "Without plots: matplotlib is not installed here. `antiphon bench report` draws them elsewhere."]
    try:
        for result in results:
            lines += ["", *report_lines(result)]
            if has_plots:
                lines += ["", *[f"![{path.stem}]({path.name})" for path in draw(result, folder)]]
        page = folder / REPORT_FILE
        page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report in {folder} cannot be written: {error}") from error
    return page


def report_lines(result: BenchResult) -> list[str]:
    """Markdown of one result: where it ran, then a table per quantity, then what was counted."""
    where = result.environment
    lines = [
        f"## {result.name}",
        "",
        f"`{where.command}`",
        "",
        f"{where.device}, driver {where.driver}, torch {where.torch}, CUDA {where.cuda}, triton {where.triton}, "
        f"Python {where.python}, antiphon {where.commit}; {where.model}, {where.dtype}; {where.started_at}.",
    ]
    lines += [line for note in result.notes for line in ("", note)]
    for quantity, figures in groupby(_ordered(result.figures), lambda figure: figure.quantity):
        lines += ["", f"### {quantity.value[:1].upper()}{quantity.value[1:]}", "", *_figure_table(list(figures))]
    if result.counts:
        lines += ["", "### Counted", "", *_count_table(result.counts)]
    return lines


def _ordered(figures: Sequence[Figure]) -> list[Figure]:
    """Quantities together, in order of their first figure."""
    quantities = list(dict.fromkeys(figure.quantity for figure in figures))
    return sorted(figures, key=lambda figure: quantities.index(figure.quantity))


def _figure_table(figures: Sequence[Figure]) -> Iterator[str]:
    yield "| case | size | unit | p50 | p90 | p99 | max | values | repetitions | spread | beside |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for one in figures:
        summary = one.summary
        numbers = [f"{value:.{_DECIMALS[one.unit]}f}" for value in (summary.p50, summary.p90, summary.p99, summary.max)]
        beside = "; ".join(_beside(one))
        cells = [one.case, f"{one.number} {one.per}", one.unit.value, *numbers, str(summary.num)]
        yield "| " + " | ".join([*cells, str(len(one.repetition_p50s)), f"{100 * one.spread:.1f} %", beside]) + " |"


def _beside(figure: Figure) -> Iterator[str]:
    for limit in figure.limits:
        ratio = f", {figure.summary.p50 / limit.value:.2f} x" if limit.value else ""
        yield f"{limit.name} {limit.value:.{_DECIMALS[figure.unit]}f}{ratio}"


def _count_table(counts: Sequence[Count]) -> Iterator[str]:
    yield "| case | size | what | number |"
    yield "|---|---|---|---|"
    for one in counts:
        yield f"| {one.case} | {one.number} {one.per} | {one.name} | {f'{one.value:,.6g} {one.unit}'.strip()} |"


def draw(result: BenchResult, folder: Path) -> list[Path]:
    """One plot per quantity and what it was measured over, if that was several numbers; and one per series.

    The quantities that were measured at one size are side by side, those of a unit in a plot.
    """
    paths: list[Path] = []
    at_one_size: dict[Unit, list[Figure]] = {}
    for quantity, per in dict.fromkeys((figure.quantity, figure.per) for figure in result.figures):
        figures = [figure for figure in result.figures if (figure.quantity, figure.per) == (quantity, per)]
        if len({figure.number for figure in figures}) > 1:
            path = folder / f"{result.name}-{_slug(quantity.name)}-{_slug(per)}.png"
            _draw_figures(quantity.value, figures, path)
            paths.append(path)
        else:
            at_one_size.setdefault(figures[0].unit, []).extend(figures)
    for unit, figures in at_one_size.items():
        if len(figures) > 1:
            path = folder / f"{result.name}-{_slug(unit.name)}.png"
            _draw_bars(result.name, figures, path)
            paths.append(path)
    for name in dict.fromkeys(one.name for one in result.series):
        path = folder / f"{result.name}-{_slug(name)}.png"
        _draw_series([one for one in result.series if one.name == name], path)
        paths.append(path)
    return paths


def _draw_figures(title: str, figures: Sequence[Figure], path: Path) -> None:
    # An extra of its own, so that whoever measures on a machine without it can.
    from matplotlib.figure import Figure as Sheet

    sheet = Sheet(figsize=(7, 4.5), layout="constrained")
    axes = sheet.add_subplot()
    for case in dict.fromkeys(figure.case for figure in figures):
        own = sorted((figure for figure in figures if figure.case == case), key=lambda figure: figure.number)
        sizes = [figure.number for figure in own]
        (line,) = axes.plot(sizes, [figure.summary.p50 for figure in own], marker="o", label=case)
        axes.plot(sizes, [figure.summary.p99 for figure in own], linestyle=":", color=line.get_color())
    axes.set(title=f"{title}: p50, dotted p99", xlabel=figures[0].per, ylabel=figures[0].unit.value)
    medians = [figure.summary.p50 for figure in figures]
    if max(medians) > _WIDE * min(medians) > 0:
        axes.set(xscale="log", yscale="log")
    else:
        axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    sheet.savefig(path, dpi=110)


def _draw_bars(title: str, figures: Sequence[Figure], path: Path) -> None:
    """Medians, and from there to the 99th percentile and the largest value; limits as marks."""
    from matplotlib.figure import Figure as Sheet

    sheet = Sheet(figsize=(9, 1.4 + 0.5 * len(figures)), layout="constrained")
    axes = sheet.add_subplot()
    rows = range(len(figures))
    axes.barh(rows, [one.summary.p50 for one in figures], height=0.6, label="p50")
    axes.hlines(rows, *zip(*((one.summary.p50, one.summary.p99) for one in figures), strict=True), color="black")
    axes.plot([one.summary.p99 for one in figures], rows, "k|", markersize=12, label="p99")
    axes.plot([one.summary.max for one in figures], rows, "k.", label="max")
    limits = [(limit.value, row) for row, one in enumerate(figures) for limit in one.limits]
    if limits:
        axes.plot(*zip(*limits, strict=True), "r|", markersize=18, label="limit")
    sizes = [f"{one.quantity.value}\n{one.case}, {one.number} {one.per}" for one in figures]
    axes.set_yticks(rows, sizes, fontsize="small")
    axes.invert_yaxis()
    axes.set(title=title, xlabel=figures[0].unit.value)
    axes.set_xlim(left=0)
    axes.legend(loc="lower right", fontsize="small")
    sheet.savefig(path, dpi=110)


def _draw_series(series: Sequence[Series], path: Path) -> None:
    from matplotlib.figure import Figure as Sheet

    sheet = Sheet(figsize=(7, 4), layout="constrained")
    axes = sheet.add_subplot()
    for one in series:
        axes.plot(one.times_s, one.values, label=one.case)
    axes.set(title=series[0].name, xlabel="s", ylabel=series[0].unit)
    axes.legend(fontsize="small")
    sheet.savefig(path, dpi=110)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())
