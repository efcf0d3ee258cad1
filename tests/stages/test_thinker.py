"""The thinker's sessions on the golden checkpoint: what is refused, and that nothing is left of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from PIL import Image
from torch import Tensor

import build
from antiphon.core.duplex import DuplexConfig
from antiphon.core.messages import Address, HeardUnit
from antiphon.core.window import BasicWindow, ContextWindow, OffWindow, SlideMode, WindowPolicy
from antiphon.errors import (
    AntiphonError,
    AudioError,
    ContextLengthExceeded,
    ImageError,
    InputError,
    PromptTooLong,
    ResourceExhausted,
)
from antiphon.models.minicpmo.model import Model
from antiphon.models.minicpmo.prompt import PromptText
from antiphon.models.minicpmo.tokens import PREVIOUS_MARKER, TextTokenizer, load_tokenizer
from antiphon.stages.loop import Ready
from antiphon.stages.paged import CacheConfig, PagedDecoder
from antiphon.stages.thinker.decider import Decider
from antiphon.stages.thinker.stage import PromptLimits, PromptSource, ThinkerStage, ThinkerState
from antiphon.stages.thinker.state import PromptReady, ThinkerSession, UnitInput, UnitOutcome
from antiphon.units import UNIT_SAMPLES
from build import GOLDEN_CHECKPOINT, model, senses
from core.brute_force import snapshot

MAX_PROMPT_TOKENS = 300
NUM_AUDIO_TOKENS, NUM_PICTURE_TOKENS, NUM_DECIDED_TOKENS = 1 + 10, 66, 20 + 1
"""Of a unit: `<unit>` and sound, each picture with its markers, decisions and `</unit>` (REFERENCE 4.2)."""
SESSION = replace(build.SESSION, prompt=build.VOICED_PROMPT, max_pictures=1)
PICTURE = Image.effect_noise((60, 60), 50).convert("RGB")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def golden() -> Model:
    return model(GOLDEN_CHECKPOINT)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer(GOLDEN_CHECKPOINT)


@dataclass(frozen=True, slots=True)
class Thinker:
    """A stage and the decoder inside it. Prompts are not kept once their users have gone."""

    stage: ThinkerStage
    decoder: PagedDecoder

    @staticmethod
    def of(model: Model, tokenizer: TextTokenizer, *, num_blocks: int = 60) -> Thinker:
        decider = Decider(model.thinker, tokenizer, CacheConfig(num_blocks))
        ears = senses(model, tokenizer)
        limits = PromptLimits(MAX_PROMPT_TOKENS, is_shared=True, max_stored_bytes=0)
        return Thinker(ThinkerStage(ears, decider, tokenizer, limits), decider.decoder)

    def open(self, session: ThinkerSession) -> ThinkerState:
        """A session whose prompt is in the cache. Raises: why it cannot be."""
        state = self.stage.open_call(session)
        self.ready(session.session_id)
        return state

    def ready(self, session_id: str) -> PromptReady:
        while True:
            ended = self.stage.step().get(session_id)
            if isinstance(ended, AntiphonError):
                raise ended
            if isinstance(ended, Ready):
                return ended.about

    def hear(self, state: ThinkerState, heard: UnitInput) -> UnitOutcome:
        """One second of one session. Raises: what it fails with."""
        self.stage.start(state, heard_unit(state, heard))
        while True:
            for end in self.stage.step().values():
                if isinstance(end, AntiphonError):
                    raise end
                assert isinstance(end, UnitOutcome)
                return end

    def check_empty(self) -> None:
        """Nobody holds a block, and the whole cache can be reserved again."""
        self.decoder.pool.check([])
        size = self.decoder.pool.block_size
        everything = replace(
            SESSION, session_id="everything", window=OffWindow((self.decoder.pool.num_blocks - 4) * size)
        )
        self.stage.close(self.open(everything))
        self.decoder.pool.check([])


@pytest.fixture
def thinker(golden: Model, tokenizer: TextTokenizer) -> Thinker:
    return Thinker.of(golden, tokenizer)


def heard_unit(state: ThinkerState, heard: UnitInput) -> HeardUnit[UnitInput]:
    return HeardUnit(Address(state.session.session_id, 0, 0, 0), 0.0, heard)


def sound(unit: int = 0) -> Tensor:
    return 0.1 * torch.randn(UNIT_SAMPLES, generator=torch.Generator().manual_seed(unit))


def second(unit: int = 0, num_pictures: int = 0) -> UnitInput:
    return UnitInput(sound(unit), (PICTURE,) * num_pictures)


def said(outcome: UnitOutcome) -> tuple[object, ...]:
    states = [handoff.hidden.tolist() for handoff in outcome.handoffs]
    return outcome.unit, outcome.token_ids, outcome.texts, outcome.retained_units, outcome.num_context_tokens, states


def written(tokens: int) -> PromptText:
    """A prompt of so many tokens: the tokenizer has one id per byte."""
    return PromptText("a" * (tokens - 1), "b")


@pytest.mark.parametrize(
    ("window", "limit"),
    [
        (OffWindow(200), 200 - NUM_AUDIO_TOKENS - NUM_PICTURE_TOKENS - NUM_DECIDED_TOKENS),
        (BasicWindow(150, 90), 150),
        (OffWindow(800), MAX_PROMPT_TOKENS),
    ],
)
def test_a_prompt_that_leaves_no_room_is_refused_and_holds_nothing(
    thinker: Thinker, window: WindowPolicy, limit: int
) -> None:
    session = replace(SESSION, window=window)
    state = thinker.open(replace(session, prompt=written(limit)))
    assert state.mind.memory.context.num_tokens == limit
    assert thinker.hear(state, second(num_pictures=1)).unit == 0
    thinker.stage.close(state)
    with pytest.raises(PromptTooLong, match=f"has {limit + 1} tokens.* takes {limit};"):
        thinker.open(replace(session, prompt=written(limit + 1)))
    thinker.check_empty()


@pytest.mark.parametrize("reference", [torch.zeros(100), torch.full((16_000,), torch.nan), torch.zeros(2, 16_000)])
def test_a_voice_that_is_no_sound_is_refused_and_holds_nothing(thinker: Thinker, reference: Tensor) -> None:
    with pytest.raises(AudioError):
        thinker.open(replace(SESSION, reference=reference))
    thinker.check_empty()


def test_a_session_that_could_outgrow_the_cache_is_refused_and_the_others_do_not_notice(
    golden: Model, tokenizer: TextTokenizer, thinker: Thinker
) -> None:
    alone = thinker.open(SESSION)
    small = Thinker.of(golden, tokenizer, num_blocks=25)
    first = small.open(SESSION)
    with pytest.raises(ResourceExhausted, match="engine is full"):
        small.open(replace(SESSION, session_id="second", prompt=written(9)))
    for unit in range(5):
        assert said(small.hear(first, second(unit))) == said(thinker.hear(alone, second(unit)))
    small.stage.close(first)
    small.decoder.pool.check([])
    small.stage.close(small.open(replace(SESSION, session_id="second", prompt=written(9))))


BAD_SECONDS = {
    "not finite": (UnitInput(torch.full((UNIT_SAMPLES,), torch.nan), ()), AudioError),
    "not finite, and a picture": (UnitInput(torch.full((UNIT_SAMPLES,), torch.inf), (PICTURE,)), AudioError),
    "too many pictures": (second(num_pictures=2), InputError),
    "a picture like a line": (UnitInput(sound(), (Image.new("RGB", (1, 3000)),)), ImageError),
}


@pytest.mark.parametrize("name", BAD_SECONDS)
def test_a_bad_second_is_refused_and_the_session_goes_on_as_if_it_had_not_come(
    golden: Model, tokenizer: TextTokenizer, thinker: Thinker, name: str
) -> None:
    bad, error = BAD_SECONDS[name]
    other = Thinker.of(golden, tokenizer)
    state, twin = thinker.open(SESSION), other.open(SESSION)
    for unit in range(4):
        before = snapshot(state.mind.memory.context, thinker.decoder.pool)
        with pytest.raises(error):
            thinker.hear(state, bad)
        assert snapshot(state.mind.memory.context, thinker.decoder.pool) == before
        assert said(thinker.hear(state, second(unit, unit % 2))) == said(other.hear(twin, second(unit, unit % 2)))


def test_a_bad_second_is_its_own_sessions_business(thinker: Thinker) -> None:
    states = [thinker.open(replace(SESSION, session_id=name, seed=3)) for name in ("good", "bad", "twin")]
    bad, _ = BAD_SECONDS["not finite"]
    for state, heard in zip(states, (second(), bad, second()), strict=True):
        thinker.stage.start(state, heard_unit(state, heard))
    ends: dict[str, object] = {}
    while len(ends) < 3:
        ends |= thinker.stage.step()
    assert isinstance(ends["bad"], AudioError)
    assert isinstance(ends["good"], UnitOutcome)
    assert isinstance(ends["twin"], UnitOutcome)
    assert ends["good"].token_ids == ends["twin"].token_ids


def test_without_a_window_a_session_ends_before_anything_of_the_unit_that_may_not_fit_is_fed(thinker: Thinker) -> None:
    state = thinker.open(replace(SESSION, window=OffWindow(200)))
    context = state.mind.memory.context
    num_units = 0
    while context.num_tokens + NUM_AUDIO_TOKENS + NUM_PICTURE_TOKENS + NUM_DECIDED_TOKENS <= 200:
        assert thinker.hear(state, second(num_units)).unit == num_units
        num_units += 1
    assert num_units > 2
    for num_pictures in (1, 1):
        before = snapshot(context, thinker.decoder.pool)
        with pytest.raises(ContextLengthExceeded, match=f"holds {context.num_tokens} of 200 tokens"):
            thinker.hear(state, second(num_pictures=num_pictures))
        assert snapshot(context, thinker.decoder.pool) == before
    # A unit without a picture is smaller and still fits.
    assert thinker.hear(state, second(num_units)).unit == num_units
    while context.num_tokens + NUM_AUDIO_TOKENS + NUM_DECIDED_TOKENS <= 200:
        thinker.hear(state, second())
    with pytest.raises(ContextLengthExceeded):
        thinker.hear(state, second())
    thinker.stage.close(state)
    thinker.check_empty()


@pytest.mark.parametrize("mode", SlideMode)
@pytest.mark.parametrize("kind", ["basic", "context"])
def test_a_session_stays_within_what_it_was_admitted_with(
    thinker: Thinker, tokenizer: TextTokenizer, mode: SlideMode, kind: str
) -> None:
    marker = tokenizer.encode(PREVIOUS_MARKER)
    window = SESSION.window if kind == "basic" else ContextWindow(2, 20, marker)
    state = thinker.open(replace(SESSION, window=window, slide=mode))
    context, pool = state.mind.memory.context, thinker.decoder.pool
    reserved = CacheConfig.for_tokens(state.max_tokens, num_segments=3).num_blocks
    num_slides = 0
    for unit in range(7):
        outcome = thinker.hear(state, second(unit, num_pictures=1))
        num_slides += outcome.slide is not None
        context.check()
        assert outcome.num_context_tokens == context.num_tokens <= state.max_tokens
        assert pool.num_blocks - pool.num_free_blocks == context.num_blocks <= reserved
    assert num_slides > 2
    thinker.stage.close(state)
    thinker.stage.close(state)
    thinker.check_empty()


def test_the_first_units_listen_when_they_are_forced_to(thinker: Thinker) -> None:
    state = thinker.open(replace(SESSION, duplex=DuplexConfig(num_forced_listens=3)))
    special = thinker.hear(state, second()).token_ids
    for _ in range(2):
        outcome = thinker.hear(state, second())
        assert outcome.is_listen
        assert outcome.token_ids == special
        assert outcome.handoffs == ()
    assert state.mind.num_draws == 0
    thinker.hear(state, second())
    assert state.mind.num_draws > 0


def test_the_same_seed_decides_the_same_and_other_seeds_something_else(thinker: Thinker) -> None:
    def decisions(seed: int) -> tuple[tuple[int, ...], ...]:
        state = thinker.open(replace(SESSION, seed=seed))
        try:
            return tuple(thinker.hear(state, second(unit)).token_ids for unit in range(4))
        finally:
            thinker.stage.close(state)

    by_seed = [decisions(seed) for seed in range(4)]
    assert decisions(2) == by_seed[2]
    assert len(set(by_seed)) == 4


def test_a_prompt_that_is_in_the_cache_already_is_as_good_as_one_that_was_computed(
    golden: Model, tokenizer: TextTokenizer, thinker: Thinker
) -> None:
    other = Thinker.of(golden, tokenizer)
    computed = other.open(replace(SESSION, seed=5))
    first = thinker.open(replace(SESSION, session_id="first"))
    found = thinker.open(replace(SESSION, seed=5))
    assert (computed.prompt_source, found.prompt_source) == (PromptSource.OWN, PromptSource.STORED)
    thinker.hear(first, second(9))
    thinker.stage.close(first)
    for unit in range(4):
        assert said(thinker.hear(found, second(unit))) == said(other.hear(computed, second(unit)))
