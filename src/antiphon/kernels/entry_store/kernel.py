"""`entry_store` in Triton: one program for each token or frame of each guidance row.

Shown, interpreted on the CPU, by tests/kernels/test_entry_store.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.dependent_launch import await_previous, dependent
from antiphon.kernels.entry_store.contract import HeadNorms
from antiphon.kernels.vocoder_attention.contract import Sink


@triton.jit
def _normed(x, weight, bias, eps, is_d, d, D: tl.constexpr):
    """x: [H, D] float32, zero where there is no d."""
    centred = tl.where(is_d, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    spread = tl.sum(centred * centred, 1) / D
    normed = centred * (1.0 / tl.sqrt(spread + eps))[:, None]
    is_own = d < D
    return normed * tl.load(weight + d, mask=is_own, other=0.0)[None, :] + tl.load(bias + d, mask=is_own, other=0.0)


@triton.jit(do_not_specialize=["layer", "num_entries", "T"])
def _store(  # noqa: PLR0913 - as above
    qkv, q_weight, q_bias, k_weight, k_bias, keys, values, places, layer, num_entries, T, eps,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HAS_NORMS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    token = tl.program_id(0)
    batch, t = token // T, token % T
    row, guidance = batch // G, batch % G
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    is_d = (h < H)[:, None] & (d < D)[None, :]
    own = h[:, None] * D + d[None, :]
    here = qkv + token.to(tl.int64) * 3 * H * D + own
    key = tl.load(here + H * D, mask=is_d, other=0.0)
    value = tl.load(here + 2 * H * D, mask=is_d, other=0.0)
    if HAS_NORMS:
        query = tl.load(here, mask=is_d, other=0.0).to(tl.float32)
        normed = _normed(query, q_weight, q_bias, eps, is_d, d, D)
        tl.store(here, normed.to(qkv.dtype.element_ty), mask=is_d)
        # What is remembered is what the chunk itself is read with, rounded once more.
        key = _normed(key.to(tl.float32), k_weight, k_bias, eps, is_d, d, D).to(qkv.dtype.element_ty)
        tl.store(here + H * D, key, mask=is_d)
    place = tl.load(places + row.to(tl.int64) * T + t)
    there = ((layer.to(tl.int64) * num_entries + place) * G + guidance) * H * D + own
    is_kept = is_d & (place + 0 * own >= 0)  # a vector: the interpreter spreads no condition on a single value
    tl.store(keys + there, key.to(keys.dtype.element_ty), mask=is_kept)
    tl.store(values + there, value.to(values.dtype.element_ty), mask=is_kept)


def norm_and_store(qkv: Tensor, norms: HeadNorms, layer: int, sink: Sink) -> None:
    """Tensors as in `op.py`."""
    vectors = (norms.q_weight, norms.q_bias, norms.k_weight, norms.k_bias)
    _launch(qkv, vectors, norms.eps, layer, sink, has_norms=True)


def store(qkv: Tensor, layer: int, sink: Sink) -> None:
    """Tensors as in `op.py`."""
    _launch(qkv, (qkv,) * 4, 0.0, layer, sink, has_norms=False)


def _launch(qkv: Tensor, vectors: tuple[Tensor, ...], eps: float, layer: int, sink: Sink, *, has_norms: bool) -> None:
    B, T, _, H, D = qkv.shape
    entries = sink.entries
    if B * T:
        _store[(B * T,)](
            qkv, *vectors, entries.keys, entries.values, sink.places, layer, entries.keys.shape[1], T, eps,
            G=entries.keys.shape[2], H=H, D=D, HAS_NORMS=has_norms,
            BLOCK_H=triton.next_power_of_2(H), BLOCK_D=triton.next_power_of_2(D),
            **dependent(qkv),
        )  # fmt: skip
