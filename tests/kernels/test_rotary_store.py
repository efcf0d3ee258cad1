"""Norm, rotations and the write into the cache, against formulas in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.rotary_store.contract import HeadNorm, StepRotations
from antiphon.kernels.rotary_store.op import rotary_store
from antiphon.kernels.rotation import rotation
from kernels.formulas import EPS, normed, turned

THETA = 1e4
RNG = torch.Generator()


@dataclass(frozen=True, slots=True)
class Case:
    """A step of N tokens. anchor, ring, key: [N] int64, positions to rotate to."""

    q: Tensor
    k: Tensor
    v: Tensor
    anchor: Tensor
    ring: Tensor
    key: Tensor
    slots: Tensor

    def rotations(self) -> StepRotations:
        anchor, ring, key = (rotation(x, self.q.shape[-1], THETA) for x in (self.anchor, self.ring, self.key))
        return StepRotations(anchor, ring, key, self.slots)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RNG)


def case(num_tokens: int, *, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 8, shift: int = 10**9) -> Case:
    RNG.manual_seed(num_tokens)
    positions = torch.arange(num_tokens) + 5
    return Case(
        q=random(num_tokens, num_heads, head_dim),
        k=random(num_tokens, num_kv_heads, head_dim),
        v=random(num_tokens, num_kv_heads, head_dim),
        anchor=positions,
        ring=positions + shift,
        key=positions + shift // 2,
        slots=torch.randperm(40, generator=RNG)[:num_tokens],
    )


def empty_cache(like: Case) -> tuple[Tensor, Tensor]:
    shape = (10, 4, *like.k.shape[1:])
    return torch.full(shape, torch.nan), torch.full(shape, torch.nan)


def close(got: Tensor, want: Tensor) -> None:
    """The norm sums head_dim squares, the rotation adds five roundings; `turned` shares the angles' own error."""
    largest = want.abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want, rtol=0, atol=(want.shape[-1] + 8) * EPS * max(1.0, 2 * largest))


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 40])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 8), (4, 1, 2), (6, 3, 12)])
@pytest.mark.parametrize("has_norm", ["norm", "no norm"])
def test_queries_come_back_in_both_rotations_and_keys_and_values_lie_in_their_slots(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, has_norm: str
) -> None:
    x = case(num_tokens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    norm = HeadNorm(random(head_dim), random(head_dim), eps=1e-6) if has_norm == "norm" else None
    keys, values = empty_cache(x)
    q_anchor, q_ring = rotary_store(x.q, x.k, x.v, norm, x.rotations(), (keys, values))
    q = normed(x.q, norm.q_weight, norm.eps) if norm else x.q
    k = normed(x.k, norm.k_weight, norm.eps) if norm else x.k
    close(q_anchor, turned(q, x.anchor, THETA))
    close(q_ring, turned(q, x.ring, THETA))
    close(keys.flatten(0, 1)[x.slots], turned(k, x.key, THETA))
    assert torch.equal(values.flatten(0, 1)[x.slots], x.v)
    is_untouched = torch.ones(40, dtype=torch.bool).index_fill(0, x.slots, value=False)
    assert keys.flatten(0, 1)[is_untouched].isnan().all()
    assert values.flatten(0, 1)[is_untouched].isnan().all()


def test_strided_operands_give_what_their_copies_give() -> None:
    x = case(6)
    q, k, v = (tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (x.q, x.k, x.v))
    assert not q.is_contiguous()
    caches = empty_cache(x), empty_cache(x)
    got = rotary_store(q, k, v, None, x.rotations(), caches[0])
    want = rotary_store(x.q, x.k, x.v, None, x.rotations(), caches[1])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*caches, strict=True))


def test_keys_that_the_cache_cannot_hold_are_refused() -> None:
    x = case(3)
    keys, values = empty_cache(case(3, num_kv_heads=1))
    with pytest.raises(ShapeError, match=r"k and v \[N, 1, 8\]"):
        rotary_store(x.q, x.k, x.v, None, x.rotations(), (keys, values))
    keys, values = empty_cache(x)
    with pytest.raises(ShapeError, match="like its cache"):
        rotary_store(x.q, x.k, x.v[:2], None, x.rotations(), (keys, values))
    assert keys.isnan().all()
