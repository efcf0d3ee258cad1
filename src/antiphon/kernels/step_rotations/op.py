"""Cosines and sines of a step's tokens at the three positions that they are rotated to; once per step, for all layers.

    out = cos, sin of positions · theta^(-2i / head_dim),   the angle in float64, rounded to float32 at last

| tensor            | shape                    | dtype   |                                     |
|-------------------|--------------------------|---------|-------------------------------------|
| anchor, ring, key | [N]                      | int64   | any size and sign; contiguous       |
| out               | [N, head_dim / 2], six   | float32 | new, contiguous; views of one table |

N = 0 is allowed. Dispatch: `kernel.py` on CUDA, where all six are one launch, and the reference elsewhere. The kernel's
frequencies are off by a few units of float64 as the reference's are, but not the same ones. Grid: 4 tokens of one
column a program; 2.4 us on an H200. Raises ShapeError.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.rotation import Rotation
from antiphon.kernels.step_rotations import reference


def step_rotations(
    anchor: Tensor, ring: Tensor, key: Tensor, head_dim: int, theta: float
) -> tuple[Rotation, Rotation, Rotation]:
    """The rotations for anchor, ring and key; tensors and errors in the module's docstring."""
    if anchor.dim() != 1 or not anchor.shape == ring.shape == key.shape or head_dim % 2:
        raise ShapeError(
            f"step_rotations wants three tensors [N] and an even head_dim; got {tuple(anchor.shape)}, "
            f"{tuple(ring.shape)}, {tuple(key.shape)} and {head_dim}"
        )
    if anchor.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.step_rotations import kernel

        return kernel.step_rotations(anchor, ring, key, head_dim, theta)
    return reference.step_rotations(anchor, ring, key, head_dim, theta)
