"""Norms between the estimator's products: against float64 formulas, and the kernel, interpreted."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.frame_norm.contract import Update
from antiphon.kernels.frame_norm.op import mish_windows, modulated, modulated_windows
from kernels.frame_norm_cases import AFFINE_EPS, CASES, INDEX, MODULATED_EPS, Case, Form, interpreted, run_kernel
from kernels.runners import Runner, runners


def ran(asked: Case, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    x, arena = asked.x.clone(), asked.arena.clone()
    tails = asked.tails(arena, asked.voices)
    gate, shift, scale, weight, bias = asked.vectors
    update = Update(asked.y, gate) if form in (Form.UPDATED, Form.UPDATED_WINDOWS) else None
    match form:
        case Form.MISH:
            out = mish_windows(asked.y, weight, bias, tails, INDEX, eps=AFFINE_EPS)
        case Form.WINDOWS | Form.UPDATED_WINDOWS:
            out = modulated_windows(x, update, shift, scale, tails, INDEX, eps=MODULATED_EPS, dtype=asked.y.dtype)
        case Form.PLAIN | Form.UPDATED:
            out = modulated(x, update, shift, scale, eps=MODULATED_EPS, dtype=asked.y.dtype)
    return x, out, arena


def assert_is_the_formula(got: tuple[Tensor, ...], asked: Case, form: Form) -> None:
    for one, want in zip(got, asked.expected(form), strict=True):
        is_real = ~want.isnan()
        assert is_real.any()
        torch.testing.assert_close(one.double()[is_real], want[is_real], rtol=0, atol=asked.tolerance())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", Form)
def test_it_is_the_formula(name: str, form: Form) -> None:
    assert_is_the_formula(ran(CASES[name], form), CASES[name], form)


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", Form)
def test_the_kernel_is_the_formula(name: str, form: Form, runner: Runner, interpreter: Executor) -> None:
    match runner:
        case Runner.INTERPRETER:
            got = tuple(torch.from_numpy(one) for one in interpreter.submit(interpreted, name, form).result())
        case Runner.GPU:
            got = run_kernel(name, form, runner)
            assert got[1].dtype == CASES[name].y.dtype
    assert_is_the_formula(got, CASES[name], form)


def test_a_large_value_is_its_own_mish_and_does_not_overflow() -> None:
    asked = CASES["two frames"]
    weight, bias = torch.ones(6), torch.full((6,), 1000.0)
    out = mish_windows(asked.y, weight, bias, asked.tails(asked.arena.clone(), asked.voices), INDEX, eps=AFFINE_EPS)
    assert out.isfinite().all()
    assert out[:, :, -6:].min() > 990


def test_tensors_that_do_not_fit_are_refused() -> None:
    asked = CASES["ragged"]
    gate, shift, scale, *_ = asked.vectors
    tails = asked.tails(asked.arena, asked.voices)
    options = {"eps": MODULATED_EPS}
    with pytest.raises(ShapeError, match="float32 stream"):
        modulated(asked.x.double(), None, shift, scale, dtype=torch.float32, **options)
    with pytest.raises(ShapeError, match="contiguous"):
        modulated(asked.x.transpose(0, 1), None, shift, scale, dtype=torch.float32, **options)
    with pytest.raises(ShapeError, match="vectors of 6"):
        modulated(asked.x, None, shift[:5], scale, dtype=torch.float32, **options)
    with pytest.raises(ShapeError, match="wants an update"):
        modulated(asked.x, Update(asked.y[1:], gate), shift, scale, dtype=torch.float32, **options)
    with pytest.raises(ShapeError, match="want tails"):
        modulated_windows(asked.x[1:], None, shift, scale, tails, INDEX, dtype=torch.float32, **options)
    with pytest.raises(ShapeError, match="tails of 3 convolutions"):
        mish_windows(asked.y, shift, scale, tails, 3, eps=AFFINE_EPS)
