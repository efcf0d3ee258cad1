"""Rotation of stored keys in place: the slide for attention back ends that know one origin only.

    keys[:, slots] ← keys[:, slots] rotated by `by_positions` more positions, in float32, rounded once

| tensor | shape                                        | dtype    |                                     |
|--------|----------------------------------------------|----------|-------------------------------------|
| keys   | [num_layers, num_blocks, block_size, Hkv, D] | floating | written at the slots of every layer |
| slots  | [M]                                          | int64    | no slot twice; M = 0 is allowed     |

Values have no positions and stay. Each call rounds the keys once more (docs/kv_cache.md gives the drift).
Dispatch: the plain torch reference on every device. Raises ShapeError.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.rotate_keys import reference


def rotate_keys(keys: Tensor, slots: Tensor, by_positions: int, theta: float) -> None:
    """Rotate in place; tensors and errors in the module's docstring. theta: base of the rotary frequencies."""
    if keys.dim() != 5 or slots.dim() != 1:
        raise ShapeError(
            f"rotate_keys wants keys [L, num_blocks, block_size, Hkv, D] and slots [M]; got "
            f"{tuple(keys.shape)}, {tuple(slots.shape)}"
        )
    reference.rotate_keys(keys, slots, by_positions, theta)
