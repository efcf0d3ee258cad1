"""The measurements at tiny size on a GPU; skipped where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from antiphon.bench.duplex import run_duplex
from antiphon.bench.kernel_case import Sizes
from antiphon.bench.kernels import KernelPlan, run_kernels
from antiphon.bench.results import Quantity
from antiphon.bench.slide import SlidePlans, run_slide
from antiphon.bench.step import StepPlan, run_step
from antiphon.bench.target import RANDOM, Target, target
from antiphon.config import Code2WavConfig, Dtype
from antiphon.core.cache_dtype import CacheDtype
from antiphon.models.minicpmo.source import ModelSize
from bench.test_duplex import FLAGS, PLAN, counts, said

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture
def tiny() -> Target:
    return target(RANDOM, ModelSize.TINY, "cuda", Dtype.BFLOAT16)


def test_operators_are_timed_on_the_device(tiny: Target) -> None:
    result = run_kernels(tiny, KernelPlan(Sizes((1, 3), 70, 8, 30), (), num_repetitions=3))
    assert all(figure.summary.p50 > 0 for figure in result.figures)
    assert result.environment.driver not in ("none", "unknown")


def test_a_slide_that_moves_nothing_takes_the_host_only(tiny: Target) -> None:
    result = run_slide(tiny, SlidePlans((200,), num_slides=5, num_repetitions=2, num_reprefills=1))
    assert {figure.case for figure in result.figures} == {"rotate_query", "rotate_keys", "reprefill", "copy"}


@pytest.mark.parametrize("has_graphs", [True, False])
def test_steps_have_times_on_host_and_device(tiny: Target, *, has_graphs: bool) -> None:
    plan = StepPlan((1, 3), (2,), (1, 2), 90, 40, (48,), 1.0, 3, 2, has_graphs, Code2WavConfig(), CacheDtype.MODEL)
    by_quantity = {figure.quantity: figure.summary.p50 for figure in run_step(tiny, plan).figures}
    steps = {Quantity.STEP_DEVICE_TIME, Quantity.STEP_HOST_TIME, Quantity.STEP_TIME, Quantity.STEP_IN_A_ROW_TIME}
    assert set(by_quantity) == steps


def test_callers_talk_in_real_time(tiny: Target) -> None:
    result = run_duplex(tiny, replace(FLAGS, device="cuda"), PLAN, said)
    told = counts(result, 2)
    assert told["units complete"] == 4
    assert told["units never finished"] == told["sessions refused"] == told["sessions lost"] == 0
    assert told["device memory reserved at most"] > 0
