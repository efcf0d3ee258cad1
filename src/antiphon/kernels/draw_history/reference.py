"""The definition of `draw_history` and `record_draws`."""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels.draw_history.contract import NewDraws, Remembered


def draw_history(remembered: Remembered, places: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors as in `op.py`."""
    ring, num_recorded, last = _after_newest(remembered, places)
    is_empty = torch.arange(ring.shape[1], device=ring.device) >= num_recorded.minimum(places[1])[:, None]
    return ring.masked_fill(is_empty, -1), last


def record_draws(remembered: Remembered, places: Tensor, drawn: NewDraws) -> None:
    """Tensors as in `op.py`."""
    slots = places[0]
    ring, num_recorded, _ = _after_newest(remembered, places)
    remembered.ring[slots] = ring
    remembered.num_recorded[slots] = num_recorded
    remembered.last[slots] = drawn.ids
    remembered.fed[slots] = drawn.fed
    remembered.is_recorded[slots] = drawn.is_recorded


def _after_newest(remembered: Remembered, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rings and numbers with what was taken, and the newest draws: [R, W], [R], [R]."""
    slots, windows, is_taken, is_anew = places
    last = remembered.last[slots]
    is_new = is_taken.bool() & remembered.is_recorded[slots]
    num_before = remembered.num_recorded[slots].masked_fill(is_anew.bool(), 0)
    ring, at = remembered.ring[slots], (num_before % windows)[:, None]
    ring = ring.scatter(1, at, torch.where(is_new[:, None], last[:, None], ring.gather(1, at)))
    return ring, num_before + is_new, last
