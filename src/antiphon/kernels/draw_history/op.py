"""What a draw comes after, and what it leaves behind: one pass each, where plain torch takes a dozen.

`places` [4, R] int64 says of each draw, in any strides of its rows: its slot; how many places its history has, 1 to W;
whether the slot's newest draw was taken; whether the history begins anew, which the newest draw is no part of then.

`draw_history` changes nothing and gives, [R, W] and [R] int64, what the history holds before the draw, -1 for places
that are empty, and the slot's newest draw, taken or not. `record_draws` makes draws the newest of their slots, and what
they came after final. No slot twice, but where nobody cares what stands in it.

W and R may be any size, R also 0. Grid: one program per draw. Raises ShapeError. Dispatch: `kernel.py` on CUDA, the
reference elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.draw_history import reference
from antiphon.kernels.draw_history.contract import NewDraws, Remembered


def draw_history(remembered: Remembered, places: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors and errors in the module's docstring."""
    check(places)
    if places.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.draw_history import kernel

        return kernel.draw_history(remembered, places)
    return reference.draw_history(remembered, places)


def record_draws(remembered: Remembered, places: Tensor, drawn: NewDraws) -> None:
    """Tensors and errors in the module's docstring; `remembered` is written to."""
    check(places)
    for one in (drawn.ids, drawn.is_recorded, drawn.fed):
        if one.shape != places.shape[1:] or not one.is_contiguous():
            raise ShapeError(f"{places.shape[1]} draws are recorded by contiguous numbers each; got {tuple(one.shape)}")
    if places.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.draw_history import kernel

        kernel.record_draws(remembered, places, drawn)
    else:
        reference.record_draws(remembered, places, drawn)


def check(places: Tensor) -> None:
    """Raises: ShapeError."""
    if places.dim() != 2 or places.shape[0] != 4 or places.dtype != torch.int64 or places.stride(1) != 1:
        raise ShapeError(
            f"draws stand at int64 [4, R], each of the four contiguous; got {places.dtype} {tuple(places.shape)} with "
            f"strides {places.stride()}"
        )
