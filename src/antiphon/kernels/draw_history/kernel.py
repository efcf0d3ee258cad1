"""`draw_history` and `record_draws` in Triton: a program for each draw.

Shown, interpreted on the CPU and on a GPU, by tests/kernels/test_draw_history.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.dependent_launch import await_previous, dependent
from antiphon.kernels.draw_history.contract import NewDraws, Remembered


@triton.jit
def _newest(places, step, last, is_recorded, num_recorded):
    """Of this program's draw: slot, window, the slot's newest draw, whether it is taken in, how many came before it."""
    draw = tl.program_id(0)
    slot = tl.load(places + draw)
    window = tl.load(places + step + draw)
    is_new = (tl.load(places + 2 * step + draw) != 0) & (tl.load(is_recorded + slot) != 0)
    num_before = tl.where(tl.load(places + 3 * step + draw) != 0, 0, tl.load(num_recorded + slot))
    return slot, window, tl.load(last + slot), is_new, num_before


@triton.jit
def _look(  # noqa: PLR0913 - Triton's own types; it knows no dataclasses
    places, last, is_recorded, num_recorded, ring, history, newest, step,
    W: tl.constexpr, BLOCK_W: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    draw = tl.program_id(0)
    slot, window, newest_id, is_new, num_before = _newest(places, step, last, is_recorded, num_recorded)
    place = tl.arange(0, BLOCK_W)
    is_there = place < W
    held = tl.load(ring + slot * W + place, mask=is_there, other=0)
    held = tl.where((place == num_before % window) & is_new, newest_id, held)
    num_held = tl.minimum(num_before + is_new.to(tl.int64), window)
    tl.store(history + draw * W + place, tl.where(place < num_held, held, -1), mask=is_there)
    tl.store(newest + draw, newest_id)


@triton.jit
def _record(  # noqa: PLR0913 - as above
    places, last, fed, is_recorded, num_recorded, ring, ids, are_recorded, ids_fed, step,
    W: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    draw = tl.program_id(0)
    slot, window, newest_id, is_new, num_before = _newest(places, step, last, is_recorded, num_recorded)
    tl.store(ring + slot * W + num_before % window, newest_id, mask=is_new)
    tl.store(num_recorded + slot, num_before + is_new.to(tl.int64))
    tl.store(last + slot, tl.load(ids + draw))
    tl.store(fed + slot, tl.load(ids_fed + draw))
    tl.store(is_recorded + slot, tl.load(are_recorded + draw))


def draw_history(remembered: Remembered, places: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors as in `op.py`."""
    R, W = places.shape[1], remembered.ring.shape[1]
    history = torch.empty((R, W), dtype=torch.int64, device=places.device)
    newest = torch.empty(R, dtype=torch.int64, device=places.device)
    if R:
        _look[(R,)](
            places, remembered.last, remembered.is_recorded, remembered.num_recorded, remembered.ring, history, newest,
            places.stride(0), W=W, BLOCK_W=triton.next_power_of_2(W), num_warps=1, **dependent(places),
        )  # fmt: skip
    return history, newest


def record_draws(remembered: Remembered, places: Tensor, drawn: NewDraws) -> None:
    """Tensors as in `op.py`."""
    if places.shape[1]:
        _record[(places.shape[1],)](
            places, remembered.last, remembered.fed, remembered.is_recorded, remembered.num_recorded, remembered.ring,
            drawn.ids, drawn.is_recorded, drawn.fed, places.stride(0), W=remembered.ring.shape[1], num_warps=1,
            **dependent(places),
        )  # fmt: skip
