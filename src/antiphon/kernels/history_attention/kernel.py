"""`history_attention` in Triton: online softmax over the history, then over the new positions, which it stores.

Shown, interpreted on the CPU and on a GPU, by tests/kernels/test_history_attention.py.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.dependent_launch import await_previous, dependent
from antiphon.kernels.history_attention.contract import Histories

_MIN_DOT = 16
"""Smallest side of a product."""

_MAX_ALIGNED = 16
"""Elements: beyond a vector nothing is gained."""

_FEW_PROGRAMS = 128
"""About as many as a large GPU has multiprocessors: with fewer, smaller tiles of queries keep more of them busy."""

_BLOCK_K = 64


@triton.jit
def _take(q, keys, values, is_there, scale, top, total, out):  # noqa: PLR0913 - Triton knows no dataclasses
    """One block of keys into the running softmax. q: [Q, D], keys, values: [K, D], is_there: [K]."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(is_there[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp(top - new_top)
    weights = tl.exp(scores - new_top[:, None])
    out = out * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_top, total * shrink + tl.sum(weights, 1), out


@triton.jit(do_not_specialize=["layer", "T"])
def _attend(  # noqa: PLR0913 - as above
    q, k, v, out, origin, offsets, lengths, layer, T, scale, q_batch, q_time, k_batch, k_time, v_batch, v_time,
    H: tl.constexpr, P: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    batch, head = tl.program_id(0) // H, tl.program_id(0) % H
    length = tl.load(lengths + batch)
    if length < 0:
        return
    queries = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    is_d = (d < D)[None, :]
    is_query = (queries < T)[:, None] & is_d
    batch = batch.to(tl.int64)
    own = batch * q_batch + head * D
    q_tile = tl.load(q + own + queries[:, None] * q_time + d[None, :], mask=is_query, other=0.0).to(KIND)
    # Histories are tensors of their own, so that all of them begin where a vector may.
    at_keys = tl.multiple_of(tl.load(offsets + batch) + (layer.to(tl.int64) * 2 * H + head) * (P * D), ALIGNED)
    keys_of, values_of = origin + at_keys, origin + at_keys + H * P * D
    own_k, own_v = k + batch * k_batch + head * D, v + batch * v_batch + head * D

    top = tl.full((BLOCK_Q,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    result = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for start in range(0, length, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        is_there = column < length
        is_read = is_there[:, None] & is_d
        places = column[:, None] * D + d[None, :]
        keys = tl.load(keys_of + places, mask=is_read, other=0.0).to(KIND)
        values = tl.load(values_of + places, mask=is_read, other=0.0).to(KIND)
        top, total, result = _take(q_tile, keys, values, is_there, scale, top, total, result)
    for start in range(0, T, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        is_there = column < T
        is_read = is_there[:, None] & is_d
        keys = tl.load(own_k + column[:, None] * k_time + d[None, :], mask=is_read, other=0.0).to(KIND)
        values = tl.load(own_v + column[:, None] * v_time + d[None, :], mask=is_read, other=0.0).to(KIND)
        top, total, result = _take(q_tile, keys, values, is_there, scale, top, total, result)
    to = batch * T * (H * D) + head * D + queries[:, None] * (H * D) + d[None, :]
    tl.store(out + to, (result / total[:, None]).to(out.dtype.element_ty), mask=is_query)
    # What is new is remembered by the program of the queries at the same positions.
    new_keys = tl.load(own_k + queries[:, None] * k_time + d[None, :], mask=is_query, other=0.0)
    new_values = tl.load(own_v + queries[:, None] * v_time + d[None, :], mask=is_query, other=0.0)
    behind = (length + queries)[:, None] * D + d[None, :]
    tl.store(keys_of + behind, new_keys, mask=is_query)
    tl.store(values_of + behind, new_values, mask=is_query)


_KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def history_attention(q: Tensor, k: Tensor, v: Tensor, histories: Histories, layer: int, scale: float) -> Tensor:
    """Tensors as in `op.py`."""
    B, T, H, D = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not B or not T:
        return out
    is_half = q.dtype != torch.float32
    num_queries = 64 if is_half and B * H >= _FEW_PROGRAMS and T > _MIN_DOT else _MIN_DOT
    _attend[(B * H, triton.cdiv(T, num_queries))](
        q, k, v, out, histories.origin, histories.offsets, histories.lengths, layer, T, scale,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        H=H, P=histories.shape.max_positions, D=D,
        # Triton's interpreter, which runs what is not on a GPU, keeps bfloat16 as integers and would multiply those.
        KIND=_KINDS[q.dtype] if q.is_cuda else tl.float32,
        ALIGNED=math.gcd(D, _MAX_ALIGNED), BLOCK_Q=num_queries, BLOCK_K=_BLOCK_K,
        BLOCK_D=max(_MIN_DOT, triton.next_power_of_2(D)),
        num_warps=4, num_stages=2 if is_half else 1, **dependent(q),
    )  # fmt: skip
    return out
