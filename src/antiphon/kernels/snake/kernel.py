"""`snake` in Triton: elementwise, a channel's slope read once per program.

Shown, interpreted on the CPU, by tests/kernels/test_snake.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.dependent_launch import await_previous, dependent

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_channels"])
def _snake(  # noqa: PLR0913 - Triton's own types; it knows no dataclasses
    x, alpha, lengths, out, num_channels, n, eps,
    HAS_LENGTHS: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    channel = tl.program_id(0)
    slope = tl.load(alpha + channel % num_channels)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < n
    here = channel.to(tl.int64) * n + place
    value = tl.load(x + here, mask=is_there, other=0.0)
    wave = tl.sin(slope * value)
    result = value + wave * wave / (slope + eps)
    if HAS_LENGTHS:
        result = tl.where(place < tl.load(lengths + channel // num_channels), result, 0.0)
    tl.store(out + here, result, mask=is_there)


def snake(x: Tensor, alpha: Tensor, *, eps: float, lengths: Tensor | None) -> Tensor:
    """Tensors as in `op.py`."""
    B, C, n = x.shape
    out = torch.empty_like(x)
    if B * n:
        has_lengths = lengths is not None
        _snake[(B * C, triton.cdiv(n, _BLOCK))](
            x, alpha, x if lengths is None else lengths, out, C, n, eps, HAS_LENGTHS=has_lengths, BLOCK=_BLOCK,
            **dependent(x),
        )  # fmt: skip
    return out
