"""Attention over listed entries and the chunk itself, session by session; gathers what is read. The definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.vocoder_attention.contract import Reading


def vocoder_attention(
    q: Tensor, k: Tensor, v: Tensor, reading: Reading, layer: int, bias: Tensor | None, scale: float
) -> Tensor:
    """Tensors as in `op.py`."""
    num_rows = len(reading.counts)
    outs = []
    chunks = zip(q.chunk(num_rows), k.chunk(num_rows), v.chunk(num_rows), strict=True)
    for row, (own_q, own_k, own_v) in enumerate(chunks):
        keys, values = _past(reading, layer, row)
        own_bias = None if bias is None else bias[row, :, :, : reading.counts[row] + k.shape[2]]
        outs.append(
            F.scaled_dot_product_attention(
                own_q,
                torch.cat((keys.to(k.dtype), own_k), dim=2),
                torch.cat((values.to(v.dtype), own_v), dim=2),
                attn_mask=own_bias,
                scale=scale,
            )
        )
    return torch.cat(outs)


def _past(reading: Reading, layer: int, row: int) -> tuple[Tensor, Tensor]:
    """A session's listed keys and values, [G, H, n, D] each."""
    arena, voice, listed = reading.arena, reading.voices[row], reading.listed[row, : reading.counts[row]].long()
    is_voice = listed < 0
    in_voice, in_arena = is_voice.nonzero()[:, 0], (~is_voice).nonzero()[:, 0]
    gathered = []
    for ours, shared in ((arena.keys[layer], voice.keys[layer]), (arena.values[layer], voice.values[layer])):
        out = ours.new_empty(len(listed), *ours.shape[1:])
        out[in_voice] = shared[-1 - listed[in_voice]]
        out[in_arena] = ours[listed[in_arena]]
        gathered.append(out.permute(1, 2, 0, 3))
    return gathered[0], gathered[1]
