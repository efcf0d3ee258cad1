"""Products of a few rows with a matrix, together with what stands before and behind them in a decoder's layer.

    norm_linear = normed(x) matrixᵀ
    norm_gated  = silu(gate) · up,   gate ‖ up = normed(x) matrixᵀ
    linear_add  = residual + x matrixᵀ

| tensor        | shape                      | dtype    |                                 |
|---------------|----------------------------|----------|---------------------------------|
| x             | [N, K], N at most MAX_ROWS | floating | contiguous                      |
| weight        | [K]                        | as x     | of the norm                     |
| matrix        | [M, K], gated [2 M, K]     | as x     | contiguous                      |
| residual, out | [N, M]                     | as x     | contiguous; out is new          |

Every intermediate result is rounded as where each stands alone. N = 0 is allowed. A step of one token reads all weights
and does little else: one launch for what would be two or three, and no result in between that goes through memory.
Dispatch: `kernel.py` on CUDA, the reference elsewhere. Grid: 16 columns of the result a program, which reads its rows
of the matrix once; each program norms x for itself. The 144 products of a token of the thinker took 3.8 ms on an H200,
3.7 TB/s of their matrices. Raises ShapeError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.few_rows import reference
from antiphon.kernels.few_rows.contract import MAX_ROWS


def pays_for(x: Tensor) -> bool:
    """Whether these operators are faster than norms, products and activations one after the other. x: [N, K].

    Not on a CPU; and not in float32, whose products keep the tensor cores out.
    """
    return x.is_cuda and x.shape[0] <= MAX_ROWS and x.dtype in (torch.bfloat16, torch.float16)


def norm_linear(x: Tensor, weight: Tensor, eps: float, matrix: Tensor) -> Tensor:
    """Normalise and multiply; tensors and errors in the module's docstring."""
    _check(x, matrix)
    if x.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.few_rows import kernel

        return kernel.norm_linear(x, weight, eps, matrix)
    return reference.norm_linear(x, weight, eps, matrix)


def norm_gated(x: Tensor, weight: Tensor, eps: float, matrix: Tensor) -> Tensor:
    """Normalise, multiply and activate; tensors and errors in the module's docstring."""
    _check(x, matrix)
    if matrix.shape[0] % 2:
        raise ShapeError(f"norm_gated wants a matrix of two halves, got {tuple(matrix.shape)}")
    if x.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.few_rows import kernel

        return kernel.norm_gated(x, weight, eps, matrix)
    return reference.norm_gated(x, weight, eps, matrix)


def linear_add(x: Tensor, matrix: Tensor, residual: Tensor) -> Tensor:
    """Multiply and add; tensors and errors in the module's docstring."""
    _check(x, matrix)
    if residual.shape != (x.shape[0], matrix.shape[0]) or not residual.is_contiguous():
        raise ShapeError(
            f"linear_add wants a contiguous residual {(x.shape[0], matrix.shape[0])}, got {tuple(residual.shape)}"
        )
    if x.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.few_rows import kernel

        return kernel.linear_add(x, matrix, residual)
    return reference.linear_add(x, matrix, residual)


def _check(x: Tensor, matrix: Tensor) -> None:
    if x.dim() != 2 or x.shape[0] > MAX_ROWS or x.shape[1:] != matrix.shape[1:]:
        raise ShapeError(
            f"a product of few rows wants x [N, K], N at most {MAX_ROWS}, and a matrix [M, K]; got {tuple(x.shape)}, "
            f"{tuple(matrix.shape)}"
        )
    if not x.is_contiguous() or not matrix.is_contiguous():
        raise ShapeError(f"a product of few rows wants contiguous tensors; got {x.stride()}, {matrix.stride()}")
