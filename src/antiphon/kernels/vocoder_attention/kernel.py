"""`vocoder_attention` in Triton: online softmax over the listed entries, then over the chunk.

Shown, interpreted on the CPU, by tests/kernels/test_vocoder_attention.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.dependent_launch import await_previous, dependent
from antiphon.kernels.vocoder_attention.contract import Products, Reading

_MIN_DOT = 16
"""Smallest side of a product."""

_MAX_ALIGNED = 16
"""Elements: beyond a vector nothing is gained."""

_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}

_FEW_PROGRAMS = 128
"""About as many as a large GPU has multiprocessors: with fewer, smaller tiles of queries keep more of them busy."""


@dataclass(frozen=True, slots=True)
class Tiles:
    num_queries: int
    num_keys: int
    num_warps: int
    num_stages: int


def tiles(dtype: torch.dtype, products: Products, num_queries: int, num_batch_heads: int) -> Tiles:
    """Not tuned on a GPU yet. Chunks have 50 to 56 frames: one tile of 64 reads every entry once.

    In TF32, 64 queries would be warp group products, for which the values have to be transposed number by number.
    """
    is_small = num_batch_heads < _FEW_PROGRAMS or num_queries <= _MIN_DOT
    if dtype == torch.bfloat16:
        return Tiles(_MIN_DOT if is_small else 64, 64, 4, 3)
    num_keys = 32 if products is Products.FLOAT32 else 64
    return Tiles(_MIN_DOT if is_small else 32, num_keys, 4, 3)


@triton.jit
def _take(  # noqa: PLR0913 - Triton's own types; it knows no dataclasses
    q, keys, values, bias, is_there, scale, top, total, out, PRODUCTS: tl.constexpr
):
    """One block of keys into the running softmax. q: [Q, D], keys, values: [K, D], bias: [Q, K], is_there: [K]."""
    scores = (tl.dot(q, tl.trans(keys), input_precision=PRODUCTS) + bias) * scale
    scores = tl.where(is_there[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp(top - new_top)
    weights = tl.exp(scores - new_top[:, None])
    out = out * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRODUCTS)
    return new_top, total * shrink + tl.sum(weights, 1), out


@triton.jit(do_not_specialize=["layer", "num_entries", "num_listed", "num_rows", "T"])
def _attend(  # noqa: PLR0913, PLR0915 - as above, and one algorithm
    q, k, v, by_distance, out, arena_keys, arena_values, listed, nums, table, lengths,
    layer, num_entries, num_listed, num_rows, T, scale, q_batch, q_time, k_batch, k_time, v_batch, v_time,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HAS_DISTANCE: tl.constexpr,
    PRODUCTS: tl.constexpr, KIND: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    batch_head = tl.program_id(0)
    batch, head = batch_head // H, batch_head % H
    row, guidance = batch // G, batch % G
    queries = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    is_d = (d < D)[None, :]
    length = tl.load(lengths + row)
    is_query = queries < length
    own_q = batch.to(tl.int64) * q_batch + head * D
    q_tile = tl.load(q + own_q + queries[:, None] * q_time + d[None, :], mask=is_query[:, None] & is_d, other=0.0).to(
        KIND
    )

    num = tl.load(nums + row)
    entry_size = G * H * D
    own_head = (guidance * H + head) * D
    voice_size = tl.load(table + row * 3 + 2)
    voice_keys = tl.load(table + row * 3) + layer.to(tl.int64) * voice_size * entry_size
    voice_values = tl.load(table + row * 3 + 1) + layer.to(tl.int64) * voice_size * entry_size
    arena_layer = layer.to(tl.int64) * num_entries * entry_size
    num_distances = num_listed + 2 * T - 1
    distance_row = ((head.to(tl.int64) * num_rows + row) * T + queries) * num_distances
    # The column of query i and key j.
    first_column = num_listed + T - 1 - num - queries

    top = tl.full((BLOCK_Q,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    result = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    bias = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
    for start in range(0, num, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        is_there = column < num
        entry = tl.load(listed + row.to(tl.int64) * num_listed + column, mask=is_there, other=0)
        ours, shared = arena_layer + entry * entry_size, (-1 - entry) * entry_size
        # Voices are tensors of their own, so that all entries begin where D does: whole vectors can be read.
        from_keys = tl.multiple_of(tl.where(entry >= 0, ours, voice_keys + shared) + own_head, ALIGNED)
        from_values = tl.multiple_of(tl.where(entry >= 0, ours, voice_values + shared) + own_head, ALIGNED)
        is_read = is_there[:, None] & is_d
        keys = tl.load(arena_keys + from_keys[:, None] + d[None, :], mask=is_read, other=0.0).to(KIND)
        values = tl.load(arena_values + from_values[:, None] + d[None, :], mask=is_read, other=0.0).to(KIND)
        if HAS_DISTANCE:
            is_pair = is_query[:, None] & is_there[None, :]
            columns = (distance_row + first_column)[:, None] + column[None, :]
            bias = tl.load(by_distance + columns, mask=is_pair, other=0.0).to(tl.float32)
        top, total, result = _take(q_tile, keys, values, bias, is_there, scale, top, total, result, PRODUCTS)
    for start in range(0, length, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        is_there = column < length
        is_read = is_there[:, None] & is_d
        from_keys = batch.to(tl.int64) * k_batch + head * D + column * k_time
        from_values = batch.to(tl.int64) * v_batch + head * D + column * v_time
        keys = tl.load(k + from_keys[:, None] + d[None, :], mask=is_read, other=0.0).to(KIND)
        values = tl.load(v + from_values[:, None] + d[None, :], mask=is_read, other=0.0).to(KIND)
        if HAS_DISTANCE:
            is_pair = is_query[:, None] & is_there[None, :]
            columns = (distance_row + first_column + num)[:, None] + column[None, :]
            bias = tl.load(by_distance + columns, mask=is_pair, other=0.0).to(tl.float32)
        top, total, result = _take(q_tile, keys, values, bias, is_there, scale, top, total, result, PRODUCTS)
    place = (batch.to(tl.int64) * T + queries)[:, None] * (H * D) + head * D + d[None, :]
    is_out = (queries < T)[:, None] & is_d
    # A tile of padding alone has seen nothing: its sum is 0, and so is what it gives.
    result = result / tl.maximum(total, 1.0e-30)[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=is_out)


def vocoder_attention(  # noqa: PLR0913 - as the operator
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reading: Reading,
    layer: int,
    by_distance: Tensor | None,
    scale: float,
    products: Products,
) -> Tensor:
    """Tensors as in `op.py`."""
    batch, T, H, D = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not T:
        return out
    arena, num_rows = reading.arena, len(reading.nums)
    tile = tiles(q.dtype, products, T, batch * H)
    grid = (batch * H, triton.cdiv(T, tile.num_queries))
    _attend[grid](
        q, k, v, q if by_distance is None else by_distance, out, arena.keys, arena.values,
        reading.listed, reading.nums, reading.table, reading.lengths,
        layer, arena.keys.shape[1], reading.listed.shape[1], num_rows, T, scale,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        G=arena.keys.shape[2], H=H, D=D, HAS_DISTANCE=by_distance is not None, PRODUCTS=products.value,
        # Triton's interpreter, which runs what is not on a GPU, keeps bfloat16 as integers and would multiply those.
        KIND=_KINDS[q.dtype] if q.is_cuda else tl.float32,
        ALIGNED=math.gcd(D, _MAX_ALIGNED), BLOCK_Q=tile.num_queries, BLOCK_K=tile.num_keys,
        BLOCK_D=max(_MIN_DOT, triton.next_power_of_2(D)),
        num_warps=tile.num_warps, num_stages=tile.num_stages, **dependent(q),
    )  # fmt: skip
    return out
