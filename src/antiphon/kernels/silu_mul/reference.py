"""The gated activation of a SwiGLU block, spelled out."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate · sigmoid(gate) · up."""
    return F.silu(gate) * up
