"""Attention of a step's tokens to their contexts in the paged cache: anchor and ring, mixed query lengths.

    score(q, k) = scale · ⟨q_anchor, k⟩ for anchor keys, scale · ⟨q_ring, k⟩ for ring keys;  out = softmax(score) V
    over all keys whose position is not after the query's. One softmax over both parts.

Anchor keys are stored rotated to their position, ring keys to position + shift; `q_anchor` and `q_ring` are the same
query rotated to p and to p + shift. Scores depend on differences of angles only, so dropping ring tokens changes
`shift` and no key (docs/kv_cache.md).

| tensor       | shape                                      | dtype    |                                         |
|--------------|--------------------------------------------|----------|-----------------------------------------|
| q_anchor     | [N, H, D]                                  | floating | contiguous                              |
| q_ring       | [N, H, D]                                  | as above | may be q_anchor itself                  |
| cache        | [num_blocks, block_size, Hkv, D]           | as above | one layer; the step's own tokens are in |
| cache.scales | [num_blocks, Hkv, block_size]              | float32  | contiguous; cache is float8_e4m3fn then |
| out          | [N, H, D]                                  | as above | new                                     |

With scales, a score is multiplied by its key's, and a weight by its value's once it is in the sum; queries of half the
bits up to 65 504 then, and values up to 57 000. Query head h reads key head h // (H // Hkv). N = 0 is allowed. Softmax
and sums are float32. What comes out for padding is anything. Dispatch: `kernel.py` on CUDA, the reference elsewhere.
Grid of the kernel: a tile of a row's tokens, a key head, a part of the row's keys (`tiles.py`). Raises ShapeError.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.kv_cache import LayerCache, StepLayout
from antiphon.kernels.paged_attention import reference


def paged_attention(q_anchor: Tensor, q_ring: Tensor, cache: LayerCache, step: StepLayout, scale: float) -> Tensor:
    """Attend; tensors and errors in the module's docstring. step: rows and positions of the N tokens."""
    if q_anchor.shape != q_ring.shape or q_anchor.shape[0] != step.positions.shape[0]:
        raise ShapeError(
            f"paged attention wants q_anchor and q_ring [N, H, D] for N = {step.positions.shape[0]} tokens; "
            f"got {tuple(q_anchor.shape)}, {tuple(q_ring.shape)}"
        )
    keys, values = cache.keys, cache.values
    if keys.shape != values.shape or keys.shape[1] != step.block_size or q_anchor.shape[1] % keys.shape[2]:
        raise ShapeError(
            f"paged attention wants keys and values [num_blocks, {step.block_size}, Hkv, D] with Hkv dividing "
            f"{q_anchor.shape[1]} heads; got {tuple(keys.shape)}, {tuple(values.shape)}"
        )
    if not cache.has_its_scales:
        raise ShapeError(
            f"paged attention wants scales with float8_e4m3fn and only there; got {keys.dtype}, {cache.scales}"
        )
    if q_anchor.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.paged_attention import kernel

        return kernel.paged_attention(q_anchor, q_ring, cache, step, scale)
    return reference.paged_attention(q_anchor, q_ring, cache, step, scale)
