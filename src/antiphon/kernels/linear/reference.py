"""A product, its bias and its activation, by the library."""

from __future__ import annotations

from typing import assert_never

import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.linear.contract import Activation


def linear(x: Tensor, weight: Tensor, bias: Tensor, activation: Activation) -> Tensor:
    """Shapes and meaning as in `op.linear`."""
    product = F.linear(x, weight, bias)
    match activation:
        case Activation.NONE:
            return product
        case Activation.GELU:
            return F.gelu(product, approximate="tanh")
        case never:
            assert_never(never)
