"""The vocoder's activation: against the formula in float64, everywhere that it runs."""

from __future__ import annotations

import pytest
import torch

from antiphon.errors import ShapeError
from antiphon.kernels.snake.op import snake
from kernels.formulas import EPS
from kernels.places import Place, Run

SHAPES = [(1, 1, 1), (2, 3, 1000), (1, 5, 2049), (3, 2, 0), (0, 2, 7)]
DIVISOR_EPS = 1e-9


def check(place: Place, shape: tuple[int, int, int], is_ragged: bool) -> None:  # noqa: FBT001 - goes to a process
    generator = torch.Generator().manual_seed(sum(shape))
    x, alpha = 3 * torch.randn(shape, generator=generator), torch.rand(shape[1], generator=generator) + 0.3
    lengths = torch.arange(shape[0]) * shape[2] // max(1, shape[0]) + 1 if is_ragged else None
    before = x.clone()
    if place is Place.REFERENCE:
        got = snake(x, alpha, eps=DIVISOR_EPS, lengths=lengths)
    else:
        from antiphon.kernels.snake import kernel

        there = None if lengths is None else lengths.to(place.device)
        got = kernel.snake(x.to(place.device), alpha.to(place.device), eps=DIVISOR_EPS, lengths=there).cpu()
    slope = alpha.double()[:, None]
    want = x.double() + (slope * x.double()).sin() ** 2 / (slope + DIVISOR_EPS)
    if lengths is not None:
        for row, length in enumerate(lengths.tolist()):
            want[row, :, length:] = 0
    # The argument is rounded, up to 20 of it, and its sine's square is divided by 0.3 at least.
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2 * 20 * EPS / 0.3)
    assert torch.equal(x, before)


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_formula(shape: tuple[int, int, int], at: Run, *, is_ragged: bool) -> None:
    at(check, shape, is_ragged)


def test_tensors_that_do_not_fit_are_refused() -> None:
    x, alpha = torch.zeros(2, 3, 4), torch.ones(3)
    with pytest.raises(ShapeError, match="float32"):
        snake(x.double(), alpha, eps=DIVISOR_EPS)
    with pytest.raises(ShapeError, match=r"\[C\]"):
        snake(x, alpha[:2], eps=DIVISOR_EPS)
    with pytest.raises(ShapeError, match="lengths"):
        snake(x, alpha, eps=DIVISOR_EPS, lengths=torch.ones(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match="contiguous"):
        snake(x.mT.contiguous().mT, alpha, eps=DIVISOR_EPS)
