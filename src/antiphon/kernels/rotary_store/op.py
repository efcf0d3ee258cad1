"""What stands between the projections and the attention of a layer: norm, both query rotations, key rotation, write.

    q, k   ← rms_norm per head, where the model has it
    cache  ← k rotated by rotations.key, v, at rotations.slots
    result = q rotated by rotations.anchor, q rotated by rotations.ring

| tensor  | shape                            | dtype    |                                       |
|---------|----------------------------------|----------|---------------------------------------|
| q       | [N, H, D]                        | floating |                                       |
| k, v    | [N, Hkv, D]                      | as q     |                                       |
| cache   | [num_blocks, block_size, Hkv, D] | as q     | keys and values of one layer, written |
| results | [N, H, D] twice                  | as q     | new                                   |

A slot twice in a step is a bug of the caller (asserted in core). N = 0 is allowed.
Dispatch: the plain torch reference on every device. Raises ShapeError.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.rotary_store import reference
from antiphon.kernels.rotary_store.contract import HeadNorm, StepRotations


def rotary_store(
    q: Tensor, k: Tensor, v: Tensor, norm: HeadNorm | None, rotations: StepRotations, cache: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Norm, rotate and store; tensors and errors in the module's docstring. cache: (keys, values)."""
    keys, values = cache
    if k.shape != v.shape or k.shape[1:] != keys.shape[2:] or keys.shape != values.shape:
        raise ShapeError(
            f"rotary_store wants k and v [N, {keys.shape[2]}, {keys.shape[3]}] like its cache; got "
            f"{tuple(k.shape)}, {tuple(v.shape)}"
        )
    return reference.rotary_store(q, k, v, norm, rotations, cache)
