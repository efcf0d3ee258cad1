"""Layer norms between the products of the flow's estimator, with all that stands beside them, in one pass over a frame.

    x ← x + gate · y;  h = norm(x) · (1 + scale) + shift;     `modulated`: h;  `modulated_windows`: windows of h
    h = mish(norm(y) · weight + bias);                        `mish_windows`: windows of h

The window of frame t is [h(t-2) ‖ h(t-1) ‖ h(t)], so that a causal convolution of width 3 is one product; what stands
before a session's first frame is its tail, and the tail after its last frame is stored for its next chunk.

| tensor       | shape     | dtype    |                                                                   |
|--------------|-----------|----------|-------------------------------------------------------------------|
| x            | [B, T, C] | float32  | contiguous; changed in place; B = R G, a session's rows adjacent  |
| update.y     | [B, T, C] | floating | contiguous                                                        |
| shift, scale | [C]       | float32  | contiguous, as gate, weight and bias                              |
| y            | [B, T, C] | floating | contiguous                                                        |
| tails        |           | float32  | `ConvTails`; index: which of its A convolutions                   |
| h            | [B, T, C] | dtype    | new                                                               |
| windows      | [B, T, 3C]| dtype    | new                                                               |

Sums are float32. Behind a session's length there is anything, and nothing before it depends on that. T = 0 is allowed.
Nothing aliases. Grid of the kernel: a program for each frame, which reads and writes it once; bytes moved are 10 to 16
per element in bfloat16. Not measured on a GPU yet. Raises ShapeError. Dispatch: `kernel.py` on CUDA, the reference
elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.frame_norm import reference
from antiphon.kernels.frame_norm.contract import TAIL_FRAMES, ConvTails, Update


def modulated(
    x: Tensor, update: Update | None, shift: Tensor, scale: Tensor, *, eps: float, dtype: torch.dtype
) -> Tensor:
    """update: None adds nothing. Returns h; tensors and errors in the module's docstring."""
    check(x, update, shift, scale)
    if x.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.frame_norm import kernel

        return kernel.modulated(x, update, shift, scale, eps=eps, dtype=dtype)
    return reference.modulated(x, update, shift, scale, eps=eps, dtype=dtype)


def modulated_windows(  # noqa: PLR0913 - one pass over all that a frame needs is what it is for
    x: Tensor,
    update: Update | None,
    shift: Tensor,
    scale: Tensor,
    tails: ConvTails,
    index: int,
    *,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """As `modulated`. Returns windows."""
    check(x, update, shift, scale)
    check_tails(x, tails, index)
    if x.is_cuda:
        from antiphon.kernels.frame_norm import kernel

        return kernel.modulated_windows(x, update, shift, scale, tails, index, eps=eps, dtype=dtype)
    return reference.modulated_windows(x, update, shift, scale, tails, index, eps=eps, dtype=dtype)


def mish_windows(y: Tensor, weight: Tensor, bias: Tensor, tails: ConvTails, index: int, *, eps: float) -> Tensor:
    """Returns windows, of y's dtype; tensors and errors in the module's docstring."""
    check_vectors(y, weight, bias)
    check_tails(y, tails, index)
    if y.is_cuda:
        from antiphon.kernels.frame_norm import kernel

        return kernel.mish_windows(y, weight, bias, tails, index, eps=eps)
    return reference.mish_windows(y, weight, bias, tails, index, eps=eps)


def check(x: Tensor, update: Update | None, shift: Tensor, scale: Tensor) -> None:
    """Raises: ShapeError."""
    check_vectors(x, shift, scale)
    if x.dtype != torch.float32:
        raise ShapeError(f"frame norm changes a float32 stream in place; got {x.dtype}")
    if update is not None:
        check_vectors(x, update.gate)
        if update.y.shape != x.shape or not update.y.is_contiguous():
            raise ShapeError(f"frame norm wants an update {tuple(x.shape)}, contiguous; got {tuple(update.y.shape)}")


def check_vectors(x: Tensor, *vectors: Tensor) -> None:
    """Raises: ShapeError."""
    if x.dim() != 3 or not x.is_contiguous():
        raise ShapeError(f"frame norm wants [B, T, C], contiguous; got {tuple(x.shape)}")
    for vector in vectors:
        if vector.shape != x.shape[2:] or vector.dtype != torch.float32 or not vector.is_contiguous():
            raise ShapeError(f"frame norm wants vectors of {x.shape[2]} float32; got {tuple(vector.shape)}")


def check_tails(x: Tensor, tails: ConvTails, index: int) -> None:
    """Raises: ShapeError."""
    num_rows = len(tails.lengths)
    stored = tails.arena.shape
    wanted = (len(x) // max(1, num_rows), TAIL_FRAMES, x.shape[2])
    if stored[2:] != wanted or len(x) % max(1, num_rows) or not tails.arena.is_contiguous():
        raise ShapeError(f"{num_rows} sessions of {tuple(x.shape)} want tails {wanted}; got {tuple(stored)}")
    if not 0 <= index < stored[1] or not len(tails.sources) == len(tails.places) == num_rows:
        raise ShapeError(
            f"tails of {stored[1]} convolutions and {num_rows} sessions; asked for {index}, with "
            f"{len(tails.sources)} sources and {len(tails.places)} places"
        )
