"""`frame_norm` in Triton: one program a frame.

Shown, interpreted on the CPU, by tests/kernels/test_frame_norm.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.dependent_launch import await_previous, dependent
from antiphon.kernels.frame_norm.contract import TAIL_FRAMES, ConvTails, Update


@triton.jit
def _spread(  # noqa: PLR0913 - Triton's own types; it knows no dataclasses
    value, windows, tails, sources, places, lengths, b, t, T, c, is_c, index, num_convs,
    G: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store a frame in the windows that it is part of, and in the tail if it is one of the last two.

    The first frame also brings what stood before it.
    """
    row, guidance = b // G, b % G
    at = t + 0 * c  # conditions on vectors: the interpreter spreads none of a single value
    first = b.to(tl.int64) * T * 3 * C
    here = windows + first + t * 3 * C + c
    kind = windows.dtype.element_ty
    tl.store(here + 2 * C, value.to(kind), mask=is_c)
    tl.store(here + 4 * C, value.to(kind), mask=is_c & (at + 1 < T))
    tl.store(here + 6 * C, value.to(kind), mask=is_c & (at + 2 < T))
    own = (index.to(tl.int64) * G + guidance) * 2 * C
    length = tl.load(lengths + row)
    place = tl.load(places + row)
    is_kept = is_c & (place + 0 * c >= 0)
    after = tails + place * (num_convs.to(tl.int64) * G * 2 * C) + own + c
    tl.store(after, value, mask=is_kept & (at == length - 2))
    tl.store(after + C, value, mask=is_kept & (at == length - 1))
    if t == 0:
        before = tails + tl.multiple_of(tl.load(sources + row), 4) + own + c
        older = tl.load(before, mask=is_c, other=0.0)
        newer = tl.load(before + C, mask=is_c, other=0.0)
        tl.store(here, older.to(kind), mask=is_c)
        tl.store(here + C, newer.to(kind), mask=is_c)
        tl.store(here + 3 * C, newer.to(kind), mask=is_c & (at + 1 < T))
        tl.store(after, newer, mask=is_kept & (at == length - 1))


@triton.jit(do_not_specialize=["T", "index", "num_convs"])
def _modulate(  # noqa: PLR0913 - as above
    x, y, gate, shift, scale, out, tails, sources, places, lengths, T, index, num_convs, eps,
    HAS_UPDATE: tl.constexpr, HAS_WINDOWS: tl.constexpr, G: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    frame = tl.program_id(0)
    c = tl.arange(0, BLOCK_C)
    is_c = c < C
    start = frame.to(tl.int64) * C
    value = tl.load(x + start + c, mask=is_c, other=0.0)
    if HAS_UPDATE:
        added = tl.load(y + start + c, mask=is_c, other=0.0).to(tl.float32)
        value += tl.load(gate + c, mask=is_c, other=0.0) * added
        tl.store(x + start + c, value, mask=is_c)
    mean = tl.sum(value, 0) / C
    centred = tl.where(is_c, value - mean, 0.0)
    spread = tl.sum(centred * centred, 0) / C
    normed = centred * (1.0 / tl.sqrt(spread + eps))
    normed = normed * (1.0 + tl.load(scale + c, mask=is_c, other=0.0)) + tl.load(shift + c, mask=is_c, other=0.0)
    if HAS_WINDOWS:
        b, t = frame // T, frame % T
        _spread(normed, out, tails, sources, places, lengths, b, t, T, c, is_c, index, num_convs, G, C)
    else:
        tl.store(out + start + c, normed.to(out.dtype.element_ty), mask=is_c)


@triton.jit(do_not_specialize=["T", "index", "num_convs"])
def _mish(  # noqa: PLR0913 - as above
    y, weight, bias, out, tails, sources, places, lengths, T, index, num_convs, eps,
    G: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    frame = tl.program_id(0)
    c = tl.arange(0, BLOCK_C)
    is_c = c < C
    value = tl.load(y + frame.to(tl.int64) * C + c, mask=is_c, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / C
    centred = tl.where(is_c, value - mean, 0.0)
    spread = tl.sum(centred * centred, 0) / C
    normed = centred * (1.0 / tl.sqrt(spread + eps))
    normed = normed * tl.load(weight + c, mask=is_c, other=0.0) + tl.load(bias + c, mask=is_c, other=0.0)
    # mish(z) = z tanh(ln(1 + e^z)) = z ((1 + e^z)² - 1) / ((1 + e^z)² + 1); above 20 it is z in float32.
    e = tl.exp(tl.minimum(normed, 20.0))
    grown = e * (e + 2.0)
    normed = tl.where(normed > 20.0, normed, normed * grown / (grown + 2.0))
    b, t = frame // T, frame % T
    _spread(normed, out, tails, sources, places, lengths, b, t, T, c, is_c, index, num_convs, G, C)


def modulated(
    x: Tensor, update: Update | None, shift: Tensor, scale: Tensor, *, eps: float, dtype: torch.dtype
) -> Tensor:
    """Tensors as in `op.py`."""
    B, T, C = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    y, gate = (x, shift) if update is None else (update.y, update.gate)
    if B * T:
        _modulate[(B * T,)](
            x, y, gate, shift, scale, out, x, x, x, x, T, 0, 0, eps,
            HAS_UPDATE=update is not None, HAS_WINDOWS=False, G=1, C=C, BLOCK_C=triton.next_power_of_2(C),
            **dependent(x),
        )  # fmt: skip
    return out


def modulated_windows(  # noqa: PLR0913 - as the operator
    x: Tensor,
    update: Update | None,
    shift: Tensor,
    scale: Tensor,
    tails: ConvTails,
    index: int,
    *,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Tensors as in `op.py`."""
    B, T, C = x.shape
    out = torch.empty(B, T, (TAIL_FRAMES + 1) * C, dtype=dtype, device=x.device)
    y, gate = (x, shift) if update is None else (update.y, update.gate)
    if B * T:
        _modulate[(B * T,)](
            x, y, gate, shift, scale, out, tails.arena, tails.sources, tails.places, tails.lengths,
            T, index, tails.arena.shape[1], eps,
            HAS_UPDATE=update is not None, HAS_WINDOWS=True, G=tails.arena.shape[2], C=C,
            BLOCK_C=triton.next_power_of_2(C), **dependent(x),
        )  # fmt: skip
    return out


def mish_windows(y: Tensor, weight: Tensor, bias: Tensor, tails: ConvTails, index: int, *, eps: float) -> Tensor:
    """Tensors as in `op.py`."""
    B, T, C = y.shape
    out = torch.empty(B, T, (TAIL_FRAMES + 1) * C, dtype=y.dtype, device=y.device)
    if B * T:
        _mish[(B * T,)](
            y, weight, bias, out, tails.arena, tails.sources, tails.places, tails.lengths,
            T, index, tails.arena.shape[1], eps,
            G=tails.arena.shape[2], C=C, BLOCK_C=triton.next_power_of_2(C), **dependent(y),
        )  # fmt: skip
    return out
