"""What must be true of every window, prompt and turn, beyond what the tests of single parts show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import build
from antiphon.config import Dtype, EngineConfig, Placement, SessionConfig, everywhere
from antiphon.core.batch_grid import BatchGrid
from antiphon.core.blocks import BlockPool
from antiphon.core.context import Context
from antiphon.core.duplex import DuplexConfig, UnitDecisions
from antiphon.core.events import UnitDecided
from antiphon.core.messages import Address, Handoff
from antiphon.core.sampling import CodecSampling, Draws
from antiphon.core.window import BasicWindow, ContextWindow, OffWindow, SlideMode, SlidePlan, WindowPolicy
from antiphon.engine import Engine
from antiphon.errors import ContextLengthExceeded
from antiphon.live import LiveEngine, LiveSession
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.flow import draw_noise
from antiphon.models.minicpmo.model import Model
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.models.minicpmo.tokens import PREVIOUS_MARKER, TextTokenizer, load_tokenizer
from antiphon.models.minicpmo.vocoder import NoNoise
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.code2wav.renderer import ChunkRow, Renderer
from antiphon.stages.code2wav.state import Code2WavState
from antiphon.stages.paged import CacheConfig
from antiphon.stages.stepping import StepLoop
from antiphon.stages.talker.stage import TalkerStage
from antiphon.stages.talker.state import TalkerSession
from antiphon.stages.thinker.choosing import TextDraw
from antiphon.units import INPUT_RATE_HZ, MEL_FRAMES_PER_CODEC_TOKEN, UNIT_SAMPLES
from core.brute_force import snapshot
from stages.memories import (
    CONFIG,
    CONTEXT,
    EPS,
    Session,
    embeds,
    first_layer,
    paged,
    played,
    random_network,
    stored,
)


@pytest.fixture(autouse=True, scope="module")
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def network() -> ThinkerNetwork:
    return random_network()


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Model:
    return build.model(tiny_checkpoint)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> TextTokenizer:
    return load_tokenizer(tiny_checkpoint)


# What a window keeps


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=40),
    prompt_tokens=st.sampled_from((0, 7, 96, 100, 112)),
    low_tokens=st.integers(0, 111),
)
def test_limits_mean_the_length_of_the_whole_context_in_every_mode(
    lengths: list[int], prompt_tokens: int, low_tokens: int
) -> None:
    window = BasicWindow(112, low_tokens)
    contexts = [Context(BlockPool(100, block_size=4), mode, max_tokens=1000) for mode in SlideMode]
    for context in contexts:
        context.append_prompt(prompt_tokens)
    for unit, length in enumerate(lengths):
        kept: set[tuple[int, ...]] = set()
        for context in contexts:
            context.append(length)
            context.close_unit(unit, ())
            plan = window.plan(context.num_tokens, context.units, ())
            assert (plan is None) == (context.num_tokens <= 112 or not context.units)
            if plan is not None:
                context.slide(plan)
                assert context.num_tokens <= low_tokens or not context.units, "more is kept than was asked"
            kept.add(tuple(record.unit for record in context.units))
            context.check()
        assert len(kept) == 1


@pytest.mark.parametrize("mode", SlideMode)
def test_a_plan_that_cannot_be_applied_changes_nothing(mode: SlideMode) -> None:
    pool = BlockPool(40, block_size=4)
    context = Context(pool, mode, max_tokens=30)
    context.append_prompt(6)
    context.append_suffix((1, 2))
    for unit in range(3):
        context.append(5)
        context.close_unit(unit, (unit,))
    context.slide(SlidePlan(1, (7,)))
    before = snapshot(context, pool)
    with pytest.raises(AssertionError, match="for 2 units"):
        context.slide(SlidePlan(3, (7,)))
    with pytest.raises(ContextLengthExceeded, match="limit 30"):
        context.slide(SlidePlan(1, (7,) * 18))
    assert snapshot(context, pool) == before
    context.slide(SlidePlan(1, (7,) * 17))
    assert context.num_tokens == 30


MIXED = (13, 79, 1, 32, 7, 98, 12, 80)
"""Listening and talking units, with and without a picture, and one of a single token."""


@pytest.mark.parametrize("mode", SlideMode)
@pytest.mark.parametrize("prompt_tokens", [0, 7, 96, 100, 112])
def test_record_cache_and_kept_inputs_agree_after_slides_an_append_and_a_rebuild(
    network: ThinkerNetwork, mode: SlideMode, prompt_tokens: int
) -> None:
    """On the retained tokens, their rows and their positions; the limits are the lengths of whole contexts."""
    window = BasicWindow(high_tokens=112, low_tokens=96)
    session = Session(
        network, paged(network, num_blocks=120), window, mode, prompt_tokens, (), MIXED, keeps_inputs=True
    )
    context = session.memory.context
    lengths: list[int] = []
    first_kept = 0
    for unit in range(3 * len(MIXED)):
        session.live(unit)
        lengths.append(MIXED[unit % len(MIXED)])
        if prompt_tokens + sum(lengths[first_kept:]) > window.high_tokens:
            while first_kept <= unit and prompt_tokens + sum(lengths[first_kept:]) > window.low_tokens:
                first_kept += 1
        assert [record.unit for record in context.units] == list(range(first_kept, unit + 1))
        assert_agreement(session, torch.empty(0, CONFIG.decoder.hidden_size))
    assert session.num_slides > 5
    retained = session.memory.retained()
    rebuilt = Session(
        network, paged(network, num_blocks=120), window, mode, prompt_tokens, (), MIXED, keeps_inputs=True
    )
    played(rebuilt.decoder, rebuilt.memory.refill((), retained))
    assert rebuilt.memory.context.units == context.units
    following = embeds(9, seed=7)
    for one in (session, rebuilt):
        one.feed(following)
        assert_agreement(one, following)


def assert_agreement(session: Session, open_inputs: Tensor) -> None:
    """open_inputs: [n, hidden] of the unit that is not closed."""
    context = session.memory.context
    inputs = [session.inputs(record.unit) for record in context.units]
    assert [record.num_tokens for record in context.units] == [one.shape[0] for one in inputs]
    if not open_inputs.shape[0]:
        kept = session.memory.retained()
        assert [one.record for one in kept] == list(context.units)
        assert all(torch.equal(one.inputs, fed) for one, fed in zip(kept, inputs, strict=True))
    assert session.memory.num_kept_tokens == sum(one.shape[0] for one in (*inputs, open_inputs))
    assert context.num_tokens == session.prompt_tokens + sum(one.shape[0] for one in (*inputs, open_inputs))
    if not context.num_tokens:
        return
    positions = torch.arange(context.num_tokens)
    positions[context.num_anchor_tokens :] += context.shift
    everything = torch.cat([embeds(session.prompt_tokens, seed=1), *inputs, open_inputs])
    keys, values = first_layer(session.network, everything, positions)
    in_cache = [stored(session.decoder, segment) for segment in context.segments()]
    # A product of another height, and one rotation of a pair for each slide.
    tolerance = (CONFIG.decoder.hidden_size + 5 * session.num_slides) * EPS * keys.norm(dim=-1).max().item()
    torch.testing.assert_close(torch.cat([one[0][0] for one in in_cache]), keys, rtol=0, atol=tolerance)
    torch.testing.assert_close(torch.cat([one[1][0] for one in in_cache]), values, rtol=0, atol=tolerance)


def test_words_for_which_there_is_no_room_end_their_session_and_no_other(network: ThinkerNetwork) -> None:
    alone = Session(network, paged(network), CONTEXT, SlideMode.ROTATE_QUERY, lengths=(5,))
    played(alone.decoder, alone.talk(range(12)))
    decoder = paged(network)
    goes_on, ends = (
        Session(network, decoder, CONTEXT, SlideMode.ROTATE_QUERY, lengths=(length,), max_tokens=limit)
        # Prompt, suffix and four units of one token fit; three, and a word behind its marker, do not.
        for length, limit in ((5, 5000), (1, 6 + 3 + 4))
    )
    loop: StepLoop[TextDraw, int] = StepLoop(decoder, build.NoDraws())
    results = build.run_together(loop, [("goes on", goes_on.talk(range(12))), ("ends", ends.talk(range(12)))])
    assert results["goes on"] == 11
    assert isinstance(results["ends"], ContextLengthExceeded)
    assert goes_on.memory.context.previous == alone.memory.context.previous != ()
    # One row more in a step may round otherwise.
    for here, there in zip(goes_on.ring, alone.ring, strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=1e-4)
    ends.memory.context.check()
    assert [record.unit for record in ends.memory.context.units] == [1, 2, 3, 4]
    assert not ends.memory.context.previous, "nothing was changed by the slide that was refused"
    ends.memory.free()
    goes_on.memory.free()
    decoder.pool.check([])


@pytest.mark.parametrize("mode", SlideMode)
def test_with_the_window_off_a_hundred_units_leave_no_embeddings_behind(
    network: ThinkerNetwork, mode: SlideMode
) -> None:
    session = Session(network, paged(network, num_blocks=400), OffWindow(5000), mode)
    for unit in range(100):
        session.live(unit)
        assert session.memory.num_kept_tokens == 0


def test_an_hour_of_units_keeps_the_embeddings_of_its_window_and_no_more(network: ThinkerNetwork) -> None:
    window = BasicWindow(high_tokens=60, low_tokens=20)
    session = Session(network, paged(network), window, SlideMode.ROTATE_QUERY, lengths=(2, 3), keeps_inputs=True)
    context = session.memory.context
    most = 0
    for unit in range(3600):
        played(session.decoder, session.talk(range(unit, unit + 1)))
        most = max(most, session.memory.num_kept_tokens)
        assert session.memory.num_kept_tokens == context.num_tokens - context.num_anchor_tokens
    assert most <= window.high_tokens
    for one in session.memory.retained():
        assert one.inputs.untyped_storage().nbytes() == one.inputs.nbytes, "more is held than its rows"


# Prompts, in a whole thinker

SESSION = replace(
    build.SESSION,
    prompt=build.VOICED_PROMPT,
    reference=0.1 * torch.randn(INPUT_RATE_HZ * 3 // 2, generator=torch.Generator().manual_seed(0)),
    window=BasicWindow(high_tokens=150, low_tokens=110),
    seed=3,
)


@pytest.mark.parametrize("mode", SlideMode)
@pytest.mark.parametrize("kind", ["off", "basic", "context"])
def test_the_protected_prompt_is_prefix_voice_and_suffix_and_nothing_else(
    model: Model, tokenizer: TextTokenizer, mode: SlideMode, kind: str
) -> None:
    windows: dict[str, WindowPolicy] = {
        "off": OffWindow(700),
        "basic": SESSION.window,
        "context": ContextWindow(2, 12, tokenizer.encode(PREVIOUS_MARKER)),
    }
    decider = build.decider(model, tokenizer, num_blocks=80)
    stage = build.thinker_stage(model, tokenizer, decider)
    state = build.opened(stage, replace(SESSION, slide=mode, window=windows[kind]))
    prefix, suffix = (tokenizer.encode(text) for text in (SESSION.prompt.prefix, SESSION.prompt.suffix))
    voice = build.senses(model, tokenizer).embed_reference(SESSION.reference)
    assert voice.shape[0] == 15
    num_slides = 0
    for unit in range(12):
        num_slides += build.hear(stage, state, build.second(unit)).slide is not None
        context = state.mind.memory.context
        num_unit_tokens = sum(record.num_tokens for record in context.units)
        protected = torch.cat([decider.embed(prefix), voice, decider.embed((*context.previous, *suffix))])
        assert context.num_anchor_tokens == protected.shape[0]
        assert context.num_tokens == protected.shape[0] + num_unit_tokens
        wanted = first_layer(model.thinker, protected, torch.arange(protected.shape[0]))
        anchor = [stored(decider.decoder, segment) for segment in context.segments()[:-1]]
        for place in (0, 1):
            there = torch.cat([one[place][0] for one in anchor])
            torch.testing.assert_close(there, wanted[place], rtol=1e-5, atol=1e-5)
    assert kind != "context" or context.previous
    assert (num_slides > 1) == (kind != "off")


# Callers beside each other


def test_sound_that_makes_no_unit_changes_nothing_for_the_callers_beside_it(tiny_checkpoint: Path) -> None:
    session = SessionConfig(window=BasicWindow(200, 120), duplex=DuplexConfig(num_forced_listens=0), max_pictures=0)
    config = EngineConfig(everywhere("cpu", Placement.HERE), Dtype.FLOAT32, max_calls=3)
    engine = Engine.load(open_checkpoint(tiny_checkpoint), config, session)
    voice = build.voice(engine)

    def decided(caller: LiveSession) -> tuple[int, ...]:
        return next(one.token_ids for one in caller.happenings() if isinstance(one, UnitDecided))

    def listen(quiet_samples: int) -> list[tuple[int, ...]]:
        """Two callers with full seconds; the one between them sends so many samples a second."""
        with LiveEngine(engine) as live:
            callers = [live.open(name, replace(session, seed=i), torch.empty(0), voice) for i, name in enumerate("abc")]
            first, quiet, last = callers
            units: list[tuple[int, ...]] = []
            for unit in range(6):
                quiet.send_audio(build.second(90).samples[:quiet_samples])
                first.send_audio(build.second(unit).samples)
                last.send_audio(build.second(40 + unit).samples)
                units += (decided(first), decided(last))
            quiet.close()
            assert not any(isinstance(one, UnitDecided) for one in quiet.happenings())
        return units

    assert listen(UNIT_SAMPLES // 7) == listen(0)


# The last words of a reply


@pytest.mark.parametrize(
    "sampled",
    [
        # In an open turn the model would rather listen: `tts_bos` stands for it, and the turn ends later.
        ["listen", "word", "word", "turn_eos", "chunk_eos"],
        ["word", "listen", "word", "turn_eos", "chunk_eos"],
        # It ends, and then it listens: the unit is a listening one.
        ["word", "word", "turn_eos", "listen"],
        ["listen", "turn_eos", "listen"],
    ],
)
def test_the_last_words_of_a_reply_are_spoken_and_the_next_turn_starts_clean(
    model: Model, tokenizer: TextTokenizer, sampled: list[str]
) -> None:
    special = tokenizer.special.duplex
    ids = {"listen": special.listen, "turn_eos": special.turn_eos, "chunk_eos": special.chunk_eos, "word": 70}
    unit = UnitDecisions(special, DuplexConfig(), is_turn_open=True, is_forced_listen=False)
    for name in sampled:
        unit.take(ids[name])
    (utterance,) = unit.utterances()
    assert unit.fed == [special.tts_bos if name == "listen" else ids[name] for name in sampled[:-1]]
    assert utterance.token_ids == tuple(unit.fed[1:])
    assert utterance.ends_turn
    assert not unit.is_turn_open

    talker = TalkerStage(model.talker, CacheConfig(20))
    state = talker.open(TalkerSession("call", CodecSampling(), Draws.SAMPLED, seed=1))
    synthesizer = model.synthesizer(draw_noise(80, 0, build.CPU), build.speech_arena(model))
    renderer, voice = (
        Renderer(synthesizer, model.vocoder(), BatchGrid((1,))),
        synthesizer.build_voice(VOICE),
    )
    heard, fresh = (renderer.open(voice, NoNoise(build.CPU)) for _ in range(2))

    def spoken(who: Code2WavState, tokens: Sequence[int], *, is_turn_end: bool, is_flush: bool) -> Tensor:
        (samples,) = renderer.speak([ChunkRow(who, tokens, is_turn_end, is_flush)])
        assert isinstance(samples, Tensor)
        return samples

    def say(number: int, words: tuple[int, ...], *, ends_turn: bool) -> Tensor:
        hidden = torch.randn(
            len(words), model.config.talker.llm_hidden_size, generator=torch.Generator().manual_seed(5)
        )
        said = Handoff(Address("call", 0, 0, number), 0.0, number, words, hidden, ends_turn)
        chunk = build.run_alone(talker.speaker.loop, talker.speaker.speak(state, said))
        assert chunk.ends_turn == ends_turn
        firsts.append(chunk.is_first_of_turn)
        return spoken(heard, chunk.codec_tokens, is_turn_end=chunk.ends_turn, is_flush=chunk.is_first_of_turn)

    firsts: list[bool] = []
    say(0, (66, 67), ends_turn=False)
    assert say(1, utterance.token_ids, ends_turn=utterance.ends_turn).numel()
    assert state.context.num_tokens == 0
    talker.speaker.decoder.pool.check([])
    assert heard.buffer.tokens == fresh.buffer.tokens
    # A turn after it sounds as it does in a session that has not said anything.
    tokens = tuple(range(100, 125))
    after, first = (spoken(one, tokens, is_turn_end=True, is_flush=True) for one in (heard, fresh))
    assert torch.equal(after, first)
    say(2, (68,), ends_turn=False)
    assert firsts == [True, False, True]


VOICE = VoicePrompt(
    tuple(range(30)),
    torch.randn(MEL_FRAMES_PER_CODEC_TOKEN * 30, 80, generator=torch.Generator().manual_seed(1)),
    torch.randn(192, generator=torch.Generator().manual_seed(2)),
)
