"""`silu_mul` in Triton: a program for a piece of a row.

Shown, interpreted on the CPU, by tests/kernels/test_silu_mul.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.dependent_launch import await_previous, dependent

_COLUMNS = 1024
"""Of a program of four warps: 16 bytes a thread and load in bfloat16. A token of the thinker is 12 programs."""


@triton.jit
def _activate(gate_up, out, row_stride, F: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < F
    gate = tl.load(gate_up + row * row_stride + column, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + F + column, mask=is_there, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * F + column, (active * up).to(out.dtype.element_ty), mask=is_there)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Tensors as in `op.py`."""
    num_rows, F = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, F), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _activate[(num_rows, triton.cdiv(F, _COLUMNS))](
            gate_up, out, gate_up.stride(0), F=F, BLOCK=_COLUMNS, num_warps=4, **dependent(gate_up)
        )
    return out
