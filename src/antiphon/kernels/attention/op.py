"""Dense attention over keys that lie in one tensor: the encoders and the vocoder. Not the paged context.

    out = softmax(q kᵀ · scale + bias) v

| tensor | shape          | dtype     |                                                              |
|--------|----------------|-----------|--------------------------------------------------------------|
| q      | [B, H, Q, D]   | floating  | any strides                                                  |
| k, v   | [B, H, K, D]   | as q      | any strides, K ≥ 1                                           |
| bias   | broadcast to [B, H, Q, K] | as q | added to the scores; -inf hides a key; None adds nothing |
| out    | [B, H, Q, D]   | as q      | new                                                          |

Nothing aliases. Dispatch: torch's scaled_dot_product_attention on every device. Raises ShapeError.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from antiphon.errors import ShapeError


def attention(q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, scale: float) -> Tensor:
    """Attend from q to k and v; shapes and errors in the module's docstring."""
    if q.dim() != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ShapeError(
            "attention wants q [B, H, Q, D] and k, v [B, H, K, D]; got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
