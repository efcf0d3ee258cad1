"""Attention to a history, session by session. The definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.history_attention.contract import NOBODY, Histories


def history_attention(q: Tensor, k: Tensor, v: Tensor, histories: Histories, layer: int, scale: float) -> Tensor:
    """Tensors as in `op.py`."""
    out = torch.zeros(q.shape, dtype=q.dtype)
    num_new = q.shape[1]
    for row, length in enumerate(histories.lengths.tolist()):
        if length == NOBODY:
            continue
        kv = histories.kv[row][layer]
        kv[0, :, length : length + num_new] = k[row].transpose(0, 1)
        kv[1, :, length : length + num_new] = v[row].transpose(0, 1)
        keys, values = kv[:, None, :, : length + num_new]
        attended = F.scaled_dot_product_attention(q[row : row + 1].transpose(1, 2), keys, values, scale=scale)
        out[row] = attended[0].transpose(0, 1)
    return out
