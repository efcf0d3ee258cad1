"""What stands between the projections and the attention of a layer: norm, both query rotations, key rotation, write.

    q, k   ← rms_norm per head, where the model has it
    cache  ← k rotated by rotations.key, v, at rotations.slots
    result = q rotated by rotations.anchor, q rotated by rotations.ring

| tensor          | shape                            | dtype    |                                                   |
|-----------------|----------------------------------|----------|---------------------------------------------------|
| q               | [N, H, D]                        | floating | last dimension contiguous; a view of a projection |
| k, v            | [N, Hkv, D]                      | as q     | as q                                              |
| cache           | [num_blocks, block_size, Hkv, D] | as q     | contiguous; keys and values of a layer, written   |
| cache.scales    | [num_blocks, Hkv, block_size]    | float32  | contiguous, written; then cache is float8_e4m3fn  |
| rotations.slots | [N]                              | int64    | contiguous; -1 marks padding                      |
| results         | [N, H, D] twice                  | as q     | new, contiguous                                   |

With scales, a head's key or value x is stored as x / s, rounded to nearest, and s = max |x| / `LARGEST`, at least
`SMALLEST_SCALE`; from float32, the key after its rotation. So a number is off by at most 2^-4 of itself or 2^-10 s.

Of a padding token nothing is written, and its results are any finite numbers as far as its q is. A slot twice in a step
is a bug of the caller (asserted in core). N = 0 is allowed; D is even. Roundings are those of a norm and a rotation
one after the other.
Dispatch: `kernel.py` on CUDA, the reference elsewhere. Grid: a token by groups of its heads. Bytes: q, k and v once,
q twice out, k and v out, three rows of the tables; 3.4 us for 32 tokens of the thinker on an H200. Raises ShapeError.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.kv_cache import LayerCache
from antiphon.kernels.rotary_store import reference
from antiphon.kernels.rotary_store.contract import HeadNorm, StepRotations


def rotary_store(
    q: Tensor, k: Tensor, v: Tensor, norm: HeadNorm | None, rotations: StepRotations, cache: LayerCache
) -> tuple[Tensor, Tensor]:
    """Norm, rotate and store; tensors and errors in the module's docstring."""
    keys, values = cache.keys, cache.values
    if k.shape != v.shape or k.shape[1:] != keys.shape[2:] or keys.shape != values.shape:
        raise ShapeError(
            f"rotary_store wants k and v [N, {keys.shape[2]}, {keys.shape[3]}] like its cache; got "
            f"{tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not keys.is_contiguous() or not values.is_contiguous():
        raise ShapeError(f"rotary_store wants a contiguous cache; got strides {keys.stride()}, {values.stride()}")
    if not cache.has_its_scales:
        raise ShapeError(
            f"rotary_store wants scales with float8_e4m3fn and only there; got {keys.dtype}, {cache.scales}"
        )
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        raise ShapeError(f"rotary_store wants heads that lie in one piece; got strides {q.stride()}, {k.stride()}")
    if q.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.rotary_store import kernel

        return kernel.rotary_store(q, k, v, norm, rotations, cache)
    return reference.rotary_store(q, k, v, norm, rotations, cache)
