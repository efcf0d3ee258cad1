"""The gated activation of a SwiGLU block, spelled out."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate · sigmoid(gate) · up; the gate's part is rounded before the product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
