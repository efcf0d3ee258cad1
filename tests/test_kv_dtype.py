"""Keys and values in float8: calls with them, what a slide leaves as it is, what is refused, the memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import build
from antiphon.__main__ import app
from antiphon.call import UnitResult
from antiphon.config import Dtype, EngineConfig, Placement, SessionConfig, everywhere
from antiphon.console import EXIT_BAD_INPUT
from antiphon.core.cache_dtype import CacheDtype, check_slide
from antiphon.core.context import Context
from antiphon.core.duplex import DuplexConfig
from antiphon.core.sampling import Draws
from antiphon.core.window import BasicWindow, ContextWindow, SlideMode, WindowPolicy
from antiphon.engine import Engine
from antiphon.errors import ConfigError
from antiphon.inspection import needs_of_engine, session_memory
from antiphon.kernels.kv_cache import KVCache
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.model import model_config
from antiphon.models.minicpmo.prompt import PromptText
from antiphon.models.minicpmo.tokens import PREVIOUS_MARKER, load_tokenizer
from antiphon.stages.paged import CacheConfig
from antiphon.stages.thinker.decider import Decider
from antiphon.stages.thinker.stage import ThinkerStage
from core.brute_force import slots_of

SCALED = CacheDtype.FLOAT8_E4M3
SESSION = SessionConfig(
    window=BasicWindow(150, 100), duplex=DuplexConfig(num_forced_listens=1), draws=Draws.MOST_LIKELY
)
BASIC, CONTEXT = "basic", "context"
NUM_UNITS = 20


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    config = EngineConfig(everywhere("cpu", Placement.HERE), Dtype.FLOAT32, max_calls=3, kv_dtype=SCALED)
    return Engine.load(open_checkpoint(tiny_checkpoint), config, SESSION)


def window_of(kind: str, folder: Path) -> WindowPolicy:
    marker = load_tokenizer(folder).encode(PREVIOUS_MARKER)
    return ContextWindow(3, 8, marker) if kind == CONTEXT else SESSION.window


def live(engine: Engine, session: SessionConfig) -> list[UnitResult]:
    call = engine.open("a", session, torch.empty(0), build.voice(engine))
    results = [call.run_unit(build.second(unit)) for unit in range(NUM_UNITS)]
    call.close()
    return results


@pytest.mark.parametrize("slide", [SlideMode.ROTATE_QUERY, SlideMode.REPREFILL])
@pytest.mark.parametrize("kind", [BASIC, CONTEXT])
def test_a_call_slides_and_speaks(engine: Engine, tiny_checkpoint: Path, slide: SlideMode, kind: str) -> None:
    results = live(engine, replace(SESSION, slide=slide, window=window_of(kind, tiny_checkpoint)))
    assert sum(result.outcome.slide is not None for result in results) > 3
    samples = torch.cat([speech.samples for result in results for speech in result.speech])
    assert samples.isfinite().all()
    assert 0.01 < samples.abs().max() < 1


def test_calls_that_share_a_prompt_decide_what_one_decides_that_computed_it(engine: Engine) -> None:
    session = replace(SESSION, prompt=PromptText("Talk about float8.", ""))
    missed, hit = (live(engine, session) for _ in range(2))
    assert engine.survey().thinker.counts.prompts.num_hits > 0
    assert [one.outcome.token_ids for one in missed] == [one.outcome.token_ids for one in hit]


def decider_of(folder: Path) -> Decider:
    model = build.model(folder)
    return Decider(model.thinker, load_tokenizer(folder), CacheConfig(100, dtype=SCALED))


def held(cache: KVCache, context: Context) -> list[Tensor]:
    """Keys and values in bytes, and the scales of both, each by layer and token in order of position."""
    size = cache.block_size
    slots = torch.tensor([slot for segment in context.segments() for slot in slots_of(segment, size)])
    assert cache.scales is not None
    of_numbers = [stored.view(torch.uint8).flatten(1, 2)[:, slots] for stored in (cache.keys, cache.values)]
    of_scales = [stored.mT.flatten(1, 2)[:, slots] for stored in (cache.scales.keys, cache.scales.values)]
    return [*of_numbers, *of_scales]


NUM_CLOSING = 2
"""Tokens at a unit's end, which are written with the next unit's first ones."""


@pytest.mark.parametrize("kind", [BASIC, CONTEXT])
def test_a_slide_leaves_every_key_and_value_that_stays_as_it_was_written(tiny_checkpoint: Path, kind: str) -> None:
    model, tokenizer, decider = (
        build.model(tiny_checkpoint),
        load_tokenizer(tiny_checkpoint),
        decider_of(tiny_checkpoint),
    )
    stage: ThinkerStage = build.thinker_stage(model, tokenizer, decider)
    state = build.opened(
        stage,
        replace(build.SESSION, prompt=PromptText("Talk.", " Now."), window=window_of(kind, tiny_checkpoint)),
    )
    context, cache = state.mind.memory.context, decider.decoder.cache
    num_prompt_tokens, num_slides = context.prompt.num_tokens, 0
    before = held(cache, context)
    for unit in range(NUM_UNITS):
        outcome = build.hear(stage, state, build.second(unit))
        after = held(cache, context)
        num_new = sum(record.num_tokens for record in [*context.units][-1:])
        num_kept = context.num_tokens - context.num_anchor_tokens - num_new
        for old, new in zip(before, after, strict=True):
            assert torch.equal(old[:, :num_prompt_tokens], new[:, :num_prompt_tokens])
            stayed = old[:, old.shape[1] - num_kept :], new[:, -num_new - num_kept : -num_new]
            assert torch.equal(*(one[:, : max(0, num_kept - NUM_CLOSING)] for one in stayed))
        num_slides += outcome.slide is not None
        assert num_kept or not unit
        before = after
    assert num_slides > 3
    for scales in before[2:]:
        assert (scales > 0).all()


def test_keys_in_float8_are_not_to_be_rotated_again(engine: Engine, tiny_checkpoint: Path) -> None:
    rotated = replace(SESSION, slide=SlideMode.ROTATE_KEYS)
    config = EngineConfig(everywhere("cpu", Placement.HERE), Dtype.FLOAT32, kv_dtype=SCALED)
    match = "slide rotate_keys .* kv_dtype float8_e4m3 .* take slide rotate_query or reprefill, or kv_dtype model"
    with pytest.raises(ConfigError, match=match):
        Engine.load(open_checkpoint(tiny_checkpoint), config, rotated)
    before = engine.survey().thinker.counts
    with pytest.raises(ConfigError, match=match):
        engine.open("b", rotated, torch.empty(0), build.voice(engine))
    after = engine.survey().thinker.counts
    assert after.num_free_blocks == before.num_free_blocks
    assert after.num_unreserved_blocks == before.num_unreserved_blocks
    live(engine, SESSION)


@pytest.mark.parametrize("slide", SlideMode)
def test_only_that_slide_is_refused_and_only_there(slide: SlideMode) -> None:
    check_slide(slide, CacheDtype.MODEL)
    if slide is not SlideMode.ROTATE_KEYS:
        check_slide(slide, SCALED)


def test_the_command_line_refuses_it_before_a_checkpoint_is_looked_for(tmp_path: Path) -> None:
    caller = Path(__file__).parents[1] / "examples" / "caller.flac"
    flags = ("--model", str(tmp_path / "none"), "--slide", "rotate_keys", "--kv-dtype", "float8_e4m3")
    done = CliRunner().invoke(app, ["run", str(caller), "-o", str(tmp_path / "out.wav"), *flags])
    assert done.exit_code == EXIT_BAD_INPUT
    assert "kv_dtype float8_e4m3" in done.output.replace("\n", " ")


def test_scales_are_counted_wherever_memory_is(tiny_checkpoint: Path) -> None:
    checkpoint, decider = open_checkpoint(tiny_checkpoint), decider_of(tiny_checkpoint)
    config, cache = model_config(checkpoint), decider.decoder.cache
    assert cache.scales is not None
    tensors = (cache.keys, cache.values, cache.scales.keys, cache.scales.values)
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    dims = config.thinker.decoder
    num_heads = 100 * 16 * dims.num_layers * dims.num_kv_heads
    assert num_bytes == cache.num_bytes == 100 * decider.decoder.block_bytes == 2 * num_heads * (dims.head_dim + 4)

    engine = EngineConfig(everywhere("cpu"), Dtype.FLOAT32, max_calls=3, kv_dtype=SCALED)
    said = {need.name: need.num_bytes for need in needs_of_engine(config, engine, SESSION)}
    plain = {
        need.name: need.num_bytes
        for need in needs_of_engine(config, replace(engine, kv_dtype=CacheDtype.MODEL), SESSION)
    }
    assert said["thinker KV"] / plain["thinker KV"] == (dims.head_dim + 4) / (4 * dims.head_dim)
    assert {name: size for name, size in said.items() if name != "thinker KV"} == {
        name: size for name, size in plain.items() if name != "thinker KV"
    }
    named = {need.name: need.num_bytes for need in session_memory(checkpoint, torch.float32)}
    ratio = named["thinker KV, float8_e4m3"] / named["thinker KV"]
    assert ratio == (dims.head_dim + 4) / (4 * dims.head_dim)


def test_an_engine_allocates_what_is_said_of_it(engine: Engine, tiny_checkpoint: Path) -> None:
    config = EngineConfig(everywhere("cpu", Placement.HERE), Dtype.FLOAT32, max_calls=3, kv_dtype=SCALED)
    counts = engine.survey().thinker.counts
    needs = needs_of_engine(model_config(open_checkpoint(tiny_checkpoint)), config, SESSION)
    (said,) = (need.num_bytes for need in needs if need.name == "thinker KV")
    assert counts.num_blocks * counts.block_bytes == said
