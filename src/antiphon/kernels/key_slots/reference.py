"""A slot for every key, one run of tokens after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def key_slots(blocks: Tensor, segments: Tensor, spans: Tensor, block_size: int, max_keys: int) -> Tensor:
    """Shapes and meaning as in `op.key_slots`."""
    index = torch.arange(max_keys, device=blocks.device)
    out = torch.zeros((spans.shape[0], max_keys), dtype=torch.int32, device=blocks.device)
    before = torch.zeros_like(spans[:, :1])
    for segment in segments.unbind(1):
        start, first, num_tokens = segment[:, :1], segment[:, 1:2], segment[:, 2:]
        is_in = (index >= before) & (index < before + num_tokens) & (index < spans[:, 2:3])
        place = (index - before + first).masked_fill(~is_in, 0)
        slots = blocks[(start + place // block_size).masked_fill(~is_in, 0)] * block_size + place % block_size
        out = torch.where(is_in, slots, out)
        before = before + num_tokens
    return out
