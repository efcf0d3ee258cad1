"""`step_rotations` in Triton: angles in float64, one program for some tokens of one column.

Shown, interpreted on the CPU, by tests/kernels/test_step_rotations.py.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.dependent_launch import await_previous, dependent
from antiphon.kernels.rotation import Rotation

_TOKENS = 4
"""Of a program. With heads of 128 each of its 128 threads takes two angles; 512 tokens fill 132 SMs three times."""


# The columns of a step are rows of one uploaded tensor: their alignment changes with the number of tokens, and must not
# compile anew.
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["anchor", "ring", "key"])
def _turn(  # noqa: PLR0913 - Triton's own types; it knows no dataclasses
    anchor, ring, key, table, num_tokens,
    LOG2_THETA: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    column = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    if column == 0:
        position = tl.load(anchor + token, mask=is_token, other=0)
    elif column == 1:
        position = tl.load(ring + token, mask=is_token, other=0)
    else:
        position = tl.load(key + token, mask=is_token, other=0)
    pair = tl.arange(0, BLOCK_HALF)
    exponent = pair.to(tl.float64) * tl.full((), -LOG2_THETA / HALF, tl.float64)
    angle = position.to(tl.float64)[:, None] * tl.exp2(exponent)[None, :]
    is_there = is_token[:, None] & (pair < HALF)[None, :]
    cos = (2 * column.to(tl.int64) * num_tokens + token)[:, None] * HALF + pair[None, :]
    tl.store(table + cos, tl.cos(angle).to(tl.float32), mask=is_there)
    sin = ((2 * column.to(tl.int64) + 1) * num_tokens + token)[:, None] * HALF + pair[None, :]
    tl.store(table + sin, tl.sin(angle).to(tl.float32), mask=is_there)


def step_rotations(
    anchor: Tensor, ring: Tensor, key: Tensor, head_dim: int, theta: float
) -> tuple[Rotation, Rotation, Rotation]:
    """Tensors as in `op.py`."""
    num_tokens, half = anchor.shape[0], head_dim // 2
    table = torch.empty((3, 2, num_tokens, half), dtype=torch.float32, device=anchor.device)
    if num_tokens:
        _turn[(triton.cdiv(num_tokens, _TOKENS), 3)](
            anchor.contiguous(), ring.contiguous(), key.contiguous(), table, num_tokens,
            LOG2_THETA=math.log2(theta), HALF=half, TOKENS=_TOKENS, BLOCK_HALF=triton.next_power_of_2(half),
            num_warps=4, **dependent(anchor),
        )  # fmt: skip
    (a, b), (c, d), (e, f) = table
    return Rotation(a, b), Rotation(c, d), Rotation(e, f)
