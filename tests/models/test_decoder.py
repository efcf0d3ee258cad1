"""The decoder's preparation: what is merged is what was loaded, and nothing of it stays twice."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from antiphon.models.minicpmo.checkpoint import Part, WeightFile
from antiphon.models.minicpmo.config import DecoderConfig
from antiphon.models.minicpmo.decoder import Attention, Decoder, FeedForward
from antiphon.models.minicpmo.tiny.weights import random_weights

CONFIG = DecoderConfig(24, 3, 6, 2, 4, 40, 1e4, 1e-6, has_qk_norm=True)
MERGED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def loaded() -> Decoder:
    with torch.device("meta"):
        network = Decoder(CONFIG)
    network.load_state_dict(random_weights(Part("decoder", network, WeightFile.MAIN, "")), assign=True)
    return network.requires_grad_(requires_grad=False)


def modules_of(network: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [module for module in network.modules() if isinstance(module, kind)]


def test_a_merged_projection_gives_what_its_parts_give() -> None:
    x = torch.randn(5, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    apart, whole = loaded(), loaded()
    whole.merge_projections()
    for one, other in zip(modules_of(apart, Attention), modules_of(whole, Attention), strict=True):
        assert isinstance(one, Attention)
        assert isinstance(other, Attention)
        for part, got in zip((one.q_proj, one.k_proj, one.v_proj), other.project(x), strict=True):
            assert got.stride(-1) == 1
            # A product of another width may sum in another order; what a matrix holds is the same.
            torch.testing.assert_close(got.flatten(1), part(x))
    for one, other in zip(modules_of(apart, FeedForward), modules_of(whole, FeedForward), strict=True):
        assert isinstance(one, FeedForward)
        assert isinstance(other, FeedForward)
        gate, up = one.gate_proj(x), one.up_proj(x)
        torch.testing.assert_close(other(x), one.down_proj(nn.functional.silu(gate) * up))


def test_merging_keeps_every_weight_once() -> None:
    network = loaded()
    num_bytes = sum(weight.nbytes for weight in network.parameters())
    parts: list[weakref.ref[Tensor]] = [
        weakref.ref(weight) for name, weight in network.named_parameters() if name.split(".")[-2] in MERGED
    ]
    assert len(parts) == len(MERGED) * CONFIG.num_layers
    network.merge_projections()
    assert sum(weight.nbytes for weight in network.parameters()) == num_bytes
    assert not any(part() is not None for part in parts)


def test_the_checkpoints_names_are_those_before_merging() -> None:
    names = {name.split(".")[-2] for name in loaded().state_dict()}
    assert names.issuperset(MERGED)
    assert not {"qkv_proj", "gate_up_proj"} & names
