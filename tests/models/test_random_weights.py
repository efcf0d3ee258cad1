"""Random weights without a checkpoint: what is made of them runs, and is the same every time."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.model import Section, model_config
from antiphon.models.minicpmo.source import CheckpointFolder, ModelSize, RandomWeights
from antiphon.models.minicpmo.tokens import load_tokenizer
from build import CPU

TINY = RandomWeights(ModelSize.TINY)


def test_a_section_is_filled_in_its_dtypes_and_the_rest_stays_empty() -> None:
    model = TINY.load(Section.THINKER, CPU, torch.bfloat16)
    filled = [weight for part in model.section(Section.THINKER) for weight in part.network.parameters()]
    assert {(weight.device.type, weight.dtype) for weight in filled} == {("cpu", torch.bfloat16)}
    assert all(bool(torch.isfinite(weight).all()) for weight in filled)
    assert {weight.device.type for part in model.section(Section.TALKER) for weight in part.network.parameters()} == {
        "meta"
    }
    vocoder = TINY.load(Section.VOCODER, CPU, torch.bfloat16)
    assert {weight.dtype for part in vocoder.section(Section.VOCODER) for weight in part.network.parameters()} == {
        torch.float32
    }


@pytest.mark.parametrize("section", Section)
def test_the_same_weights_are_drawn_every_time(section: Section) -> None:
    source = pickle.loads(pickle.dumps(TINY))
    ours, theirs = (one.load(section, CPU, torch.float32).section(section) for one in (TINY, source))
    for part, again in zip(ours, theirs, strict=True):
        for name, weight in part.network.state_dict().items():
            assert torch.equal(weight, again.network.state_dict()[name]), name


def test_matrices_are_as_spread_as_keeps_activations_their_size() -> None:
    layers = TINY.load(Section.THINKER, CPU, torch.float32).thinker.state_dict()
    weight = layers["model.layers.0.mlp.down_proj.weight"]
    assert float(weight.std()) * weight.shape[1] ** 0.5 == pytest.approx(1, abs=0.05)
    assert torch.equal(layers["model.norm.weight"], torch.ones_like(layers["model.norm.weight"]))


def test_the_tiny_size_is_that_of_the_tiny_checkpoint(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    assert TINY.config() == model_config(checkpoint) == CheckpointFolder(tiny_checkpoint).config()
    written = load_tokenizer(tiny_checkpoint)
    assert TINY.tokenizer().special == written.special
    assert TINY.tokenizer().encode("Hi <unit>") == written.encode("Hi <unit>")


def test_every_size_has_the_ids_of_its_tokenizer() -> None:
    for size in ModelSize:
        source = RandomWeights(size)
        config, tokenizer = source.config(), source.tokenizer()
        assert max(tokenizer.special_ids) < min(config.thinker.vocab_size, config.talker.num_text_tokens)
