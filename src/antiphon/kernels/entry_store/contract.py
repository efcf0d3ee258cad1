"""The norms of queries and keys, per head; what is written where is a `Sink`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Layer norms over D. All tensors: [D] float32, contiguous."""

    eps: float
    q_weight: Tensor
    q_bias: Tensor
    k_weight: Tensor
    k_bias: Tensor
