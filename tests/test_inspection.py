"""`antiphon inspect --memory`: what it computes is what is allocated, and what the released model needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import build
from antiphon.config import Dtype, EngineConfig, SessionConfig, everywhere
from antiphon.inspection import VOICE_S, needs_of_sessions, session_memory
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.flow import NUM_FLOW_STEPS, draw_noise
from antiphon.models.minicpmo.flow_cache import FlowShape
from antiphon.models.minicpmo.flow_membership import Retention, max_speech_frames
from antiphon.models.minicpmo.model import Model
from antiphon.models.minicpmo.released import RELEASED
from antiphon.models.minicpmo.speech_arena import ArenaSize, SpeechArena
from antiphon.models.minicpmo.tokens import load_tokenizer
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.paged import CacheConfig
from antiphon.stages.talker.stage import TalkerStage, turn_cache
from antiphon.stages.thinker.stage import NUM_SEGMENTS

GIB = 2**30
NUM_SPEAKING = 64
LARGEST_BATCH = EngineConfig(everywhere("cpu"), Dtype.FLOAT32).code2wav.grid.largest


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Model:
    return build.model(tiny_checkpoint)


@pytest.fixture(scope="module")
def said(tiny_checkpoint: Path) -> dict[tuple[str, str], int]:
    """In bytes, by what and per what."""
    needs = session_memory(open_checkpoint(tiny_checkpoint), torch.float32)
    return {(need.name, need.per): need.num_bytes for need in needs}


def storage(*tensors: Tensor) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def arena(model: Model, retention: Retention, size: ArenaSize, dtype: torch.dtype) -> SpeechArena:
    return SpeechArena(FlowShape(model.config.flow, NUM_FLOW_STEPS), retention, size, dtype, build.CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_voice_takes_what_is_said(model: Model, said: dict[tuple[str, str], int], dtype: torch.dtype) -> None:
    num_tokens = 25 * VOICE_S
    prompt = VoicePrompt(tuple(range(num_tokens)), torch.randn(2 * num_tokens, 80), torch.randn(192))
    room = arena(model, Retention.REFERENCE, ArenaSize.for_turns(Retention.REFERENCE, 2 * num_tokens, 1, 1), dtype)
    voice = model.synthesizer(draw_noise(80, 0, build.CPU), room).build_voice(prompt)
    owned = [tensor for entries in voice.entries.all for tensor in (entries.keys, entries.values)]
    tails = voice.tails
    num_bytes = storage(voice.speaker, tails.lookahead, tails.upsampling, tails.convs, *owned)
    name = str(dtype).removeprefix("torch.")
    assert num_bytes == voice.num_bytes == said[f"voice, {name}", f"{VOICE_S} s"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("retention", Retention)
def test_turns_and_solves_take_what_is_said(
    model: Model, said: dict[tuple[str, str], int], retention: Retention, dtype: torch.dtype
) -> None:
    room = arena(model, retention, ArenaSize.for_turns(retention, 50 * VOICE_S, 3, largest_batch=5), dtype)
    owned = [tensor for entries in room.entries.all for tensor in (entries.keys, entries.values)]
    tails = room.tails
    name = str(dtype).removeprefix("torch.")
    turn = said[f"flow, {retention.value}, {name}", f"speaking session, voice of {VOICE_S} s"]
    solve = said[f"flow, {name}", "session in one solve"]
    num_bytes = storage(tails.lookahead, tails.upsampling, tails.convs, *owned)
    assert num_bytes == room.num_bytes == 3 * turn + 5 * solve
    assert said["flow", "listening session"] == 0


def test_caches_of_a_session_take_what_is_said(
    tiny_checkpoint: Path, model: Model, said: dict[tuple[str, str], int]
) -> None:
    session, senses = SessionConfig(), build.senses(model, load_tokenizer(tiny_checkpoint))
    unit_tokens = senses.num_input_tokens(session.max_pictures, session.max_slices, session.max_text_tokens)
    peak_tokens = session.window.peak_tokens(
        EngineConfig(everywhere("cpu"), Dtype.FLOAT32).max_prompt_tokens,
        unit_tokens + session.duplex.max_output_tokens,
    )
    num_blocks = CacheConfig.for_tokens(peak_tokens, NUM_SEGMENTS).num_blocks
    decider = build.decider(model, load_tokenizer(tiny_checkpoint), num_blocks)
    assert decider.decoder.cache.num_bytes == said["thinker KV", "session"]
    inputs = decider.decoder.cache.keys.new_empty(peak_tokens, model.config.thinker.decoder.hidden_size)
    assert storage(inputs) == said["kept inputs", "session that may change"]
    talker = TalkerStage(model.talker, turn_cache(model.config.talker.max_position_tokens))
    assert talker.speaker.decoder.cache.num_bytes == said["talker KV", "speaking session"]
    assert storage(model.audio.new_state().kv) == said["audio encoder KV", "session"]


def of_64(retention: Retention, dtype: torch.dtype) -> float:
    """GiB that the arena takes for 64 sessions that speak with voices of 6 s, room for the solves included."""
    size = ArenaSize.for_turns(retention, 50 * VOICE_S, NUM_SPEAKING, LARGEST_BATCH)
    assert size.max_frames == NUM_SPEAKING * max_speech_frames(retention, 50 * VOICE_S)
    return size.num_bytes(FlowShape(RELEASED.flow, NUM_FLOW_STEPS), dtype) / GIB


def test_64_speaking_sessions_of_the_released_model_fit() -> None:
    assert of_64(Retention.REFERENCE, torch.float32) < 27
    assert of_64(Retention.REFERENCE, torch.bfloat16) < 13.5
    assert of_64(Retention.VOICE_FIRST, torch.float32) < 27 / 3
    assert of_64(Retention.VOICE_FIRST, torch.bfloat16) < 13.5 / 3


def test_what_is_said_of_the_released_model() -> None:
    said = {(need.name, need.per): need.num_bytes for need in needs_of_sessions(RELEASED, torch.bfloat16)}
    assert said["voice, float32", "second"] == 50 * 2 * 4 * (10 * 16 * 2 * 512 + 4 * 512 + 6 * 512 // 2)
    assert round(said["flow, reference, float32", "speaking session, voice of 6 s"] / 2**20, 2) == 380.25
