"""The two-layer block that the vision tower and the flow's estimator have in common: linear, tanh-GELU, linear.

Official names `mlp.fc1`, `mlp.fc2` (REFERENCE 2.2, 2.7).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class GeluFeedForward(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, intermediate_size)
        self.fc2 = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden_size]. Returns the same shape."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return out
