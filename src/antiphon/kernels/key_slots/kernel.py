"""`key_slots` in Triton: one launch over all rows.

Shown, interpreted on the CPU, by tests/kernels/test_paged_attention.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.dependent_launch import await_previous, dependent


@triton.jit(do_not_specialize=["max_keys"])
def _fill(  # noqa: PLR0913 - Triton's own types; it knows no dataclasses
    blocks, segments, spans, out, max_keys,
    NUM_SEGMENTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    row = tl.program_id(1)
    index = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    num_keys = tl.load(spans + 4 * row + 2)
    slot = tl.zeros((BLOCK_K,), tl.int32)
    before = 0
    for segment in tl.static_range(NUM_SEGMENTS):
        at = segments + (row * NUM_SEGMENTS + segment) * 3
        num_tokens = tl.load(at + 2)
        place = index - before + tl.load(at + 1)
        is_in = (index >= before) & (index < before + num_tokens) & (index < num_keys)
        block = tl.load(blocks + tl.load(at) + place // BLOCK_SIZE, mask=is_in, other=0)
        slot = tl.where(is_in, block * BLOCK_SIZE + place % BLOCK_SIZE, slot)
        before += num_tokens
    tl.store(out + row.to(tl.int64) * max_keys + index, slot, mask=index < num_keys)


_LIST_BLOCK = 1024


def key_slots(blocks: Tensor, segments: Tensor, spans: Tensor, block_size: int, max_keys: int) -> Tensor:
    """Tensors as in `op.py`."""
    num_rows, num_segments, _ = segments.shape
    out = torch.empty((num_rows, max_keys), dtype=torch.int32, device=blocks.device)
    if num_rows and max_keys:
        _fill[(triton.cdiv(max_keys, _LIST_BLOCK), num_rows)](
            blocks, segments, spans, out, max_keys,
            NUM_SEGMENTS=num_segments, BLOCK_SIZE=block_size, BLOCK_K=_LIST_BLOCK, **dependent(blocks),
        )  # fmt: skip
    return out
