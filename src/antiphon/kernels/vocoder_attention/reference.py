"""Attention over listed entries and the chunk itself, session by session; gathers what is read. The definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.vocoder_attention.contract import Reading


def vocoder_attention(
    q: Tensor, k: Tensor, v: Tensor, reading: Reading, layer: int, by_distance: Tensor | None, scale: float
) -> Tensor:
    """Tensors as in `op.py`."""
    out = torch.zeros(q.shape, dtype=q.dtype)
    num_guidance_rows = reading.arena.keys.shape[2]
    for row, (num_past, length) in enumerate(zip(reading.nums.tolist(), reading.lengths.tolist(), strict=True)):
        batch = slice(row * num_guidance_rows, (row + 1) * num_guidance_rows)
        own_q, own_k, own_v = (one[batch, :length].transpose(1, 2) for one in (q, k, v))
        keys, values = _past(reading, layer, row, num_past)
        own_bias = None if by_distance is None else scale * _bias(by_distance[:, row], num_past, length)
        attended = F.scaled_dot_product_attention(
            own_q,
            torch.cat((keys.to(k.dtype), own_k), dim=2),
            torch.cat((values.to(v.dtype), own_v), dim=2),
            attn_mask=own_bias,
            scale=scale,
        )
        out[batch, :length] = attended.transpose(1, 2)
    return out


def _bias(by_distance: Tensor, num_past: int, length: int) -> Tensor:
    """by_distance: [H, T, W] -> [H, length, num_past + length]."""
    num_queries, num_distances = by_distance.shape[1:]
    queries, keys = torch.arange(length), torch.arange(num_past + length)
    distances = num_past + queries[:, None] - keys
    columns = num_distances - num_queries - distances
    return by_distance[:, :length].gather(-1, columns.expand(len(by_distance), -1, -1))


def _past(reading: Reading, layer: int, row: int, num_past: int) -> tuple[Tensor, Tensor]:
    """A session's listed keys and values, [G, H, n, D] each."""
    arena, voice, listed = reading.arena, reading.voices[row], reading.listed[row, :num_past]
    is_voice = listed < 0
    in_voice, in_arena = is_voice.nonzero()[:, 0], (~is_voice).nonzero()[:, 0]
    gathered = []
    for ours, shared in ((arena.keys[layer], voice.keys[layer]), (arena.values[layer], voice.values[layer])):
        out = ours.new_empty(len(listed), *ours.shape[1:])
        out[in_voice] = shared[-1 - listed[in_voice]]
        out[in_arena] = ours[listed[in_arena]]
        gathered.append(out.permute(1, 2, 0, 3))
    return gathered[0], gathered[1]
