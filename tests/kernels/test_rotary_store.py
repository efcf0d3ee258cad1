"""Norm, rotations and the write into the cache, against formulas in float64, in every place."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.rotary_store import reference
from antiphon.kernels.rotary_store.contract import HeadNorm, StepRotations
from antiphon.kernels.rotary_store.op import rotary_store
from antiphon.kernels.rotation import rotation
from kernels.formulas import EPS, normed, turned
from kernels.places import Place, Run, half_dtypes

THETA = 1e4
BLOCKS, BLOCK_SIZE = 10, 4
RNG = torch.Generator()


@dataclass(frozen=True, slots=True)
class Case:
    """A step of N tokens. q, k, v: views of one projection. anchor, ring, key: [N] int64, positions to rotate to."""

    q: Tensor
    k: Tensor
    v: Tensor
    anchor: Tensor
    ring: Tensor
    key: Tensor
    slots: Tensor
    norm: HeadNorm | None

    def rotations(self) -> StepRotations:
        anchor, ring, key = (rotation(x, self.q.shape[-1], THETA) for x in (self.anchor, self.ring, self.key))
        return StepRotations(anchor, ring, key, self.slots)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RNG)


def case(
    num_tokens: int,
    heads: tuple[int, int, int] = (4, 2, 8),
    *,
    has_norm: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Case:
    """heads: H, Hkv, D."""
    RNG.manual_seed(num_tokens)
    H, HKV, D = heads
    projected = random(num_tokens, (H + 2 * HKV) * D).to(device, dtype).view(num_tokens, H + 2 * HKV, D)
    q, k, v = torch.split(projected, [H, HKV, HKV], dim=1)
    positions = torch.arange(num_tokens) + 5
    shift = 10**9
    # Rows of one tensor, as a step has them.
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=RNG)[:num_tokens]
    columns = torch.stack([positions, positions + shift, positions + shift // 2, slots])
    anchor, ring, key, to = columns.to(device)
    q_weight, k_weight = random(2, D).to(device, dtype)
    return Case(q, k, v, anchor, ring, key, to, HeadNorm(q_weight, k_weight, eps=1e-6) if has_norm else None)


def empty_cache(like: Case) -> tuple[Tensor, Tensor]:
    shape = (BLOCKS, BLOCK_SIZE, *like.k.shape[1:])
    keys, values = (torch.full(shape, torch.nan, dtype=like.k.dtype, device=like.k.device) for _ in range(2))
    return keys, values


def run(place: Place, x: Case, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if place is Place.INTERPRETED:
        from antiphon.kernels.rotary_store import kernel

        return kernel.rotary_store(x.q, x.k, x.v, x.norm, x.rotations(), cache)
    return rotary_store(x.q, x.k, x.v, x.norm, x.rotations(), cache)


def close(got: Tensor, want: Tensor) -> None:
    """The norm sums head_dim squares, the rotation adds five roundings; `turned` shares the angles' own error."""
    largest = want.abs().max().item() if want.numel() else 0.0
    atol = (want.shape[-1] + 8) * EPS * max(1.0, 2 * largest)
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=atol)


def check_formula(place: Place, num_tokens: int, heads: tuple[int, int, int], has_norm: bool) -> None:  # noqa: FBT001
    x = case(num_tokens, heads, has_norm=has_norm, device=place.device)
    keys, values = empty_cache(x)
    q_anchor, q_ring = run(place, x, (keys, values))
    q, k, slots = x.q.cpu(), x.k.cpu(), x.slots.cpu()
    wanted_q = normed(q, x.norm.q_weight.cpu(), x.norm.eps) if x.norm else q
    wanted_k = normed(k, x.norm.k_weight.cpu(), x.norm.eps) if x.norm else k
    close(q_anchor, turned(wanted_q, x.anchor.cpu(), THETA))
    close(q_ring, turned(wanted_q, x.ring.cpu(), THETA))
    assert q_anchor.is_contiguous()
    assert q_ring.is_contiguous()
    keys, values = keys.flatten(0, 1).cpu(), values.flatten(0, 1).cpu()
    close(keys[slots], turned(wanted_k, x.key.cpu(), THETA))
    assert torch.equal(values[slots], x.v.cpu())
    is_untouched = torch.ones(len(keys), dtype=torch.bool).index_fill(0, slots, value=False)
    assert keys[is_untouched].isnan().all()
    assert values[is_untouched].isnan().all()


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 40])
@pytest.mark.parametrize("heads", [(4, 4, 8), (4, 1, 2), (6, 3, 12)])
@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
def test_queries_come_back_in_both_rotations_and_keys_and_values_lie_in_their_slots(
    at: Run,
    num_tokens: int,
    heads: tuple[int, int, int],
    has_norm: bool,  # noqa: FBT001
) -> None:
    at(check_formula, num_tokens, heads, has_norm)


@pytest.mark.parametrize("heads", [(32, 8, 128), (12, 12, 64), (33, 3, 256)], ids=["thinker", "talker", "odd"])
def test_heads_of_the_released_sizes_are_stored_too(at: Run, heads: tuple[int, int, int]) -> None:
    at(check_formula, 3, heads, True)


def compare_rounding(place: Place, dtype: torch.dtype) -> None:
    """Where it rounds is what the reference does; how it sums may move a number across a rounding's edge."""
    x = case(7, (6, 3, 64), has_norm=True, dtype=dtype, device=place.device)
    caches = empty_cache(x), empty_cache(x)
    got = (*run(place, x, caches[0]), *caches[0])
    want = (*reference.rotary_store(x.q, x.k, x.v, x.norm, x.rotations(), caches[1]), *caches[1])
    for one, other in zip(got, want, strict=True):
        one, other = one.nan_to_num(), other.nan_to_num()
        assert (one == other).double().mean() > 0.99
        torch.testing.assert_close(one, other, rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def check_rounding(place: Place) -> None:
    for dtype in half_dtypes(place):
        compare_rounding(place, dtype)


def test_it_rounds_where_the_reference_rounds(at: Run) -> None:
    at(check_rounding)


def check_padding(place: Place) -> None:
    x = case(6, has_norm=True, device=place.device)
    x.slots[torch.tensor([0, 3])] = -1
    whole, cache = empty_cache(x), empty_cache(x)
    results = run(place, x, cache)
    assert all(result.isfinite().all() for result in results)
    written = [1, 2, 4, 5]
    q, k, v, anchor, ring, key, slots = (y[written] for y in (x.q, x.k, x.v, x.anchor, x.ring, x.key, x.slots))
    few = Case(q, k, v, anchor, ring, key, slots, x.norm)
    wanted = run(place, few, whole)
    assert all(torch.equal(one[written], other) for one, other in zip(results, wanted, strict=True))
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(cache, whole, strict=True))


def test_of_a_padding_token_nothing_is_written(at: Run) -> None:
    at(check_padding)


def check_strides(place: Place) -> None:
    x = case(6, device=place.device)
    copied = Case(x.q.contiguous(), x.k.contiguous(), x.v.contiguous(), x.anchor, x.ring, x.key, x.slots, None)
    assert not x.k.is_contiguous()
    caches = empty_cache(x), empty_cache(x)
    got, want = run(place, x, caches[0]), run(place, copied, caches[1])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*caches, strict=True))


def test_views_of_a_projection_give_what_their_copies_give(at: Run) -> None:
    at(check_strides)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a cache of more than 2^31 keys")
def test_a_slot_beyond_two_to_the_31st_element_is_written_where_it_is() -> None:
    x = case(2, (1, 1, 128), dtype=torch.bfloat16, device=torch.device("cuda"))
    block_size = 2**14
    keys, values = (torch.zeros(1025, block_size, 1, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert keys.numel() > 2**31
    x.slots.copy_(torch.tensor([1025 * block_size - 1, 5]))
    rotary_store(x.q, x.k, x.v, None, x.rotations(), (keys, values))
    assert torch.equal(values.flatten(0, 1)[x.slots], x.v)
    assert values.count_nonzero() <= x.v.numel()


def test_keys_that_the_cache_cannot_hold_are_refused() -> None:
    x = case(3)
    keys, values = empty_cache(case(3, (4, 1, 8)))
    with pytest.raises(ShapeError, match=r"k and v \[N, 1, 8\]"):
        rotary_store(x.q, x.k, x.v, None, x.rotations(), (keys, values))
    keys, values = empty_cache(x)
    with pytest.raises(ShapeError, match="like its cache"):
        rotary_store(x.q, x.k, x.v[:2], None, x.rotations(), (keys, values))
    with pytest.raises(ShapeError, match="in one piece"):
        rotary_store(x.q.mT.contiguous().mT, x.k, x.v, None, x.rotations(), (keys, values))
    with pytest.raises(ShapeError, match="contiguous cache"):
        rotary_store(x.q, x.k, x.v, None, x.rotations(), (keys.mT.contiguous().mT, values))
    assert keys.isnan().all()
