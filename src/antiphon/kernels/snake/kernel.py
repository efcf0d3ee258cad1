"""`snake` in Triton: elementwise, a channel's slope read once per program.

Shown, interpreted on the CPU, by tests/kernels/test_snake.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_channels"])  # type: ignore[untyped-decorator]
def _snake(x, alpha, out, num_channels, n, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    channel = tl.program_id(0)
    slope = tl.load(alpha + channel % num_channels)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < n
    here = channel.to(tl.int64) * n + place
    value = tl.load(x + here, mask=is_there, other=0.0)
    wave = tl.sin(slope * value)
    tl.store(out + here, value + wave * wave / (slope + eps), mask=is_there)


def snake(x: Tensor, alpha: Tensor, *, eps: float) -> Tensor:
    """Tensors as in `op.py`."""
    B, C, n = x.shape
    out = torch.empty_like(x)
    if B * n:
        _snake[(B * C, triton.cdiv(n, _BLOCK))](x, alpha, out, C, n, eps, BLOCK=_BLOCK)
    return out
