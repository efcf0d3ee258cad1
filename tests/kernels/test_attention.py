"""Dense attention against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.attention import reference
from antiphon.kernels.attention.op import attention
from kernels.formulas import EPS


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tolerance(q: Tensor, k: Tensor, v: Tensor, scale: float) -> float:
    """A score sums D products, the softmax K weights; weights move by twice the largest error of a score."""
    of_score = scale * q.norm(dim=-1).max().item() * k.norm(dim=-1).max().item() * q.shape[-1]
    return (2 * of_score + k.shape[2] + 4) * EPS * v.abs().max().item()


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 3, 5, 7, 6), (1, 2, 33, 65, 8)])
@pytest.mark.parametrize("has_bias", ["no bias", "bias"])
def test_attention_is_its_formula(shape: tuple[int, int, int, int, int], has_bias: str) -> None:
    B, H, Q, K, D = shape
    q, k, v = random(B, H, Q, D, seed=1), random(B, H, K, D, seed=2), random(B, H, K, D, seed=3)
    bias = random(1, H, Q, K, seed=4) if has_bias == "bias" else None
    if bias is not None and K > 1:
        bias[..., -1] = -torch.inf
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double()) * 0.3
    weights = (scores if bias is None else scores + bias.double()).softmax(-1)
    want = torch.einsum("bhqk,bhkd->bhqd", weights, v.double())
    for got in (attention(q, k, v, bias=bias, scale=0.3), reference.attention(q, k, v, bias, 0.3)):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance(q, k, v, 0.3))


def test_strided_operands_give_what_their_copies_give() -> None:
    q, k, v = (random(2, 5, 3, 4, seed=seed).transpose(1, 2) for seed in range(3))
    got = attention(q, k, v, bias=None, scale=0.5)
    want = attention(q.contiguous(), k.contiguous(), v.contiguous(), bias=None, scale=0.5)
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance(q, k, v, 0.5))


def test_a_hidden_key_has_no_influence() -> None:
    q, k, v = (random(1, 1, 4, 8, seed=seed) for seed in range(3))
    bias = torch.zeros(4, 4)
    bias[:, 2] = -torch.inf
    first = attention(q, k, v, bias=bias, scale=1.0)
    k[:, :, 2], v[:, :, 2] = 1e4, -1e4
    assert torch.equal(attention(q, k, v, bias=bias, scale=1.0), first)


@pytest.mark.parametrize("shapes", [((2, 3, 8), (2, 3, 8)), ((1, 2, 3, 8), (1, 2, 3, 7)), ((1, 2, 3, 8), (1, 1, 3, 8))])
def test_operands_that_do_not_match_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    q, k = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ShapeError, match="attention wants"):
        attention(q, k, k, bias=None, scale=1.0)
