"""`paged_attention` in Triton: a part of a row's keys per program, anchor keys first, then the ring's; then the sum.

A program serves some tokens of one row (a tile) with all query heads of one key head, so that a key is read once for
them. Where the tiles are fewer than the GPU has room for, several programs share a tile's keys and a last launch adds
up what they found. How many do is read from the device, so that a recorded step is cut by who is in it. Shown,
interpreted on the CPU, by tests/kernels/test_paged_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.dependent_launch import await_previous, dependent
from antiphon.kernels.kv_cache import LayerCache, StepLayout
from antiphon.kernels.paged_attention.tiles import (
    MAX_PARTS,
    PART_NUMBERS,
    QUERIES_PER_TILE,
    TOKEN_NUMBERS,
    TileKind,
    Tiles,
    padded_group,
)

_LOG2_E = 1.4426950408889634
_MIN_DOT = 16
"""Smallest side of a product."""

_VALUE_UNIT = 512.0
"""What weights are multiplied by beside the scales of float8 values, which are as small as the values' largest number
is great: so float16 holds them however small the values are, up to values of 57 000."""

_SMALL_HEAD_DIM = 64
_LINE_BYTES = 128

_KINDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _halves(
    numbers, place, is_there, D: tl.constexpr, HALF: tl.constexpr, IN_PAIRS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Keys or values from these places on, in two halves, [K, HALF] each of `KIND`."""
    d = tl.arange(0, HALF)
    if IN_PAIRS:
        # Read as numbers of 16 bits, which find their way to the tensor cores as such do; bytes go one by one.
        at = (place >> 1)[:, None] + d[None, :]
        mask = is_there[:, None] & (d < D // 2)[None, :]
        pairs = tl.load(numbers.to(tl.pointer_type(tl.int16), bitcast=True) + at, mask=mask, other=0)
        first, second = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {a, b}, $2;"
            " cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;"
            " prmt.b32 $0, x, y, 0x5410; prmt.b32 $1, x, y, 0x7632; }",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        at = numbers + place[:, None] + d[None, :]
        first = tl.load(at, mask=is_there[:, None] & (d < D)[None, :], other=0.0).to(KIND)
        second = tl.load(at + HALF, mask=is_there[:, None] & (d + HALF < D)[None, :], other=0.0).to(KIND)
    return first, second


@triton.jit
def _query_halves(
    queries, at, is_query, D: tl.constexpr, HALF: tl.constexpr, IN_PAIRS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Queries from these places on, in the same halves, [M, HALF] each."""
    if IN_PAIRS:
        d = tl.arange(0, 2 * HALF)
        both = tl.load(queries + at[:, None] + d[None, :], mask=is_query[:, None] & (d < D)[None, :], other=0.0)
        first, second = tl.split(both.to(KIND).reshape(at.shape[0], HALF, 2))
    else:
        first, second = _halves(queries, at, is_query, D, HALF, False, KIND)
    return first, second


@triton.jit
def _store(  # noqa: PLR0913 - as below
    first, second, to, at, is_there, D: tl.constexpr, HALF: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Write two halves, [M, HALF] each, to places from `at` on."""
    kind = to.dtype.element_ty
    if IN_PAIRS:
        d = tl.arange(0, 2 * HALF)
        both = tl.join(first, second).reshape(at.shape[0], 2 * HALF)
        tl.store(to + at[:, None] + d[None, :], both.to(kind), mask=is_there[:, None] & (d < D)[None, :])
    else:
        d = tl.arange(0, HALF)
        place = to + at[:, None] + d[None, :]
        tl.store(place, first.to(kind), mask=is_there[:, None] & (d < D)[None, :])
        tl.store(place + HALF, second.to(kind), mask=is_there[:, None] & (d + HALF < D)[None, :])


@triton.jit(do_not_specialize=["max_keys", "first_place", "num_places"])
def _attend(  # noqa: PLR0912, PLR0913, PLR0915 - as above; one algorithm
    q_anchor, q_ring, keys, values, key_scales, value_scales, key_slots, parts, out, sums, tops,
    max_keys, slot_stride, head_stride, scale, first_place, num_places,
    H: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    PART_NUMBERS: tl.constexpr, HAS_SCALES: tl.constexpr, IN_PAIRS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VALUE_UNIT: tl.constexpr, HEADS_FIRST: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    if HEADS_FIRST:
        head, own = tl.program_id(0), tl.program_id(1)
    else:
        own, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(parts + PART_NUMBERS * own)
    if row < 0:
        return
    token_end = tl.load(parts + PART_NUMBERS * own + 2)
    num_keys = tl.load(parts + PART_NUMBERS * own + 3)
    num_anchor = tl.load(parts + PART_NUMBERS * own + 4)
    part = tl.load(parts + PART_NUMBERS * own + 5)
    num_parts = tl.load(parts + PART_NUMBERS * own + 6)
    m = tl.arange(0, BLOCK_M)
    token = tl.load(parts + PART_NUMBERS * own + 1) + m // GROUP
    is_query = (token < token_end) & (m % GROUP < H // HKV)
    # The row's last token has the last key's position.
    position = tl.where(is_query, num_keys - token_end + token, 0)
    # No token of the tile sees a key behind its last one.
    num_keys = tl.minimum(num_keys, tl.max(position, 0) + 1)
    size = tl.cdiv(tl.cdiv(num_keys, num_parts), BLOCK_K) * BLOCK_K
    begin = part * size
    last = tl.minimum(begin + size, num_keys)
    anchor_end, ring_start = tl.minimum(last, num_anchor), tl.maximum(begin, num_anchor)

    at = (token.to(tl.int64) * H + head * (H // HKV) + m % GROUP) * D
    slots = key_slots + row.to(tl.int64) * max_keys
    head_start = head.to(tl.int64) * head_stride
    top = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    found_first = tl.zeros((BLOCK_M, HALF), tl.float32)
    found_second = tl.zeros((BLOCK_M, HALF), tl.float32)
    # Anchor keys, then ring keys: each side's query stands in registers while its keys go by.
    for side in range(tl.where(begin < anchor_end, 0, 1), tl.where(ring_start < last, 2, 1)):
        if side == 0:
            queries, start, end = q_anchor, begin, anchor_end
        else:
            queries, start, end = q_ring, ring_start, last
        q_first, q_second = _query_halves(queries, at, is_query, D, HALF, IN_PAIRS, KIND)
        seen_end = tl.minimum(position + 1, end)
        for block in range(start, end, BLOCK_K):
            index = block + tl.arange(0, BLOCK_K)
            is_there = index < end
            slot = tl.load(slots + index, mask=is_there, other=0).to(tl.int64)
            place = head_start + slot * slot_stride
            k_first, k_second = _halves(keys, place, is_there, D, HALF, IN_PAIRS, KIND)
            scores = tl.dot(q_first, tl.trans(k_first), input_precision=PRECISION)
            scores = tl.dot(q_second, tl.trans(k_second), scores, input_precision=PRECISION)
            if HAS_SCALES:
                scale_place = (slot // BLOCK_SIZE * HKV + head) * BLOCK_SIZE + slot % BLOCK_SIZE
                scores *= (tl.load(key_scales + scale_place, mask=is_there, other=0.0) * scale)[None, :]
            else:
                scores *= scale
            scores = tl.where(index[None, :] < seen_end[:, None], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp2(top - new_top)
            weights = tl.exp2(scores - new_top[:, None])
            total = total * shrink + tl.sum(weights, 1)
            if HAS_SCALES:
                weights *= (tl.load(value_scales + scale_place, mask=is_there, other=0.0) * VALUE_UNIT)[None, :]
            v_first, v_second = _halves(values, place, is_there, D, HALF, IN_PAIRS, KIND)
            narrow = weights.to(KIND)
            found_first = tl.dot(narrow, v_first, found_first * shrink[:, None], input_precision=PRECISION)
            found_second = tl.dot(narrow, v_second, found_second * shrink[:, None], input_precision=PRECISION)
            top = new_top
    if HAS_SCALES:
        found_first, found_second = found_first * (1 / VALUE_UNIT), found_second * (1 / VALUE_UNIT)
    if num_parts == 1:
        found_first, found_second = found_first / total[:, None], found_second / total[:, None]
        _store(found_first, found_second, out, at, is_query, D, HALF, IN_PAIRS)
    else:
        # A part without a key it may see has total 0 and weighs nothing.
        to = (head * num_places + first_place + own * BLOCK_M).to(tl.int64) + m
        _store(found_first, found_second, sums, to * D, m >= 0, D, HALF, IN_PAIRS)
        tl.store(tops + 2 * to, top)
        tl.store(tops + 2 * to + 1, total)


@triton.jit
def _add_up(  # noqa: PLR0913 - as above
    sums, tops, tokens, out, first_large_place, num_places,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr,
    MAX_PARTS: tl.constexpr, BLOCK_D: tl.constexpr, TOKEN_NUMBERS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One query head of one token: its tile's parts, in order."""
    await_previous(IS_DEPENDENT)
    token, head = tl.program_id(0), tl.program_id(1)
    num_parts = tl.load(tokens + TOKEN_NUMBERS * token + 1)
    if num_parts < 2:
        return
    first = tl.load(tokens + TOKEN_NUMBERS * token)
    is_large = tl.load(tokens + TOKEN_NUMBERS * token + 3) > 0
    p, d = tl.arange(0, MAX_PARTS), tl.arange(0, BLOCK_D)
    is_there = p < num_parts
    place = tl.where(is_large, first_large_place, 0) + (first + p) * tl.where(is_large, LARGE, SMALL)
    place += tl.load(tokens + TOKEN_NUMBERS * token + 2) + head % (H // HKV)
    place = (head // (H // HKV) * num_places + place).to(tl.int64)
    top = tl.load(tops + 2 * place, mask=is_there, other=-1.0e30)
    total = tl.load(tops + 2 * place + 1, mask=is_there, other=0.0)
    weight = tl.exp2(top - tl.max(top, 0))
    mask = is_there[:, None] & (d < D)[None, :]
    found = tl.load(sums + place[:, None] * D + d[None, :], mask=mask, other=0.0)
    result = tl.sum(found * weight[:, None], 0) / tl.sum(total * weight, 0)
    at = (token.to(tl.int64) * H + head) * D + d
    tl.store(out + at, result.to(out.dtype.element_ty), mask=d < D)


def paged_attention(q_anchor: Tensor, q_ring: Tensor, cache: LayerCache, step: StepLayout, scale: float) -> Tensor:
    """Tensors as in `op.py`."""
    out = torch.empty_like(q_anchor)
    N, H, D = out.shape
    HKV, places = cache.keys.shape[2], _Places.of(step.tiles)
    sums = torch.empty((HKV * places.num, D), dtype=torch.float32, device=out.device)
    tops = torch.empty((HKV * places.num, 2), dtype=torch.float32, device=out.device)
    for tiles, first_place in zip(step.tiles, places.firsts, strict=True):
        if tiles.parts.shape[0]:
            launch = _Launch.of(q_anchor, cache, tiles.kind)
            scales = (out, out) if cache.scales is None else (cache.scales.keys, cache.scales.values)
            grid = (HKV, tiles.parts.shape[0])
            _attend[grid if launch.heads_first else grid[::-1]](
                q_anchor, q_ring, cache.keys, cache.values, *scales, step.key_slots, tiles.parts, out, sums, tops,
                step.max_keys, HKV * D, D, scale * _LOG2_E, first_place, places.num,
                H=H, HKV=HKV, GROUP=padded_group(H // HKV), D=D,
                BLOCK_M=QUERIES_PER_TILE[tiles.kind], BLOCK_K=launch.block_k, HALF=launch.half, KIND=launch.kind,
                PRECISION=launch.precision, PART_NUMBERS=PART_NUMBERS,
                HAS_SCALES=cache.scales is not None, IN_PAIRS=launch.in_pairs, BLOCK_SIZE=cache.keys.shape[1],
                VALUE_UNIT=_VALUE_UNIT, HEADS_FIRST=launch.heads_first, num_warps=launch.num_warps, num_stages=2,
                **dependent(q_anchor),
            )  # fmt: skip
    if N:
        _add_up[(N, H)](
            sums, tops, step.token_parts, out, places.firsts[1], places.num,
            H=H, HKV=HKV, D=D, SMALL=QUERIES_PER_TILE[TileKind.SMALL], LARGE=QUERIES_PER_TILE[TileKind.LARGE],
            MAX_PARTS=MAX_PARTS, BLOCK_D=triton.next_power_of_2(D), TOKEN_NUMBERS=TOKEN_NUMBERS,
            **dependent(out),
        )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class _Places:
    """Where parts leave what they found, for each key head: one place per query. firsts: of the parts of each kind."""

    firsts: tuple[int, int]
    num: int

    @staticmethod
    def of(tiles: tuple[Tiles, Tiles]) -> _Places:
        num_small, num_large = (one.parts.shape[0] * QUERIES_PER_TILE[one.kind] for one in tiles)
        return _Places((0, num_small), num_small + num_large)


@dataclass(frozen=True, slots=True)
class _Launch:
    """How parts of one kind of tiles are launched.

    half: of a head, as a side of the kernel's products. kind: of the numbers that are multiplied. in_pairs: float8 is
    read two numbers at once. heads_first: a part's programs follow one another, else those of a head.
    """

    block_k: int
    half: int
    kind: tl.dtype
    precision: str
    in_pairs: bool
    heads_first: bool
    num_warps: int

    @staticmethod
    def of(q: Tensor, cache: LayerCache, kind: TileKind) -> _Launch:
        is_float32, is_float8 = q.dtype is torch.float32, cache.scales is not None
        # Float8 becomes float16 exactly, and two numbers at once.
        of_half = tl.float16 if is_float8 else _KINDS[cache.keys.dtype]
        return _Launch(
            block_k=32 if is_float32 else 64,
            half=max(_MIN_DOT, triton.next_power_of_2(q.shape[2]) // 2),
            kind=tl.float32 if is_float32 else of_half,
            precision="ieee" if is_float32 else "tf32",
            # Triton's interpreter, which runs what is not on a GPU, knows no assembly.
            in_pairs=is_float8 and not is_float32 and q.is_cuda,
            # Found by trying: heads of 128 bytes side by side are better read apart.
            heads_first=cache.keys[0, 0, 0].nbytes > _LINE_BYTES,
            num_warps=2 if kind is TileKind.SMALL and q.shape[2] > _SMALL_HEAD_DIM else 4,
        )
