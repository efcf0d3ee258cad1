"""`linear` in Triton: a program for a tile of the result.

Shown, interpreted on the CPU, by tests/kernels/test_linear.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.dependent_launch import await_previous, dependent
from antiphon.kernels.linear.contract import Activation

_SQRT_2_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
"""Of gelu's tanh form."""

_FEW_ROWS = 128
"""Two sides of the flow's guidance have 112: with more of them larger tiles read less twice."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """What a program works on: rows and columns of the result, and how much of K at once."""

    rows: int
    columns: int
    block_k: int
    num_warps: int
    num_stages: int

    @staticmethod
    def of(num_rows: int) -> _Tile:
        """Found by trying on an H200."""
        return _Tile(64, 32, 128, 4, 3) if num_rows <= _FEW_ROWS else _Tile(64, 64, 64, 4, 4)


@triton.jit(do_not_specialize=["num_rows"])
def _linear(  # noqa: PLR0913 - Triton's own types; it knows no dataclasses
    x, weight, bias, out, num_rows,
    K: tl.constexpr, N: tl.constexpr, HAS_GELU: tl.constexpr, SQRT_2_PI: tl.constexpr, CUBIC: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < num_rows, column < N
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_k = k < K
        left = tl.load(x + row.to(tl.int64)[:, None] * K + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
        right = tl.load(weight + column[:, None] * K + k[None, :], mask=is_column[:, None] & is_k[None, :], other=0.0)
        result = tl.dot(left, tl.trans(right), result, input_precision="ieee")
    result += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    dtype = out.dtype.element_ty
    if HAS_GELU:
        rounded = result.to(dtype).to(tl.float32)
        bent = SQRT_2_PI * (rounded + CUBIC * rounded * rounded * rounded)
        # (1 + tanh(z)) / 2 = 1 - 1 / (e^(2 z) + 1), which no large z makes other than 0 or 1.
        result = rounded * (1.0 - 1.0 / (tl.exp(2.0 * bent) + 1.0))
    there = row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out + there, result.to(dtype), mask=is_row[:, None] & is_column[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor, activation: Activation) -> Tensor:
    """Tensors as in `op.py`."""
    N, K = weight.shape
    out = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    num_rows = out.numel() // N
    if num_rows:
        tile = _Tile.of(num_rows)
        _linear[(triton.cdiv(num_rows, tile.rows), triton.cdiv(N, tile.columns))](
            x, weight, bias, out, num_rows,
            K=K, N=N, HAS_GELU=activation is Activation.GELU, SQRT_2_PI=_SQRT_2_PI, CUBIC=_CUBIC,
            ROWS=tile.rows, COLUMNS=tile.columns, BLOCK_K=tile.block_k,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **dependent(x),
        )  # fmt: skip
    return out
