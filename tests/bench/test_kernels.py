"""The cases of all operators, at tiny sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import antiphon.kernels
from antiphon.bench.decoder_kernels import layout
from antiphon.bench.kernel_case import KernelCase, Sizes
from antiphon.bench.kernel_cases import kernel_cases
from antiphon.bench.kernels import KernelPlan, run_kernels
from antiphon.bench.results import Quantity
from antiphon.bench.target import RANDOM, target
from antiphon.config import Dtype
from antiphon.core.cache_dtype import CacheDtype
from antiphon.models.minicpmo.source import ModelSize
from build import CPU

SIZES = Sizes(num_sessions=(1, 3), context_tokens=70, step_tokens=8, cached_frames=30)
TINY = target(RANDOM, ModelSize.TINY, "cpu", Dtype.FLOAT32)


def cases() -> tuple[KernelCase, ...]:
    return kernel_cases(TINY.source.config(), SIZES, CPU, torch.float32)


def test_every_operator_has_a_case() -> None:
    folders = {path.parent.name for path in Path(antiphon.kernels.__file__).parent.glob("*/op.py")}
    assert {case.kernel for case in cases()} == folders


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.kernel} {case.case} {case.number}")
def test_a_case_runs_on_operands_of_its_own(case: KernelCase) -> None:
    assert case.num_bytes > 0
    with torch.inference_mode():
        for make in (case.make, *(rival.make for rival in case.rivals)):
            first, second = make(), make()
            result = first()
            second()
            assert not isinstance(result, torch.Tensor) or bool(torch.isfinite(result.float()).all())


def test_a_context_in_the_cache_is_as_long_as_was_asked_and_its_newest_tokens_are_the_step() -> None:
    step, cache = layout(TINY.source.config().thinker.decoder, (5, 1, 5), 70, CPU, torch.float32, CacheDtype.MODEL)
    assert cache.keys.shape[0] == 1
    assert [row.num_keys for row in step.rows] == [70, 70, 70]
    assert [(row.token_start, row.token_end) for row in step.rows] == [(0, 5), (5, 6), (6, 11)]
    assert step.positions.tolist() == [65, 66, 67, 68, 69, 69, 65, 66, 67, 68, 69]
    assert all(0 < row.num_anchor_keys < row.num_keys for row in step.rows)


def test_operators_are_timed_beside_a_copy_and_their_rivals() -> None:
    result = run_kernels(TINY, KernelPlan(SIZES, ("paged_attention", "rms_norm"), num_repetitions=2))
    assert {figure.quantity for figure in result.figures} == {Quantity.KERNEL_TIME}
    assert all(figure.summary.num == 2 for figure in result.figures)
    names = [figure.case.partition(":")[0] for figure in result.figures]
    assert set(names) == {"paged_attention", "rms_norm", "torch SDPA, contiguous as decode, 70 keys each"}
    decode = [figure for figure in result.figures if figure.case == "paged_attention: decode, 70 keys each"]
    assert [figure.number for figure in decode] == [1, 3]
    assert all([limit.name for limit in figure.limits] == ["copy", "torch SDPA, contiguous"] for figure in decode)
    assert {count.unit for count in result.counts} == {"GB/s", "TFLOP/s"}
