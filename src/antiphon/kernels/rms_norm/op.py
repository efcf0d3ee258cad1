"""Root-mean-square norm over the last dimension, alone and after a residual is added.

    total = x + added                                    rounded to x's dtype; `rms_norm` has total = x
    out   = weight · round(total / sqrt(mean(total²) + eps))   the quotient in float32, rounded to x's dtype

| tensor     | shape    | dtype    |                    |
|------------|----------|----------|--------------------|
| x          | [..., D] | floating | any strides        |
| added      | as x     | as x     | any strides        |
| weight     | [D]      | as x     | contiguous         |
| total, out | as x     | as x     | new                |

No rows are allowed. Dispatch: `kernel.py` on CUDA, the reference elsewhere; sums of squares differ in order only. Grid:
one program per row, held in registers, so that x and added are read once and total and out are written once;
2.2 us for 32 tokens of the thinker on an H200. Raises ShapeError.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.rms_norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise; tensors and errors in the module's docstring."""
    _check(x, x, weight)
    if x.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.rms_norm import kernel

        return kernel.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add and normalise: (total, out); tensors and errors in the module's docstring."""
    _check(x, added, weight)
    if x.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.rms_norm import kernel

        return kernel.add_rms_norm(x, added, weight, eps)
    return reference.add_rms_norm(x, added, weight, eps)


def _check(x: Tensor, added: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ShapeError(f"rms_norm wants a weight of shape {tuple(x.shape[-1:])}, got {tuple(weight.shape)}")
    if added.shape != x.shape:
        raise ShapeError(f"rms_norm adds tensors of one shape, got {tuple(x.shape)} and {tuple(added.shape)}")
