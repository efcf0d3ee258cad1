"""Products of few rows in Triton: a program holds some columns of the result for all rows.

Shown, interpreted on the CPU, by tests/kernels/test_few_rows.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.dependent_launch import await_previous, dependent
from antiphon.kernels.few_rows.contract import MAX_ROWS

_COLUMNS = 16
"""Of a program. The thinker's products are then 256 to 768 programs, which are on their 132 SMs at once and nearly
evenly; the talker's smallest is 48."""
_BLOCK_K = 256
_NUM_STAGES = 4
"""8 KB of the matrix a stage: a program has 24 KB in flight while it works, and 4.3 TB/s with 0.7 us of latency need 23
on an SM."""
_NUM_WARPS = 2
"""Each of them reads the whole tile of the matrix from shared memory, which has six times the bandwidth that an SM gets
of the memory's."""


_MAX_DEPENDENT_BYTES = 1 << 24
"""Of a matrix whose product is launched while the kernel before it runs. All of the talker's are smaller. The thinker's
keep the memory busy for long, and evenly spread: where programs that wait had taken the room that others left, its four
products of a layer took 133 us instead of 105."""


@triton.jit(do_not_specialize=["num_rows"])
def _product(  # noqa: PLR0913 - Triton's own types; it knows no dataclasses
    x, weight, matrix, residual, out, num_rows, eps,
    K: tl.constexpr, M: tl.constexpr, HAS_NORM: tl.constexpr, IS_GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    FEW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """FEW: rows that may have to be normed. Rows that are not there cost nothing but arithmetic."""
    await_previous(IS_DEPENDENT)
    dtype = matrix.dtype.element_ty
    n = tl.arange(0, ROWS)
    is_n = n < num_rows
    m = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_m = m < M
    scale = tl.zeros((ROWS,), tl.float32)
    if HAS_NORM:
        whole = tl.arange(0, WHOLE_K)
        for row in tl.static_range(FEW):
            value = tl.load(x + row * K + whole, mask=whole < tl.where(row < num_rows, K, 0), other=0.0).to(tl.float32)
            scale = tl.where(n == row, tl.rsqrt(tl.sum(value * value, 0) / K + eps), scale)

    # Columns stand first: a product is at least 16 high, and 8 wide.
    first = tl.zeros((COLUMNS, ROWS), tl.float32)
    second = tl.zeros((COLUMNS, ROWS), tl.float32)
    at = matrix + m.to(tl.int64)[:, None] * K
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_k = k < K
        rows = tl.load(x + n[:, None] * K + k[None, :], mask=is_n[:, None] & is_k[None, :], other=0.0)
        if HAS_NORM:
            by = tl.load(weight + k, mask=is_k, other=0.0).to(tl.float32)
            quotient = (rows.to(tl.float32) * scale[:, None]).to(dtype).to(tl.float32)
            rows = (quotient * by[None, :]).to(dtype)
        is_there = is_m[:, None] & is_k[None, :]
        columns = tl.load(at + k[None, :], mask=is_there, other=0.0)
        first = tl.dot(columns, tl.trans(rows), first, input_precision="ieee")
        if IS_GATED:
            columns = tl.load(at + M * K + k[None, :], mask=is_there, other=0.0)
            second = tl.dot(columns, tl.trans(rows), second, input_precision="ieee")

    result = first.to(dtype).to(tl.float32)
    if IS_GATED:
        active = (result / (1.0 + tl.exp(-result))).to(dtype).to(tl.float32)
        result = active * second.to(dtype).to(tl.float32)
    place = n[None, :] * M + m[:, None]
    is_there = is_n[None, :] & is_m[:, None]
    if HAS_RESIDUAL:
        result += tl.load(residual + place, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + place, result.to(dtype), mask=is_there)


def norm_linear(x: Tensor, weight: Tensor, eps: float, matrix: Tensor) -> Tensor:
    """Tensors as in `op.py`."""
    out = torch.empty((x.shape[0], matrix.shape[0]), dtype=x.dtype, device=x.device)
    _launch(x, weight, matrix, out, out, eps, has_norm=True, is_gated=False)
    return out


def norm_gated(x: Tensor, weight: Tensor, eps: float, matrix: Tensor) -> Tensor:
    """Tensors as in `op.py`."""
    out = torch.empty((x.shape[0], matrix.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(x, weight, matrix, out, out, eps, has_norm=True, is_gated=True)
    return out


def linear_add(x: Tensor, matrix: Tensor, residual: Tensor) -> Tensor:
    """Tensors as in `op.py`."""
    out = torch.empty_like(residual)
    _launch(x, x, matrix, residual, out, 0.0, has_norm=False, is_gated=False)
    return out


def _launch(  # noqa: PLR0913 - the kernel's operands
    x: Tensor,
    weight: Tensor,
    matrix: Tensor,
    residual: Tensor,
    out: Tensor,
    eps: float,
    *,
    has_norm: bool,
    is_gated: bool,
) -> None:
    """residual: `out` itself where nothing is added."""
    num_rows, K = x.shape
    M = out.shape[1]
    if not num_rows:
        return
    _product[(triton.cdiv(M, _COLUMNS),)](
        x, weight, matrix, residual, out, num_rows, eps,
        K=K, M=M, HAS_NORM=has_norm, IS_GATED=is_gated, HAS_RESIDUAL=residual is not out,
        FEW=triton.next_power_of_2(num_rows) if has_norm else 1, ROWS=MAX_ROWS, COLUMNS=_COLUMNS, BLOCK_K=_BLOCK_K,
        WHOLE_K=triton.next_power_of_2(K), num_warps=_NUM_WARPS, num_stages=_NUM_STAGES,
        **dependent(x, is_wanted=matrix.nbytes <= _MAX_DEPENDENT_BYTES),
    )  # fmt: skip
