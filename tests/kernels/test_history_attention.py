"""Attention to what a session remembers, against formulas in float64, in every place."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.history_attention.contract import NOBODY, Histories, HistoryShape, offset
from antiphon.kernels.history_attention.op import history_attention
from kernels.places import Place, Run, half_dtypes

LAYER = 1
RNG = torch.Generator()


@dataclass(frozen=True, slots=True)
class Case:
    """q, k, v: views of one projection, [B, T, H, D]. kv: of each session, NaN where nothing is remembered."""

    shape: HistoryShape
    q: Tensor
    k: Tensor
    v: Tensor
    kv: tuple[Tensor, ...]
    lengths: tuple[int, ...]

    @property
    def histories(self) -> Histories:
        return Histories.of(self.shape, self.kv, self.lengths)

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    def expected(self, row: int) -> Tensor:
        """[T, H, D] float64."""
        past_k, past_v = self.kv[row][LAYER, :, :, : self.lengths[row]].double()
        k, v = (
            torch.cat([past, new[row].double().transpose(0, 1)], 1)
            for past, new in ((past_k, self.k), (past_v, self.v))
        )
        scores = self.q[row].double().transpose(0, 1) @ k.mT * self.scale
        return (scores.softmax(-1) @ v).transpose(0, 1)


def case(
    lengths: tuple[int, ...],
    num_new: int = 50,
    heads: tuple[int, int] = (2, 8),
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Case:
    """heads: H, D."""
    RNG.manual_seed(num_new)
    H, D = heads
    shape = HistoryShape(3, H, max(lengths) + num_new + 3, D)
    projected = torch.randn(len(lengths), num_new, 3 * H, D, generator=RNG).to(device, dtype)
    q, k, v = torch.split(projected, H, dim=2)
    kv = []
    for length in lengths:
        own = torch.full(shape.of_tensor, torch.nan)
        own[:, :, :, : max(length, 0)] = torch.randn(own[:, :, :, : max(length, 0)].shape, generator=RNG)
        kv.append(own.to(device, dtype))
    return Case(shape, q, k, v, tuple(kv), lengths)


def run(place: Place, x: Case) -> Tensor:
    if place is Place.INTERPRETED:
        from antiphon.kernels.history_attention import kernel

        return kernel.history_attention(x.q, x.k, x.v, x.histories, LAYER, x.scale)
    return history_attention(x.q, x.k, x.v, x.histories, LAYER, x.scale)


def is_the_formula(place: Place, x: Case, tolerance: float) -> None:
    wanted = [x.expected(row) for row in range(len(x.lengths))]
    got = run(place, x)
    assert got.shape == x.q.shape
    assert got.dtype == x.q.dtype
    for row, want in enumerate(wanted):
        torch.testing.assert_close(got[row].double(), want, rtol=0, atol=tolerance)


def each_session_attends_to_its_own_past_and_to_all_that_is_new(place: Place) -> None:
    is_the_formula(place, case((0, 1, 70, 130), device=place.device), 2e-6)


def odd_sizes(place: Place) -> None:
    is_the_formula(place, case((5,), num_new=1, heads=(3, 5), device=place.device), 2e-6)
    is_the_formula(place, case((64, 0), num_new=67, heads=(1, 16), device=place.device), 2e-6)


def half_precision(place: Place) -> None:
    """Values of up to 5 are weighed with weights that are rounded, and the result is: 2 roundings."""
    for dtype in half_dtypes(place):
        is_the_formula(
            place, case((100, 3), heads=(2, 64), dtype=dtype, device=place.device), 2 * 5 * torch.finfo(dtype).eps
        )


def what_is_new_is_remembered_and_nothing_else_changes(place: Place) -> None:
    x = case((0, 9), num_new=20, device=place.device)
    before = [kv.clone() for kv in x.kv]
    run(place, x)
    for row, length in enumerate(x.lengths):
        before[row][LAYER, 0, :, length : length + 20] = x.k[row].transpose(0, 1)
        before[row][LAYER, 1, :, length : length + 20] = x.v[row].transpose(0, 1)
        assert torch.equal(x.kv[row].nan_to_num(7), before[row].nan_to_num(7))


def a_row_that_is_nobodys_reads_and_writes_nothing(place: Place) -> None:
    x = case((NOBODY, 9), device=place.device)
    histories = x.histories
    # Where nobody is, nothing may be looked at.
    histories.offsets[0] = 2**60
    before, want = x.kv[0].clone(), x.expected(1)
    if place is Place.INTERPRETED:
        from antiphon.kernels.history_attention import kernel

        got = kernel.history_attention(x.q, x.k, x.v, histories, LAYER, x.scale)
    else:
        got = history_attention(x.q, x.k, x.v, histories, LAYER, x.scale)
    assert torch.equal(x.kv[0].nan_to_num(7), before.nan_to_num(7))
    torch.testing.assert_close(got[1].double(), want, rtol=0, atol=2e-6)


def test_each_session_attends_to_its_own_past_and_to_all_that_is_new(at: Run) -> None:
    at(each_session_attends_to_its_own_past_and_to_all_that_is_new)


def test_odd_sizes(at: Run) -> None:
    at(odd_sizes)


def test_half_precision(at_kernel: Run) -> None:
    at_kernel(half_precision)


def test_what_is_new_is_remembered_and_nothing_else_changes(at: Run) -> None:
    at(what_is_new_is_remembered_and_nothing_else_changes)


def test_a_row_that_is_nobodys_reads_and_writes_nothing(at: Run) -> None:
    at(a_row_that_is_nobodys_reads_and_writes_nothing)


def test_no_rows_are_allowed() -> None:
    x = case((4,))
    none = torch.empty(0, dtype=torch.int64)
    histories = replace(x.histories, kv=(), offsets=none, lengths=none)
    assert history_attention(x.q[:0], x.k[:0], x.v[:0], histories, LAYER, 1.0).shape == (0, 50, 2, 8)


def test_tensors_that_do_not_fit_are_refused() -> None:
    x = case((4, 5))
    with pytest.raises(ShapeError, match="wants q, k, v"):
        history_attention(x.q[:1], x.k, x.v, x.histories, LAYER, 1.0)
    with pytest.raises(ShapeError, match="a layer"):
        history_attention(x.q, x.k, x.v, x.histories, 3, 1.0)
    with pytest.raises(ShapeError, match="side by side"):
        history_attention(x.q.mT.contiguous().mT, x.k, x.v, x.histories, LAYER, 1.0)
    with pytest.raises(ShapeError, match="a history is"):
        offset(x.shape, x.q, x.kv[0].half())
