"""The decoder's weights and forms: what is merged is what was loaded, and few tokens come to what many come to."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from antiphon.core.blocks import BlockPool
from antiphon.core.context import Context
from antiphon.core.window import SlideMode
from antiphon.kernels.kv_cache import LayerCache
from antiphon.kernels.paged_attention.tiles import Tiling
from antiphon.kernels.rotary_store.contract import StepRotations
from antiphon.kernels.step_rotations.op import step_rotations
from antiphon.models.minicpmo.checkpoint import Part, WeightFile
from antiphon.models.minicpmo.config import DecoderConfig
from antiphon.models.minicpmo.decoder import Attention, Decoder, FeedForward, Layer
from antiphon.models.minicpmo.tiny.weights import random_weights
from antiphon.stages.step_packing import PackedRows, Row, StepBuffer, in_two, layout_in

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
        for part, got in zip((one.q_proj, one.k_proj, one.v_proj), other.heads(other.qkv_proj(x)), strict=True):
            assert got.stride(-1) == 1
            # A product of another width may sum in another order; what a matrix holds is the same.
            torch.testing.assert_close(got.flatten(1), part(x))
    for one, other in zip(modules_of(apart, FeedForward), modules_of(whole, FeedForward), strict=True):
        assert isinstance(one, FeedForward)
        assert isinstance(other, FeedForward)
        gate, up = one.gate_proj(x), one.up_proj(x)
        torch.testing.assert_close(other(x), one.down_proj(nn.functional.silu(gate) * up))


def test_a_layer_for_few_tokens_comes_to_what_any_layer_comes_to() -> None:
    network = loaded()
    network.merge_projections()
    layer = network.layers[1]
    assert isinstance(layer, Layer)
    context = Context(BlockPool(8, 4), SlideMode.ROTATE_QUERY, 100)
    context.append_prompt(3)
    tiling = Tiling.of(CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, is_float8=False)
    rows = PackedRows.of([Row(context, context.append(5))], tiling)
    host = torch.zeros(rows.shape.num_bytes, dtype=torch.uint8)
    buffer = StepBuffer(rows.shape, *in_two(host, rows.shape))
    buffer.fill(rows)
    step = layout_in(*in_two(host, rows.shape), rows.shape, rows.spans, 4)
    turns = step_rotations(step.positions, step.ring_positions, step.key_positions, CONFIG.head_dim, CONFIG.rope_theta)
    rotations = StepRotations(*turns, slots=step.slots)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, CONFIG.hidden_size, generator=generator)
    keys, values = torch.randn(2, 8, 4, CONFIG.num_kv_heads, CONFIG.head_dim, generator=generator)
    few = layer.run_few(x, step, rotations, LayerCache(keys.clone(), values.clone()))
    attended, added = layer(x, layer.input_layernorm(x), step, rotations, LayerCache(keys, values))
    assert torch.equal(few, attended + added)


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
