"""Calls that share a prompt on one engine: what they say does not change, and what they hold does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import build
from antiphon.call import UnitResult
from antiphon.config import Dtype, EngineConfig, Placement, SessionConfig, everywhere
from antiphon.core.duplex import DuplexConfig
from antiphon.core.prompts import PromptCounts
from antiphon.core.window import BasicWindow, ContextWindow, SlideMode, WindowPolicy
from antiphon.engine import Engine
from antiphon.errors import PromptTooLong
from antiphon.models.minicpmo.checkpoint import Checkpoint, open_checkpoint
from antiphon.models.minicpmo.prompt import wrap
from antiphon.models.minicpmo.tokens import PREVIOUS_MARKER, TextTokenizer, load_tokenizer
from antiphon.units import INPUT_RATE_HZ

SESSION = SessionConfig(
    window=BasicWindow(400, 300),
    duplex=DuplexConfig(num_forced_listens=1),
    max_pictures=0,
    max_text_tokens=0,
    seed=5,
)


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return open_checkpoint(tiny_checkpoint)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> TextTokenizer:
    return load_tokenizer(tiny_checkpoint)


def engine_of(checkpoint: Checkpoint, *, is_shared: bool, max_bytes: int = 2**30) -> Engine:
    config = EngineConfig(
        everywhere("cpu", Placement.HERE),
        Dtype.FLOAT32,
        max_calls=4,
        shares_prompts=is_shared,
        max_stored_prompt_bytes=max_bytes,
    )
    return Engine.load(checkpoint, config, SESSION)


def reference(seed: int) -> Tensor:
    """A second and a half of somebody's voice."""
    return 0.1 * torch.randn(INPUT_RATE_HZ * 3 // 2, generator=torch.Generator().manual_seed(seed))


def counts(engine: Engine) -> PromptCounts:
    return engine.survey().thinker.counts.prompts


def live(engine: Engine, session: SessionConfig, voice: Tensor, num_units: int = 8) -> list[UnitResult]:
    call = engine.open("a", session, voice, build.voice(engine))
    results = [call.run_unit(build.second(unit)) for unit in range(num_units)]
    call.close()
    return results


def windows(tokenizer: TextTokenizer) -> list[WindowPolicy]:
    return [BasicWindow(150, 100), ContextWindow(2, 8, tokenizer.encode(PREVIOUS_MARKER))]


@pytest.mark.parametrize("slide", SlideMode)
@pytest.mark.parametrize("kind", [0, 1], ids=["basic", "context"])
def test_a_shared_prompt_changes_no_sample(
    checkpoint: Checkpoint, tokenizer: TextTokenizer, slide: SlideMode, kind: int
) -> None:
    session = replace(SESSION, window=windows(tokenizer)[kind], slide=slide)
    unshared = live(engine_of(checkpoint, is_shared=False), session, reference(0))
    engine = engine_of(checkpoint, is_shared=True)
    missed, hit = (live(engine, session, reference(0)) for _ in range(2))
    assert (counts(engine).num_misses, counts(engine).num_hits) == (
        1,
        1,
    )
    assert any(result.outcome.slide for result in hit)
    for one, other in [*zip(unshared, missed, strict=True), *zip(unshared, hit, strict=True)]:
        assert one.outcome.token_ids == other.outcome.token_ids
        assert one.outcome.previous_ids == other.outcome.previous_ids
        for mine, his in zip(one.speech, other.speech, strict=True):
            assert torch.equal(mine.samples, his.samples)


def test_prompts_are_equal_only_if_words_and_voice_are(checkpoint: Checkpoint, tokenizer: TextTokenizer) -> None:
    engine = engine_of(checkpoint, is_shared=True)
    voice = build.voice(engine)
    silence = torch.empty(0)
    asked = [
        (SESSION, silence),
        (replace(SESSION, prompt=wrap("Be brief.")), silence),
        (SESSION, reference(0)),
        (SESSION, reference(1)),
        (SESSION, reference(0)[:-1]),
        (replace(SESSION, window=windows(tokenizer)[1]), silence),
    ]
    for _ in range(2):
        for session, sound in asked:
            engine.open("a", session, sound, voice).close()
    assert (counts(engine).num_misses, counts(engine).num_hits) == (
        len(asked),
        len(asked),
    )


def test_what_does_not_belong_to_the_prompt_does_not_keep_it_from_being_shared(checkpoint: Checkpoint) -> None:
    engine = engine_of(checkpoint, is_shared=True)
    voice = build.voice(engine)
    first = engine.open("a", SESSION, reference(0), voice)
    other = replace(SESSION, seed=9, slide=SlideMode.ROTATE_KEYS, window=BasicWindow(300, 100))
    second = engine.open("b", other, reference(0), voice)
    assert not first.opened.is_prompt_hit
    assert second.opened.is_prompt_hit
    assert first.opened.num_prompt_tokens == second.opened.num_prompt_tokens


def test_a_call_whose_prompt_is_there_needs_less_so_more_calls_fit(checkpoint: Checkpoint) -> None:
    long = replace(SESSION, prompt=wrap("a long story " * 18))
    apart, shared = (engine_of(checkpoint, is_shared=is_shared) for is_shared in (False, True))
    num_calls = [len(list(build.until_full(engine, long, build.voice(engine)))) for engine in (apart, shared)]
    assert num_calls[0] == 4
    assert num_calls[1] > 6


def test_unused_prompts_make_room_for_calls(checkpoint: Checkpoint) -> None:
    engine = engine_of(checkpoint, is_shared=True)
    voice = build.voice(engine)
    for number in range(40):
        engine.open("a", replace(SESSION, prompt=wrap(f"{number} " * 80)), torch.empty(0), voice).close()
    assert counts(engine).num_evictions > 0
    calls = [engine.open(str(number), SESSION, torch.empty(0), voice) for number in range(4)]
    assert len(calls) == 4


def test_without_room_for_unused_prompts_none_stays(checkpoint: Checkpoint) -> None:
    engine = engine_of(checkpoint, is_shared=True, max_bytes=0)
    engine.open("a", SESSION, torch.empty(0), build.voice(engine)).close()
    assert counts(engine).num_blocks == 0


def test_a_refused_prompt_is_not_stored(checkpoint: Checkpoint) -> None:
    engine = engine_of(checkpoint, is_shared=True)
    with pytest.raises(PromptTooLong):
        engine.open("a", replace(SESSION, prompt=wrap("far too long " * 99)), torch.empty(0), build.voice(engine))
    assert counts(engine).num_blocks == 0
