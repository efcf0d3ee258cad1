"""Products of some hundred rows with a small matrix, with bias and activation: for networks of many small layers.

    out = x weightᵀ + bias, or gelu of it (its tanh form)

| tensor | shape    | dtype    |                                              |
|--------|----------|----------|----------------------------------------------|
| x      | [..., K] | floating | contiguous                                   |
| weight | [N, K]   | as x     | contiguous                                   |
| bias   | [N]      | as x     |                                              |
| out    | [..., N] | as x     | new; rounded once more before the activation |

A step of the flow's estimator is a hundred such products, each of a few microseconds: how soon one begins after the
other counts, not how fast it multiplies. The library's wait until the one before has ended, and its activation is a
launch more: of one session's 112 rows, 3.4, 3.4 and 5.7 us for its queries, projection and gelu, 2.8, 2.5 and 3.6 here.
Dispatch: `kernel.py` on CUDA for half the bits, up to MAX_ROWS rows and MAX_K, the library elsewhere. No rows are
allowed. Raises ShapeError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.linear import reference
from antiphon.kernels.linear.contract import Activation

MAX_ROWS = 512
"""With more of them the library's larger tiles win."""

MAX_K = 1024
"""With more of it, which the library shares out among programs, the library wins."""


def linear(x: Tensor, weight: Tensor, bias: Tensor, activation: Activation = Activation.NONE) -> Tensor:
    """Multiply, add and activate; tensors and errors in the module's docstring."""
    if x.shape[-1:] != weight.shape[1:] or bias.shape != weight.shape[:1] or not weight.is_contiguous():
        raise ShapeError(
            f"linear wants x [..., K], a contiguous weight [N, K] and a bias [N]; got {tuple(x.shape)}, "
            f"{tuple(weight.shape)} of strides {weight.stride()} and {tuple(bias.shape)}"
        )
    if _pays_for(x):
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.linear import kernel

        return kernel.linear(x, weight, bias, activation)
    return reference.linear(x, weight, bias, activation)


def _pays_for(x: Tensor) -> bool:
    is_small = x.shape[-1] <= MAX_K and x.numel() <= MAX_ROWS * x.shape[-1]
    return x.is_cuda and x.is_contiguous() and is_small and x.dtype in (torch.bfloat16, torch.float16)
