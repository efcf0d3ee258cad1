"""The definition of `frame_norm`, frame by frame as it is written."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.frame_norm.contract import TAIL_FRAMES, ConvTails, Update


def modulated(
    x: Tensor, update: Update | None, shift: Tensor, scale: Tensor, *, eps: float, dtype: torch.dtype
) -> Tensor:
    """Tensors as in `op.py`."""
    if update is not None:
        x += update.gate * update.y.float()
    return (F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift).to(dtype)


def modulated_windows(  # noqa: PLR0913 - as the operator
    x: Tensor,
    update: Update | None,
    shift: Tensor,
    scale: Tensor,
    tails: ConvTails,
    index: int,
    *,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Tensors as in `op.py`."""
    return _windows(modulated(x, update, shift, scale, eps=eps, dtype=torch.float32), tails, index).to(dtype)


def mish_windows(y: Tensor, weight: Tensor, bias: Tensor, tails: ConvTails, index: int, *, eps: float) -> Tensor:
    """Tensors as in `op.py`."""
    return _windows(F.mish(F.layer_norm(y.float(), y.shape[-1:], weight, bias, eps)), tails, index).to(y.dtype)


def _windows(h: Tensor, tails: ConvTails, index: int) -> Tensor:
    """h: [B, T, C] float32 -> [B, T, 3C]; stores the tails after it."""
    num_frames = h.shape[1]
    seen = torch.cat((torch.cat([before[index] for before in tails.befores]), h), dim=1)
    per_session = seen.view(len(tails.befores), -1, *seen.shape[1:])
    for own, length, place in zip(per_session, tails.lengths.tolist(), tails.places.tolist(), strict=True):
        if place >= 0:
            tails.arena[place, index] = own[:, length : length + TAIL_FRAMES]
    return torch.cat([seen[:, first : first + num_frames] for first in range(TAIL_FRAMES + 1)], dim=-1)
