"""`vocoder_attention` in Triton: online softmax over the listed entries, then over the chunk.

Shown, interpreted on the CPU, by tests/kernels/test_vocoder_attention.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.vocoder_attention.contract import Reading

_BLOCK_QUERIES = 64
_BLOCK_KEYS = 32
_MIN_DOT = 16
"""Smallest side of a product."""


@triton.jit
def _take(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - Triton's own types; it knows no dataclasses
    q, keys, values, bias, is_there, scale, top, total, out
):
    """One block of keys into the running softmax. q: [Q, D], keys, values: [K, D], bias: [Q, K], is_there: [K]."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale + bias
    scores = tl.where(is_there[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp(top - new_top)
    weights = tl.exp(scores - new_top[:, None])
    out = out * shrink[:, None] + tl.dot(weights, values, input_precision="ieee")
    return new_top, total * shrink + tl.sum(weights, 1), out


@triton.jit(do_not_specialize=["layer", "num_entries", "num_listed", "T"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915 - as above, and one algorithm
    q, k, v, bias, out, arena_keys, arena_values, listed, nums, table,
    layer, num_entries, num_listed, T, scale,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch_head = tl.program_id(0)
    batch, head = batch_head // H, batch_head % H
    row, guidance = batch // G, batch % G
    entry_size = G * H * D
    own_head = (guidance * H + head) * D
    chunk = batch_head.to(tl.int64) * T * D
    queries = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    is_d = (d < D)[None, :]
    is_query = queries < T
    q_tile = tl.load(q + chunk + queries[:, None] * D + d[None, :], mask=is_query[:, None] & is_d, other=0.0)
    q_tile = q_tile.to(tl.float32)

    num = tl.load(nums + row)
    voice_keys = tl.load(table + row * 3).to(tl.pointer_type(arena_keys.dtype.element_ty))
    voice_values = tl.load(table + row * 3 + 1).to(tl.pointer_type(arena_keys.dtype.element_ty))
    voice_layer = layer.to(tl.int64) * tl.load(table + row * 3 + 2) * entry_size
    arena_layer = layer.to(tl.int64) * num_entries * entry_size
    bias_row = (row.to(tl.int64) * H + head) * T * (num_listed + T)
    bias_start = bias + bias_row + queries[:, None] * (num_listed + T)

    top = tl.full((BLOCK_Q,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    result = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    added = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
    for start in range(0, num, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        is_there = column < num
        entry = tl.load(listed + row * num_listed + column, mask=is_there, other=0).to(tl.int64)
        in_arena = (is_there & (entry >= 0))[:, None] & is_d
        in_voice = (is_there & (entry < 0))[:, None] & is_d
        ours = arena_layer + entry[:, None] * entry_size + own_head + d[None, :]
        shared = voice_layer + (-1 - entry)[:, None] * entry_size + own_head + d[None, :]
        # Each entry is in one of them; what is masked costs nothing.
        keys = tl.load(arena_keys + ours, mask=in_arena, other=0.0).to(tl.float32)
        keys += tl.load(voice_keys + shared, mask=in_voice, other=0.0).to(tl.float32)
        values = tl.load(arena_values + ours, mask=in_arena, other=0.0).to(tl.float32)
        values += tl.load(voice_values + shared, mask=in_voice, other=0.0).to(tl.float32)
        if HAS_BIAS:
            is_pair = is_query[:, None] & is_there[None, :]
            added = tl.load(bias_start + column[None, :], mask=is_pair, other=0.0).to(tl.float32)
        top, total, result = _take(q_tile, keys, values, added, is_there, scale, top, total, result)
    for start in range(0, T, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        is_there = column < T
        own = chunk + column[:, None] * D + d[None, :]
        keys = tl.load(k + own, mask=is_there[:, None] & is_d, other=0.0).to(tl.float32)
        values = tl.load(v + own, mask=is_there[:, None] & is_d, other=0.0).to(tl.float32)
        if HAS_BIAS:
            is_pair = is_query[:, None] & is_there[None, :]
            added = tl.load(bias_start + num + column[None, :], mask=is_pair, other=0.0).to(tl.float32)
        top, total, result = _take(q_tile, keys, values, added, is_there, scale, top, total, result)
    place = out + chunk + queries[:, None] * D + d[None, :]
    tl.store(place, (result / total[:, None]).to(out.dtype.element_ty), mask=is_query[:, None] & is_d)


def vocoder_attention(
    q: Tensor, k: Tensor, v: Tensor, reading: Reading, layer: int, bias: Tensor | None, scale: float
) -> Tensor:
    """Tensors as in `op.py`."""
    batch, H, T, D = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    arena = reading.arena
    grid = (batch * H, triton.cdiv(T, _BLOCK_QUERIES))
    _attend[grid](
        q, k, v, q if bias is None else bias.contiguous(), out, arena.keys, arena.values,
        reading.listed, reading.nums, reading.table,
        layer, arena.keys.shape[1], reading.listed.shape[1], T, scale,
        G=arena.keys.shape[2], H=H, D=D, HAS_BIAS=bias is not None,
        BLOCK_Q=_BLOCK_QUERIES, BLOCK_K=_BLOCK_KEYS, BLOCK_D=max(_MIN_DOT, triton.next_power_of_2(D)),
    )  # fmt: skip
    return out
