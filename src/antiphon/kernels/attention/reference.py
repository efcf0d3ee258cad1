"""Dense attention, spelled out. The definition that `op.py` is tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """softmax(q kᵀ · scale + bias) v, softmax in float32. Shapes as in `op.attention`."""
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if bias is not None:
        scores = scores + bias.float()
    return torch.softmax(scores, dim=-1).to(v.dtype) @ v
