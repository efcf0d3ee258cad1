"""Slides measured at tiny sizes."""

from __future__ import annotations

from antiphon.bench.results import Limit, Quantity
from antiphon.bench.slide import SlidePlans, run_slide
from antiphon.bench.target import RANDOM, target
from antiphon.config import Dtype
from antiphon.models.minicpmo.source import ModelSize


def test_all_three_ways_are_timed_at_every_length() -> None:
    on = target(RANDOM, ModelSize.TINY, "cpu", Dtype.FLOAT32)
    result = run_slide(on, SlidePlans((100, 200), num_slides=5, num_repetitions=2, num_reprefills=1))
    found = [(figure.quantity, figure.case, figure.number, figure.summary.num) for figure in result.figures]
    assert found == [
        (quantity, case, size, num)
        for size in (100, 200)
        for quantity, case, num in (
            (Quantity.SLIDE_HOST_TIME, "rotate_query", 10),
            (Quantity.SLIDE_HOST_TIME, "rotate_keys", 10),
            (Quantity.SLIDE_TIME, "rotate_keys", 10),
            (Quantity.KERNEL_TIME, "copy", 5),
            (Quantity.KERNEL_TIME, "rotate_keys", 5),
            (Quantity.SLIDE_TIME, "reprefill", 1),
        )
    ]
    copies = {figure.number: figure.summary.p50 for figure in result.figures if figure.case == "copy"}
    beside = {figure.number: figure.limits[0] for figure in result.figures if figure.limits}
    assert beside == {number: Limit("copy", copies[number]) for number in (100, 200)}
