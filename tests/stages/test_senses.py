"""Ears and eyes of many sessions at once, on the tiny checkpoint: nobody's numbers or errors are another's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from PIL import Image
from torch import Tensor

import build
from antiphon.core.duplex import DuplexConfig
from antiphon.core.sampling import Draws
from antiphon.core.window import OffWindow
from antiphon.errors import (
    AntiphonError,
    AudioError,
    ContextLengthExceeded,
    ImageError,
    InputError,
    InternalError,
    PromptTooLong,
)
from antiphon.models.minicpmo.model import Model
from antiphon.models.minicpmo.tokens import TextTokenizer, load_tokenizer
from antiphon.stages.thinker.senses import Senses, SensesState, UnitRow
from antiphon.stages.thinker.state import UnitInput
from antiphon.units import UNIT_SAMPLES

NUM_SESSIONS, NUM_UNITS = 5, 6
SESSION = replace(
    build.SESSION,
    prompt=build.VOICED_PROMPT,
    window=OffWindow(700),
    max_pictures=1,
    max_text_tokens=8,
    duplex=DuplexConfig(num_forced_listens=0),
    draws=Draws.MOST_LIKELY,
)


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


@pytest.fixture(scope="module")
def senses(model: Model, tokenizer: TextTokenizer) -> Senses:
    return build.senses(model, tokenizer)


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    return Image.effect_noise((width, height), 50).convert(mode)


PICTURES = (picture(64, 48), picture(30, 90), picture(90, 30), picture(60, 60))


def second(session: int, unit: int) -> UnitInput:
    """Sound, and now and then pictures of several shapes, and text."""
    number = 3 * session + unit
    pictures = tuple(PICTURES[(number + i) % 4] for i in range(number % 3))
    return replace(build.second(100 * session + unit), pictures=pictures, text_ids=tuple(range(65, 65 + number % 4)))


@dataclass(slots=True)
class Caller:
    """A session that goes through its own seconds."""

    number: int
    state: SensesState
    num_units: int = 0

    def next_row(self) -> UnitRow:
        self.num_units += 1
        return UnitRow(self.state, second(self.number, self.num_units - 1), max_slices=1 + 2 * (self.number % 2))


def embedded(senses: Senses, rows: Sequence[UnitRow]) -> list[Tensor]:
    """What rows come to that must all be fine."""
    embeds = senses.embed_units(rows)
    failures = [one for one in embeds if isinstance(one, AntiphonError)]
    assert not failures
    return [one for one in embeds if isinstance(one, Tensor)]


@pytest.fixture(scope="module")
def alone(senses: Senses) -> list[list[Tensor]]:
    """By session and unit."""
    callers = [Caller(number, senses.open()) for number in range(NUM_SESSIONS)]
    return [[embedded(senses, [caller.next_row()])[0] for _ in range(NUM_UNITS)] for caller in callers]


groups = st.lists(st.permutations(range(NUM_SESSIONS)).flatmap(lambda p: st.integers(1, 5).map(lambda n: p[:n])))


@settings(max_examples=12)
@given(groups=groups)
def test_a_second_comes_to_the_same_bits_alone_and_in_any_company(
    senses: Senses, alone: list[list[Tensor]], groups: list[list[int]]
) -> None:
    callers = [Caller(number, senses.open()) for number in range(NUM_SESSIONS)]
    # Everybody gets to the end: the groups first, then all that are left, together.
    for group in [*groups, *[list(range(NUM_SESSIONS))] * NUM_UNITS]:
        there = [callers[number] for number in group if callers[number].num_units < NUM_UNITS]
        for caller, embeds in zip(there, embedded(senses, [one.next_row() for one in there]), strict=True):
            assert torch.equal(embeds, alone[caller.number][caller.num_units - 1])


def test_the_encoders_run_once_for_all_rows_and_once_for_each_length_of_picture(model: Model, senses: Senses) -> None:
    runs: list[str] = []
    hooks = [
        model.audio.apm.layer_norm.register_forward_hook(lambda *_: runs.append("audio")),
        model.vision.tower.register_forward_hook(lambda *_: runs.append("vision")),
    ]
    pictures = [PICTURES[0]] * 3 + [PICTURES[1]]
    rows = [UnitRow(senses.open(), replace(build.second(i), pictures=(p,)), 1) for i, p in enumerate(pictures)]
    embedded(senses, rows)
    for hook in hooks:
        hook.remove()
    assert sorted(runs) == ["audio", "vision", "vision"]


BAD = {
    "not finite": (replace(build.second(0), samples=torch.full((UNIT_SAMPLES,), torch.nan)), AudioError),
    "half a second": (replace(build.second(0), samples=torch.zeros(UNIT_SAMPLES // 2)), AudioError),
    "two channels": (replace(build.second(0), samples=torch.zeros(2, UNIT_SAMPLES)), AudioError),
    "double precision": (replace(build.second(0), samples=torch.zeros(UNIT_SAMPLES, dtype=torch.float64)), AudioError),
    "a picture like a line": (replace(build.second(0), pictures=(PICTURES[0], picture(1, 3000))), ImageError),
    # These show in the common run only, the last one when all have been heard.
    "a picture without colours": (replace(build.second(0), pictures=(picture(64, 48, "L"),)), InternalError),
    "ids that are none": (replace(build.second(0), text_ids=(10**6,)), InternalError),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_fails_alone_and_its_session_and_all_others_go_on(
    senses: Senses, alone: list[list[Tensor]], name: str
) -> None:
    bad, error = BAD[name]
    callers = [Caller(number, senses.open()) for number in range(3)]
    for unit in range(3):
        first, last = callers[0].next_row(), callers[2].next_row()
        embeds = senses.embed_units([first, UnitRow(callers[1].state, bad, 1), last])
        assert type(embeds[1]) is error
        for number in (0, 2):
            one = embeds[number]
            assert isinstance(one, Tensor)
            assert torch.equal(one, alone[number][unit])
        (good,) = embedded(senses, [callers[1].next_row()])
        assert torch.equal(good, alone[1][unit])


def test_a_failure_when_the_encoder_starts_over_leaves_the_session_as_it_was(senses: Senses) -> None:
    state, twin = senses.open(), senses.open()
    bad, _ = BAD["ids that are none"]
    for unit in range(32):
        if unit in (28, 29, 30):
            (failed,) = senses.embed_units([UnitRow(state, bad, 1)])
            assert isinstance(failed, InternalError)
        row, other = (UnitRow(one, build.second(unit), 1) for one in (state, twin))
        assert torch.equal(embedded(senses, [row])[0], embedded(senses, [other])[0])
    assert (state.hearing.num_resets, state.hearing.num_positions) == (1, twin.hearing.num_positions)


def test_a_history_that_was_taken_out_stays_what_it_was_and_another_state_goes_on_from_it(senses: Senses) -> None:
    state, other = senses.open(), senses.open()
    for unit in range(28):
        embedded(senses, [UnitRow(state, build.second(unit), 1)])
    stream, history = state.stream.fork(), state.hearing.history()
    assert history.kv.untyped_storage().nbytes() == history.kv.nbytes, "more is held than the history"
    # The encoder starts over in the second of these, and writes where the old history was.
    there = [embedded(senses, [UnitRow(state, build.second(unit), 1)])[0] for unit in range(28, 31)]
    other.stream = stream
    other.hearing.restore(history)
    here = [embedded(senses, [UnitRow(other, build.second(unit), 1)])[0] for unit in range(28, 31)]
    assert all(torch.equal(*pair) for pair in zip(there, here, strict=True))
    assert other.hearing.num_resets == state.hearing.num_resets == 1


def test_typed_text_stands_behind_the_sound(model: Model, senses: Senses) -> None:
    heard = replace(build.second(1), pictures=(PICTURES[0],))
    (without,) = embedded(senses, [UnitRow(senses.open(), heard, 1)])
    (with_text,) = embedded(senses, [UnitRow(senses.open(), replace(heard, text_ids=(70, 71, 72)), 1)])
    assert torch.equal(with_text, torch.cat([without, model.thinker.embed_ids((70, 71, 72))]))


def test_typed_text_takes_part_in_the_first_decision(model: Model, tokenizer: TextTokenizer) -> None:
    logits: list[Tensor] = []
    hook = model.thinker.lm_head.register_forward_hook(lambda _module, _inputs, out: logits.append(out))
    typed: dict[str, tuple[int, Tensor]] = {}
    for text in ("", "Stop!", "Go on"):
        stage = build.thinker_stage(model, tokenizer, build.decider(model, tokenizer, num_blocks=60))
        state = build.opened(stage, SESSION)
        num_prompt_tokens = state.mind.memory.context.num_tokens
        logits.clear()
        outcome = build.hear(stage, state, replace(build.second(3), text_ids=tokenizer.encode(text)))
        num_input_tokens = outcome.num_context_tokens - num_prompt_tokens - len(outcome.token_ids)
        typed[text] = num_input_tokens, logits[0]
    hook.remove()
    assert {text: num for text, (num, _) in typed.items()} == {"": 11, "Stop!": 11 + 5, "Go on": 11 + 5}
    none, stop, go_on = (first for _, first in typed.values())
    assert not torch.allclose(none, stop, atol=0.01)
    assert not torch.allclose(stop, go_on, atol=0.01)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("far too long", "12 tokens of text; this session takes 8"),
        ("<|listen|>", "plain text"),
        ("a</unit>", "plain text"),
    ],
)
def test_text_that_is_too_long_or_steers_the_model_is_refused(
    model: Model, tokenizer: TextTokenizer, text: str, error: str
) -> None:
    stage = build.thinker_stage(model, tokenizer, build.decider(model, tokenizer, num_blocks=60))
    state = build.opened(stage, SESSION)
    with pytest.raises(InputError, match=error):
        build.hear(stage, state, replace(build.second(0), text_ids=tokenizer.encode(text)))
    for ids in ((-1,), (10**6,)):
        with pytest.raises(InputError, match="plain text"):
            build.hear(stage, state, replace(build.second(0), text_ids=ids))
    assert build.hear(stage, state, replace(build.second(0), text_ids=tokenizer.encode("fits"))).unit == 0


def test_a_unit_is_refused_if_its_text_might_not_fit_and_one_without_text_still_is_taken(
    model: Model, tokenizer: TextTokenizer
) -> None:
    num_prompt_tokens = len(tokenizer.encode(SESSION.prompt.prefix) + tokenizer.encode(SESSION.prompt.suffix))
    sound, seen, typed, decided = 1 + 10, 66, 60, 20 + 1
    limit = num_prompt_tokens + sound + seen + typed + decided
    session = replace(SESSION, max_text_tokens=typed, window=OffWindow(limit))
    stage = build.thinker_stage(model, tokenizer, build.decider(model, tokenizer, num_blocks=60))
    with pytest.raises(PromptTooLong):
        build.opened(stage, replace(session, window=OffWindow(limit - 1)))
    state = build.opened(stage, session)
    context = state.mind.memory.context
    while context.num_tokens + sound + typed + decided <= limit:
        build.hear(stage, state, build.second(0))
    before = context.num_tokens
    with pytest.raises(ContextLengthExceeded):
        build.hear(stage, state, replace(build.second(0), text_ids=(66,) * typed))
    assert context.num_tokens == before
    assert build.hear(stage, state, build.second(0)).num_context_tokens > before
