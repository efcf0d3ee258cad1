"""Attention of new positions to what their session remembers and to each other; they are remembered then.

    out = softmax(q [k_past ‖ k]ᵀ · scale) [v_past ‖ v],  per session;  past = the filled positions of its history
    then k, v stand in the history behind them; who calls decides whether they count, by the next call's lengths

| tensor            | shape           | dtype    |                                                                 |
|-------------------|-----------------|----------|-----------------------------------------------------------------|
| q, k, v           | [B, T, H, D]    | floating | [H, D] contiguous                                               |
| histories.kv      | [L, 2, H, P, D] | as q     | one per session, written at `layer`                             |
| histories.lengths | [B]             | int64    | 0 to P - T, or NOBODY: nothing is read or written, out is anything |
| out               | [B, T, H, D]    | as q     | new, contiguous                                                 |

Every position sees all T new ones. Pasts are ragged, an empty one is allowed. Nothing aliases. Softmax and sums are
float32. Dispatch: `kernel.py` on CUDA, the reference elsewhere. Grid of the kernel: one program per session, head and
tile of queries, which reads the session's keys and values of the head once. Raises ShapeError.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.history_attention import reference
from antiphon.kernels.history_attention.contract import Histories


def history_attention(q: Tensor, k: Tensor, v: Tensor, histories: Histories, layer: int, scale: float) -> Tensor:
    """Attend and remember; tensors and errors in the module's docstring. layer: 0 to L - 1."""
    check(q, k, v, histories, layer)
    if q.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.history_attention import kernel

        return kernel.history_attention(q, k, v, histories, layer, scale)
    return reference.history_attention(q, k, v, histories, layer, scale)


def check(q: Tensor, k: Tensor, v: Tensor, histories: Histories, layer: int) -> None:
    """Raises: ShapeError."""
    shape = histories.shape
    num_new = q.shape[1] if q.dim() == 4 else 0
    wanted = (len(histories.lengths), num_new, shape.num_heads, shape.head_dim)
    if not q.shape == k.shape == v.shape == wanted or not 0 <= layer < shape.num_layers:
        raise ShapeError(
            f"attention to histories {shape} wants q, k, v {wanted} and a layer; got {tuple(q.shape)}, "
            f"{tuple(k.shape)}, {tuple(v.shape)} and {layer}"
        )
    for one in (q, k, v):
        if one.stride()[2:] != (shape.head_dim, 1):
            raise ShapeError(f"it wants heads of {shape.head_dim} side by side; got strides {one.stride()}")
