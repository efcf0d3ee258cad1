"""Rotation of stored keys in place: the slide for attention back ends that know one origin only.

    keys[:, slots] ← keys[:, slots] rotated by `by_positions` more positions, in float32, rounded once

| tensor | shape                                        | dtype    |                                                 |
|--------|----------------------------------------------|----------|-------------------------------------------------|
| keys   | [num_layers, num_blocks, block_size, Hkv, D] | floating | contiguous; written at the slots of every layer |
| slots  | [M]                                          | int64    | contiguous; no slot twice; M = 0 is allowed     |

Values have no positions and stay. Each call rounds the keys once more (docs/kv_cache.md gives the drift).
Dispatch: `kernel.py` on CUDA, the reference elsewhere. One launch for the angles, one for all layers: its grid is
groups of heads by layers, and each key is read and written once: 1.05 to 1.08 of a copy (docs/numbers.md). Raises
ShapeError.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.rotate_keys import reference


def rotate_keys(keys: Tensor, slots: Tensor, by_positions: int, theta: float) -> None:
    """Rotate in place; tensors and errors in the module's docstring. theta: base of the rotary frequencies."""
    if keys.dim() != 5 or slots.dim() != 1 or not keys.is_contiguous() or not slots.is_contiguous():
        raise ShapeError(
            f"rotate_keys wants keys [L, num_blocks, block_size, Hkv, D] and slots [M], contiguous; got "
            f"{tuple(keys.shape)}, {tuple(slots.shape)} of strides {keys.stride()}, {slots.stride()}"
        )
    if keys.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.rotate_keys import kernel

        kernel.rotate_keys(keys, slots, by_positions, theta)
    else:
        reference.rotate_keys(keys, slots, by_positions, theta)
