"""Root-mean-square norm over the last dimension.

    out = weight · round(x / sqrt(mean(x²) + eps))       the quotient in float32, rounded to x's dtype

| tensor | shape    | dtype    |             |
|--------|----------|----------|-------------|
| x      | [..., D] | floating | any strides |
| weight | [D]      | as x     |             |
| out    | [..., D] | as x     | new         |

Dispatch: the plain torch reference on every device. Raises ShapeError.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.rms_norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise; tensors and errors in the module's docstring."""
    if weight.shape != x.shape[-1:]:
        raise ShapeError(f"rms_norm wants a weight of shape {tuple(x.shape[-1:])}, got {tuple(weight.shape)}")
    return reference.rms_norm(x, weight, eps)
