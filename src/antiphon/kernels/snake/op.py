"""The vocoder's activation, one slope per channel, in one pass where plain torch takes five.

    out = x + sin²(alpha x) / (alpha + eps),  0 behind a row's length

| tensor  | shape     | dtype   |                                    |
|---------|-----------|---------|------------------------------------|
| x       | [B, C, n] | float32 | contiguous                         |
| alpha   | [C]       | float32 | contiguous                         |
| lengths | [B]       | int64   | contiguous; None: all of every row |
| out     | [B, C, n] | float32 | new; x is not changed              |

Nothing may be 0 in size but n and B. Grid of the kernel: one program per row, channel and 1024 samples; bytes moved are
8 per element. Not measured on a GPU yet. Raises ShapeError. Dispatch: `kernel.py` on CUDA, the reference elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.snake import reference


def snake(x: Tensor, alpha: Tensor, *, eps: float, lengths: Tensor | None = None) -> Tensor:
    """Tensors and errors in the module's docstring."""
    check(x, alpha, lengths)
    if x.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.snake import kernel

        return kernel.snake(x, alpha, eps=eps, lengths=lengths)
    return reference.snake(x, alpha, eps=eps, lengths=lengths)


def check(x: Tensor, alpha: Tensor, lengths: Tensor | None) -> None:
    """Raises: ShapeError."""
    if x.dim() != 3 or alpha.shape != x.shape[1:2] or {x.dtype, alpha.dtype} != {torch.float32}:
        raise ShapeError(
            f"snake wants float32 [B, C, n] and [C]; got {x.dtype} {tuple(x.shape)}, {alpha.dtype} {tuple(alpha.shape)}"
        )
    if lengths is not None and (lengths.shape != x.shape[:1] or lengths.dtype != torch.int64):
        raise ShapeError(f"snake wants int64 lengths [{x.shape[0]}]; got {lengths.dtype} {tuple(lengths.shape)}")
    if not x.is_contiguous() or not alpha.is_contiguous():
        raise ShapeError(f"snake wants contiguous tensors; got strides {x.stride()} and {alpha.stride()}")
