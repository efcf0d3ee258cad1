"""`rms_norm` and `add_rms_norm` in Triton: a program holds a row.

Shown, interpreted on the CPU, by tests/kernels/test_rms_norm.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.dependent_launch import await_previous, dependent

_COLUMNS_PER_WARP = 256
"""16 bytes a thread and load in bfloat16. A step of one token has one program: as many loads as it can are in flight at
once, since it waits for memory only."""
_MAX_WARPS = 16


@triton.jit
def _norm(  # noqa: PLR0913 - Triton's own types; it knows no dataclasses
    x, added, weight, total, out, x_row, added_row, eps,
    D: tl.constexpr, HAS_ADDED: tl.constexpr, BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    is_d = d < D
    value = tl.load(x + row * x_row + d, mask=is_d, other=0.0).to(tl.float32)
    if HAS_ADDED:
        value += tl.load(added + row * added_row + d, mask=is_d, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * D + d, rounded, mask=is_d)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    quotient = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    by = tl.load(weight + d, mask=is_d, other=0.0).to(tl.float32)
    tl.store(out + row * D + d, (quotient * by).to(out.dtype.element_ty), mask=is_d)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Tensors as in `op.py`."""
    return _launch(x, x, weight, eps, has_added=False)[1]


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Tensors as in `op.py`."""
    return _launch(x, added, weight, eps, has_added=True)


def _launch(x: Tensor, added: Tensor, weight: Tensor, eps: float, *, has_added: bool) -> tuple[Tensor, Tensor]:
    """The sum, which is not written and is `out` itself where nothing is added, and its norm."""
    D = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if has_added else out
    rows, added_rows = _rows(x), _rows(added)
    if rows.numel():
        block = triton.next_power_of_2(D)
        _norm[(rows.shape[0],)](
            rows, added_rows, weight, total, out, rows.stride(0), added_rows.stride(0), eps,
            D=D, HAS_ADDED=has_added, BLOCK=block, num_warps=min(max(block // _COLUMNS_PER_WARP, 1), _MAX_WARPS),
            **dependent(x),
        )  # fmt: skip
    return total, out


def _rows(x: Tensor) -> Tensor:
    """[M, D], each row in one piece."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x
    return rows if rows.stride(-1) == 1 else rows.contiguous()
