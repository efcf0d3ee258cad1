"""Paged attention over anchor and ring, one row after the other. The definition that kernels are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels.kv_cache import LayerCache, StepLayout


def paged_attention(q_anchor: Tensor, q_ring: Tensor, cache: LayerCache, step: StepLayout, scale: float) -> Tensor:
    """Shapes and meaning as in `op.paged_attention`."""
    block_size, num_kv_heads, _ = cache.keys.shape[1:]
    keys, values = cache.keys.flatten(0, 1), cache.values.flatten(0, 1)
    out = torch.empty_like(q_anchor)
    for index, row in enumerate(step.rows):
        tokens, num_anchor = slice(row.token_start, row.token_end), row.num_anchor_keys
        slots = step.key_slots[index, : row.num_keys]
        k = keys[slots].transpose(0, 1).float()  # [Hkv, T, D]
        v = values[slots].transpose(0, 1).float()
        qa, qr = (_grouped(q[tokens], num_kv_heads) for q in (q_anchor, q_ring))
        scores = torch.cat([qa @ k[:, :num_anchor].mT, qr @ k[:, num_anchor:].mT], dim=-1) * scale
        if cache.scales is not None:
            at = slots // block_size, slice(None), slots % block_size
            k_scale, v_scale = (scales[at].mT[:, None] for scales in (cache.scales.keys, cache.scales.values))
            scores = scores * k_scale  # [Hkv, G·Q, T]
        # Keys lie in order of position, so a key's index is its position.
        is_later = torch.arange(slots.shape[0], device=slots.device) > step.positions[tokens, None]
        group_size = q_anchor.shape[1] // num_kv_heads
        weights = scores.masked_fill(is_later.repeat(group_size, 1), -torch.inf).softmax(dim=-1)
        if cache.scales is not None:
            weights = weights * v_scale
        out[tokens] = _ungrouped(weights @ v, group_size).to(out.dtype)
    return out


def _grouped(q: Tensor, num_kv_heads: int) -> Tensor:
    """[Q, H, D] → [Hkv, G·Q, D] float32, G = H / Hkv: all queries of the heads that share a key head in one matrix."""
    num_tokens, num_heads, head_dim = q.shape
    heads = q.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return heads.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim).float()


def _ungrouped(attended: Tensor, group_size: int) -> Tensor:
    """[Hkv, G·Q, D] → [Q, H, D]."""
    num_kv_heads, num_rows, head_dim = attended.shape
    heads = attended.view(num_kv_heads, group_size, num_rows // group_size, head_dim)
    return heads.permute(2, 0, 1, 3).flatten(1, 2)
