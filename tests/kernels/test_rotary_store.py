"""Norm, rotations and the write into the cache, against formulas in float64, in every place."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.kv_cache import KVCache, LayerCache, Scales
from antiphon.kernels.rotary_store import reference
from antiphon.kernels.rotary_store.contract import LARGEST, SMALLEST_SCALE, HeadNorm, StepRotations
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


def empty_cache(like: Case) -> LayerCache:
    """Full of NaN."""
    shape = (BLOCKS, BLOCK_SIZE, *like.k.shape[1:])
    keys, values = (torch.full(shape, torch.nan, dtype=like.k.dtype, device=like.k.device) for _ in range(2))
    return LayerCache(keys, values)


def scaled_cache(like: Case) -> LayerCache:
    """The same in float8."""
    empty = empty_cache(like)
    shape = (BLOCKS, like.k.shape[1], BLOCK_SIZE)
    scales = Scales(*(torch.full(shape, torch.nan, device=like.k.device) for _ in range(2)))
    return LayerCache(empty.keys.to(torch.float8_e4m3fn), empty.values.to(torch.float8_e4m3fn), scales)


def stored_in(cache: LayerCache) -> tuple[Tensor, ...]:
    """All that it holds, as numbers of float32 or wider, on the CPU."""
    scales = () if cache.scales is None else (cache.scales.keys, cache.scales.values)
    return tuple(tensor.float().cpu() for tensor in (cache.keys, cache.values, *scales))


def by_slot(scales: Tensor) -> Tensor:
    """[BLOCKS, Hkv, BLOCK_SIZE] → [slots, Hkv]."""
    return scales.mT.flatten(0, 1)


def run(place: Place, x: Case, cache: LayerCache) -> tuple[Tensor, Tensor]:
    if place is Place.INTERPRETED:
        from antiphon.kernels.rotary_store import kernel

        return kernel.rotary_store(x.q, x.k, x.v, x.norm, x.rotations(), cache)
    return rotary_store(x.q, x.k, x.v, x.norm, x.rotations(), cache)


CACHES = {"empty_cache": empty_cache, "scaled_cache": scaled_cache}


def close(got: Tensor, want: Tensor) -> None:
    """The norm sums head_dim squares, the rotation adds five roundings; `turned` shares the angles' own error."""
    largest = want.abs().max().item() if want.numel() else 0.0
    atol = (want.shape[-1] + 8) * EPS * max(1.0, 2 * largest)
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=atol)


def check_formula(place: Place, num_tokens: int, heads: tuple[int, int, int], has_norm: bool) -> None:  # noqa: FBT001
    x = case(num_tokens, heads, has_norm=has_norm, device=place.device)
    cache = empty_cache(x)
    q_anchor, q_ring = run(place, x, cache)
    q, k, slots = x.q.cpu(), x.k.cpu(), x.slots.cpu()
    wanted_q = normed(q, x.norm.q_weight.cpu(), x.norm.eps) if x.norm else q
    wanted_k = normed(k, x.norm.k_weight.cpu(), x.norm.eps) if x.norm else k
    close(q_anchor, turned(wanted_q, x.anchor.cpu(), THETA))
    close(q_ring, turned(wanted_q, x.ring.cpu(), THETA))
    assert q_anchor.is_contiguous()
    assert q_ring.is_contiguous()
    keys, values = (tensor.flatten(0, 1) for tensor in stored_in(cache))
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


def check_scaled(place: Place, num_tokens: int, heads: tuple[int, int, int], has_norm: bool) -> None:  # noqa: FBT001
    """Rounding costs a sixteenth of a number, or half of the smallest step.

    A number of e4m3 has 3 bits behind its first one; below 2^-6 there are steps of 2^-9, which the scale multiplies.
    """
    x = case(num_tokens, heads, has_norm=has_norm, device=place.device)
    cache = scaled_cache(x)
    got = run(place, x, cache)
    want = run(place, x, empty_cache(x))
    for one, other in zip(got, want, strict=True):
        # Queries are as ever, but that another kernel may join another product and sum into one rounding.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    k, v, slots = x.k.cpu(), x.v.cpu(), x.slots.cpu()
    wanted_k = normed(k, x.norm.k_weight.cpu(), x.norm.eps) if x.norm else k
    keys, values, key_scales, value_scales = stored_in(cache)
    for stored, scales, wanted in (
        (keys, key_scales, turned(wanted_k, x.key.cpu(), THETA)),
        (values, value_scales, v.double()),
    ):
        numbers, scales = stored.flatten(0, 1), by_slot(scales)
        torch.testing.assert_close(
            scales[slots].double(), wanted.abs().amax(-1) / LARGEST, rtol=(wanted.shape[-1] + 8) * EPS, atol=0
        )
        assert (numbers[slots].abs().amax(-1) == LARGEST).all()
        error = (numbers[slots].double() * scales[slots, :, None].double() - wanted).abs()
        bound = torch.maximum(wanted.abs() / 16, scales[slots, :, None] * 2.0**-10)
        largest = wanted.abs().max().item() if wanted.numel() else 0.0
        assert (error <= bound + (wanted.shape[-1] + 8) * EPS * max(1.0, 2 * largest)).all()
        is_untouched = torch.ones(len(numbers), dtype=torch.bool).index_fill(0, slots, value=False)
        assert numbers[is_untouched].isnan().all()
        assert scales[is_untouched].isnan().all()


@pytest.mark.parametrize("num_tokens", [0, 1, 40])
@pytest.mark.parametrize("heads", [(4, 4, 8), (4, 1, 2), (6, 3, 12), (32, 8, 128)])
@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
def test_in_float8_keys_and_values_lie_in_their_slots_within_its_steps(
    at: Run,
    num_tokens: int,
    heads: tuple[int, int, int],
    has_norm: bool,  # noqa: FBT001
) -> None:
    at(check_scaled, num_tokens, heads, has_norm)


def check_same_float8(place: Place) -> None:
    """Of values, which are neither normed nor rotated: of every size, also beneath the smallest step, and of ties."""
    x = case(40, (2, 2, 128), device=place.device)
    x.v.mul_(10 ** (-6 * torch.rand(x.v.shape, generator=RNG).to(x.v.device)))
    x.v[3] = 0
    x.v[4] = LARGEST * torch.arange(-64, 64, device=x.v.device) / 64
    x.v[5] = (torch.arange(128, device=x.v.device) - 64) * 2.0**-10
    x.v[5, :, 0] = -LARGEST
    cache = scaled_cache(x)
    run(place, x, cache)
    want, scales = reference.quantised(x.v)
    _, values, _, value_scales = stored_in(cache)
    assert torch.equal(values.flatten(0, 1)[x.slots.cpu()], want.float().cpu())
    assert torch.equal(by_slot(value_scales)[x.slots.cpu()], scales.cpu())
    assert (by_slot(value_scales)[x.slots.cpu()][3] == SMALLEST_SCALE).all()


def test_in_float8_what_is_stored_is_what_the_reference_stores(at: Run) -> None:
    at(check_same_float8)


def compare_rounding(place: Place, dtype: torch.dtype) -> None:
    """Where it rounds is what the reference does; how it sums may move a number across a rounding's edge."""
    x = case(7, (6, 3, 64), has_norm=True, dtype=dtype, device=place.device)
    caches = empty_cache(x), empty_cache(x)
    got = (*run(place, x, caches[0]), caches[0].keys, caches[0].values)
    results = reference.rotary_store(x.q, x.k, x.v, x.norm, x.rotations(), caches[1])
    want = (*results, caches[1].keys, caches[1].values)
    for one, other in zip(got, want, strict=True):
        one, other = one.nan_to_num(), other.nan_to_num()
        assert (one == other).double().mean() > 0.99
        torch.testing.assert_close(one, other, rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def check_rounding(place: Place) -> None:
    for dtype in half_dtypes(place):
        compare_rounding(place, dtype)


def test_it_rounds_where_the_reference_rounds(at: Run) -> None:
    at(check_rounding)


def check_padding(place: Place, make: str) -> None:
    x = case(6, has_norm=True, device=place.device)
    x.slots[torch.tensor([0, 3])] = -1
    whole, cache = (CACHES[make](x) for _ in range(2))
    results = run(place, x, cache)
    assert all(result.isfinite().all() for result in results)
    written = [1, 2, 4, 5]
    q, k, v, anchor, ring, key, slots = (y[written] for y in (x.q, x.k, x.v, x.anchor, x.ring, x.key, x.slots))
    few = Case(q, k, v, anchor, ring, key, slots, x.norm)
    wanted = run(place, few, whole)
    assert all(torch.equal(one[written], other) for one, other in zip(results, wanted, strict=True))
    for one, other in zip(stored_in(cache), stored_in(whole), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("make", ["empty_cache", "scaled_cache"])
def test_of_a_padding_token_nothing_is_written(at: Run, make: str) -> None:
    at(check_padding, make)


def check_strides(place: Place) -> None:
    x = case(6, device=place.device)
    copied = Case(x.q.contiguous(), x.k.contiguous(), x.v.contiguous(), x.anchor, x.ring, x.key, x.slots, None)
    assert not x.k.is_contiguous()
    caches = empty_cache(x), empty_cache(x)
    got, want = run(place, x, caches[0]), run(place, copied, caches[1])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for one, other in zip(*map(stored_in, caches), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_views_of_a_projection_give_what_their_copies_give(at: Run) -> None:
    at(check_strides)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a cache of more than 2^31 keys")
def test_a_slot_beyond_two_to_the_31st_element_is_written_where_it_is() -> None:
    x = case(2, (1, 1, 128), dtype=torch.bfloat16, device=torch.device("cuda"))
    block_size = 2**14
    keys, values = (torch.zeros(1025, block_size, 1, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert keys.numel() > 2**31
    x.slots.copy_(torch.tensor([1025 * block_size - 1, 5]))
    rotary_store(x.q, x.k, x.v, None, x.rotations(), LayerCache(keys, values))
    assert torch.equal(values.flatten(0, 1)[x.slots], x.v)
    assert values.count_nonzero() <= x.v.numel()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a cache of more than 2^31 keys")
def test_in_float8_too_a_slot_beyond_two_to_the_31st_element_is_written_where_it_is() -> None:
    cuda = torch.device("cuda")
    x = case(2, (1, 1, 128), dtype=torch.bfloat16, device=cuda)
    shape = (1, 1025, 2**14, 1, 128)
    (cache,) = KVCache.empty(shape, torch.float8_e4m3fn, cuda).layers()
    assert cache.values.numel() > 2**31
    x.slots.copy_(torch.tensor([1025 * 2**14 - 1, 5]))
    rotary_store(x.q, x.k, x.v, None, x.rotations(), cache)
    want, scales = reference.quantised(x.v)
    stored = cache.values.view(torch.uint8)
    assert torch.equal(stored.flatten(0, 1)[x.slots], want.view(torch.uint8))
    assert cache.scales is not None
    assert torch.equal(by_slot(cache.scales.values)[x.slots], scales)
    assert stored.count_nonzero() <= x.v.numel()


def test_keys_that_the_cache_cannot_hold_are_refused() -> None:
    x = case(3)
    with pytest.raises(ShapeError, match=r"k and v \[N, 1, 8\]"):
        rotary_store(x.q, x.k, x.v, None, x.rotations(), empty_cache(case(3, (4, 1, 8))))
    cache, scaled = empty_cache(x), scaled_cache(x)
    with pytest.raises(ShapeError, match="like its cache"):
        rotary_store(x.q, x.k, x.v[:2], None, x.rotations(), cache)
    with pytest.raises(ShapeError, match="in one piece"):
        rotary_store(x.q.mT.contiguous().mT, x.k, x.v, None, x.rotations(), cache)
    with pytest.raises(ShapeError, match="contiguous cache"):
        rotary_store(x.q, x.k, x.v, None, x.rotations(), replace(cache, keys=cache.keys.mT.contiguous().mT))
    for unlike in (replace(scaled, scales=None), replace(cache, scales=scaled.scales)):
        with pytest.raises(ShapeError, match="scales with float8_e4m3fn and only there"):
            rotary_store(x.q, x.k, x.v, None, x.rotations(), unlike)
    assert cache.keys.isnan().all()
    assert scaled.keys.isnan().all()
