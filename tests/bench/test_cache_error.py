"""What float8 costs in precision, measured at tiny size: a little, and not more with every slide."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch

from antiphon.bench.cache_error import CachePlan, cache_errors, run_cache
from antiphon.bench.results import Quantity
from antiphon.bench.target import RANDOM, target
from antiphon.config import Dtype
from antiphon.models.minicpmo.model import Section
from antiphon.models.minicpmo.source import ModelSize

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")),
]
PLAN = CachePlan(context_tokens=240, unit_tokens=20, num_slides=12)


@pytest.mark.parametrize("device", DEVICES)
def test_slides_add_nothing_to_what_float8_costs(device: str) -> None:
    on = target(RANDOM, ModelSize.TINY, device, Dtype.FLOAT32)
    network = on.source.load(Section.THINKER, on.device, on.torch_dtype).thinker
    with torch.inference_mode():
        errors = list(cache_errors(network, on.source.tokenizer(), PLAN))
    assert [error.num_slides for error in errors] == sorted(error.num_slides for error in errors)
    assert {error.num_slides for error in errors} == set(range(PLAN.num_slides + 1))
    # A key and a value are off by a sixteenth at worst, and what a state gets of them by less: it is of many.
    assert all(0.002 < error.relative_error < 2 / 16 for error in errors)
    assert all(0 < error.divergence_nats < 0.01 and error.same_tokens > 0.7 for error in errors)
    early, late = (
        fmean(error.relative_error for error in errors if error.num_slides in which)
        for which in (range(1, 5), range(9, 13))
    )
    assert late < 1.2 * early


def test_errors_are_told_by_the_number_of_slides_before_them() -> None:
    on = target(RANDOM, ModelSize.TINY, "cpu", Dtype.FLOAT32)
    result = run_cache(on, CachePlan(context_tokens=100, unit_tokens=10, num_slides=1))
    told = [(figure.quantity, figure.number) for figure in result.figures]
    quantities = (Quantity.STATE_ERROR, Quantity.STATE_TO_ERROR, Quantity.SAME_TOKENS, Quantity.DIVERGENCE)
    assert told == [(quantity, number) for number in (0, 1) for quantity in quantities]
    # A prompt of 25 tokens; 100 are passed by the eighth unit, and five units bring 75 that stay back over it.
    assert [figure.summary.num for figure in result.figures[::4]] == [8, 3]
