"""Sessions that move from one thinker to another, on the tiny checkpoint: what they remember, who is not touched."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import build
from antiphon.core.window import BasicWindow, ContextWindow, OffWindow, SlideMode, WindowPolicy
from antiphon.errors import ContextLengthExceeded, InputError, ResourceExhausted
from antiphon.models.minicpmo.model import Model
from antiphon.models.minicpmo.tokens import PREVIOUS_MARKER, TextTokenizer, load_tokenizer
from antiphon.stages.thinker.rebuild import Retained
from antiphon.stages.thinker.stage import ThinkerStage, ThinkerState
from antiphon.stages.thinker.state import UnitInput, UnitOutcome
from antiphon.units import INPUT_RATE_HZ

WIDE, NARROW = BasicWindow(high_tokens=280, low_tokens=200), BasicWindow(high_tokens=150, low_tokens=100)
SESSION = replace(
    build.SESSION,
    prompt=build.VOICED_PROMPT,
    reference=0.1 * torch.randn(INPUT_RATE_HZ * 3 // 2, generator=torch.Generator().manual_seed(0)),
    window=WIDE,
    max_pictures=1,
    max_text_tokens=8,
    seed=3,
    keeps_inputs=True,
)
PICTURE = Image.effect_noise((60, 60), 50).convert("RGB")
ROUNDING = 1e-3
"""Of states with values near 1, after three layers over a few hundred tokens that were computed in other steps."""


@pytest.fixture(autouse=True, scope="module")
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Model:
    return build.model(tiny_checkpoint)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> TextTokenizer:
    return load_tokenizer(tiny_checkpoint)


@dataclass(frozen=True, slots=True)
class Workers:
    """Two stages that share nothing but weights; on the second one somebody is talking already."""

    first: ThinkerStage
    second: ThinkerStage


@pytest.fixture
def workers(model: Model, tokenizer: TextTokenizer) -> Workers:
    first, second = (
        build.thinker_stage(model, tokenizer, build.decider(model, tokenizer, num_blocks=150)) for _ in range(2)
    )
    other = build.opened(second, replace(SESSION, session_id="other", seed=9))
    for unit in range(3):
        build.hear(second, other, heard(50 + unit))
    return Workers(first, second)


def heard(unit: int) -> UnitInput:
    """Units of very different lengths: pictures, text, or sound alone."""
    pictures = (PICTURE,) if unit % 5 == 2 else ()
    return replace(build.second(unit), pictures=pictures, text_ids=tuple(range(65, 65 + unit % 4)))


def live(stage: ThinkerStage, state: ThinkerState, units: range) -> list[UnitOutcome]:
    return [build.hear(stage, state, heard(unit)) for unit in units]


def moved(stage: ThinkerStage, state: ThinkerState, target: ThinkerStage) -> ThinkerState:
    """Through a pipe, as between processes."""
    retained: Retained = pickle.loads(pickle.dumps(stage.retain(state)))
    stage.close(state)
    return build.opened(target, retained)


def assert_same(there: list[UnitOutcome], here: list[UnitOutcome]) -> None:
    for one, other in zip(there, here, strict=True):
        assert facts(one) == facts(other)
        for mine, his in zip(one.handoffs, other.handoffs, strict=True):
            assert (mine.address, mine.token_ids, mine.ends_turn) == (his.address, his.token_ids, his.ends_turn)
            torch.testing.assert_close(mine.hidden, his.hidden, rtol=0, atol=ROUNDING)


def facts(outcome: UnitOutcome) -> tuple[object, ...]:
    dropped = outcome.slide.dropped if outcome.slide else ()
    kept = outcome.retained_units, outcome.num_context_tokens, outcome.previous_ids
    return outcome.unit, outcome.token_ids, outcome.texts, dropped, kept


def window(kind: str, tokenizer: TextTokenizer) -> WindowPolicy:
    return NARROW if kind == "basic" else ContextWindow(2, 12, tokenizer.encode(PREVIOUS_MARKER))


@pytest.mark.parametrize("mode", SlideMode)
@pytest.mark.parametrize("num_units", [0, 1, 4])
def test_before_anything_slid_a_moved_session_is_the_one_that_stayed(
    workers: Workers, mode: SlideMode, num_units: int
) -> None:
    stays = build.opened(workers.first, replace(SESSION, slide=mode, session_id="stays"))
    moves = build.opened(workers.first, replace(SESSION, slide=mode))
    for state in (stays, moves):
        assert all(outcome.slide is None for outcome in live(workers.first, state, range(num_units)))
    moves = moved(workers.first, moves, workers.second)
    assert moves.mind.memory.context.units == stays.mind.memory.context.units
    following = range(num_units, num_units + 3)
    there, here = live(workers.first, stays, following), live(workers.second, moves, following)
    assert_same([*map(renamed, there)], here)


def renamed(outcome: UnitOutcome) -> UnitOutcome:
    handoffs = (replace(said, address=replace(said.address, session_id="call")) for said in outcome.handoffs)
    return replace(outcome, handoffs=tuple(handoffs))


@pytest.mark.parametrize("kind", ["basic", "context"])
def test_a_session_that_moves_after_every_unit_is_a_reprefill_session_that_stayed(
    workers: Workers, tokenizer: TextTokenizer, kind: str
) -> None:
    """Turns, half characters, ears, penalties and draws go along; slides happen on the way, and pictures."""
    session = replace(SESSION, window=window(kind, tokenizer), slide=SlideMode.REPREFILL)
    stays = build.opened(workers.first, replace(session, session_id="stays"))
    there = live(workers.first, stays, range(16))
    assert sum(outcome.slide is not None for outcome in there) > 2
    assert any(outcome.handoffs for outcome in there)
    assert kind == "basic" or there[-1].previous_ids
    stages = [workers.first, workers.second]
    moves = build.opened(workers.first, session)
    here: list[UnitOutcome] = []
    for unit in range(16):
        here += live(stages[unit % 2], moves, range(unit, unit + 1))
        moves = moved(stages[unit % 2], moves, stages[1 - unit % 2])
        kept = moves.mind.memory.context
        assert [record.unit for record in kept.units] == [*here[-1].retained_units]
        assert (kept.num_tokens, kept.previous) == (here[-1].num_context_tokens, here[-1].previous_ids)
        kept.check()
    assert_same([*map(renamed, there)], here)


@pytest.mark.parametrize("mode", [SlideMode.ROTATE_QUERY, SlideMode.ROTATE_KEYS])
@pytest.mark.parametrize("kind", ["basic", "context"])
def test_after_slides_a_moved_session_has_the_memory_of_a_reprefill_session(
    workers: Workers, tokenizer: TextTokenizer, mode: SlideMode, kind: str
) -> None:
    state = build.opened(workers.first, replace(SESSION, window=window(kind, tokenizer), slide=mode))
    outcomes = live(workers.first, state, range(8))
    assert sum(outcome.slide is not None for outcome in outcomes) > 1
    retained = workers.first.retain(state)
    said = []
    for slide in (mode, SlideMode.REPREFILL):
        rebuilt = build.opened(workers.second, replace(retained, session=replace(retained.session, slide=slide)))
        assert rebuilt.mind.memory.context.units == state.mind.memory.context.units
        assert rebuilt.mind.memory.context.previous == state.mind.memory.context.previous
        said.append(live(workers.second, rebuilt, range(8, 9)))
        workers.second.close(rebuilt)
    assert_same(*said)


def test_what_is_retained_is_one_record_per_unit_of_the_window_and_no_more(workers: Workers) -> None:
    state = build.opened(workers.first, replace(SESSION, window=NARROW))
    for unit in range(10):
        live(workers.first, state, range(unit, unit + 1))
        memory = state.mind.memory
        units = workers.first.retain(state).units
        assert [one.record for one in units] == [*memory.context.units]
        assert memory.num_kept_tokens == sum(one.record.num_tokens for one in units) <= NARROW.high_tokens
        for one in units:
            assert one.inputs.shape[0] == one.record.num_tokens
            assert one.inputs.untyped_storage().nbytes() == one.inputs.nbytes, "more is held than its rows"


def test_a_session_that_keeps_no_inputs_cannot_be_moved_and_goes_on(workers: Workers) -> None:
    state = build.opened(workers.first, replace(SESSION, keeps_inputs=False))
    live(workers.first, state, range(2))
    with pytest.raises(InputError, match="keeps_inputs"):
        workers.first.retain(state)
    assert state.mind.memory.num_kept_tokens == 0
    assert live(workers.first, state, range(2, 3))[0].unit == 2


def test_a_rebuild_without_room_for_a_unit_is_refused_and_the_others_go_on(
    workers: Workers, model: Model, tokenizer: TextTokenizer
) -> None:
    state = build.opened(workers.first, SESSION)
    live(workers.first, state, range(7))
    retained = workers.first.retain(state)
    other, twin = (build.opened(workers.first, replace(SESSION, session_id=name, seed=1)) for name in ("other", "twin"))
    live(workers.first, other, range(2))
    live(workers.first, twin, range(2))
    workers.first.close(state)
    too_small = replace(retained, session=replace(SESSION, window=OffWindow(retained.num_tokens)))
    with pytest.raises(ContextLengthExceeded, match=f"holds {retained.num_tokens} of"):
        build.opened(workers.first, too_small)
    there, here = (live(workers.first, one, range(2, 4)) for one in (twin, other))
    assert [facts(one) for one in there] == [facts(one) for one in here]
    full = build.thinker_stage(model, tokenizer, build.decider(model, tokenizer, num_blocks=20))
    with pytest.raises(ResourceExhausted):
        build.opened(full, retained)
    # Nothing was left behind by either: the session is taken where there is room, under its own name.
    again = build.opened(workers.first, retained)
    assert live(workers.first, again, range(7, 8))[0].unit == 7
