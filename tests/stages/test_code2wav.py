"""Rendering: chunks in, PCM out, turn by turn, session by session, in any company. Numbers: tests/golden/code2wav."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import build_voice
from antiphon.core.batch_grid import BatchGrid
from antiphon.core.codec_buffer import CHUNK_TOKENS
from antiphon.errors import AntiphonError, InputError, InternalError, ShapeError
from antiphon.models.minicpmo.flow import MelSynthesizer
from antiphon.models.minicpmo.flow_cache import Voice
from antiphon.models.minicpmo.vocoder import NoNoise, SeededNoise, SourceNoise, Vocoder, VocoderState
from antiphon.stages.code2wav.renderer import ChunkRow, Renderer, grid_on, unit_pcm
from antiphon.stages.code2wav.state import Code2WavState
from antiphon.units import OUTPUT_SAMPLES_PER_UNIT
from build_voice import CPU

VOCAB = build_voice.FLOW.vocab_size
UNIT = range(100, 100 + CHUNK_TOKENS)
NUM_STREAMS = 8
GRID = BatchGrid((1, 2, 3, 16))
SHARED_TOLERANCE = 4 / 32768
"""Steps of PCM by which a shared solve may differ: one from rounding to 16 bits, the rest as in test_hift.py."""


@dataclass(frozen=True, slots=True)
class Setup:
    """alone: solves are of one row, as on the CPU. shared: of all that fit, as on a GPU."""

    synthesizer: MelSynthesizer
    vocoder: Vocoder
    alone: Renderer
    shared: Renderer
    voices: tuple[Voice, ...]
    foreign_voice: Voice
    begun: list[Code2WavState] = field(default_factory=list)

    def open(self, who: int = 0) -> Code2WavState:
        """Streams have different noise and, up to the number of voices, different voices."""
        return self.begin(self.voices[who % len(self.voices)], SeededNoise(who, CPU))

    def begin(self, voice: Voice, noise: SourceNoise) -> Code2WavState:
        self.begun.append(self.alone.open(voice, noise))
        return self.begun[-1]

    def end_all(self) -> None:
        """Nothing is left of any session then."""
        for state in self.begun:
            self.alone.reset_turn(state)
        self.begun.clear()
        assert self.synthesizer.arena.num_seated == 0
        assert self.synthesizer.arena.num_held.all == (0, 0, 0)

    def speak(
        self, state: Code2WavState, tokens: Sequence[int], *, is_turn_end: bool = False, is_flush: bool = False
    ) -> Tensor:
        (samples,) = self.alone.speak([ChunkRow(state, tokens, is_turn_end, is_flush)])
        return heard(samples)


def heard(result: Tensor | AntiphonError) -> Tensor:
    """What a row came to. Raises: its error."""
    if isinstance(result, AntiphonError):
        raise result
    return result


def row(state: Code2WavState, tokens: Sequence[int]) -> ChunkRow:
    return ChunkRow(state, tokens, is_turn_end=False, is_flush=False)


@pytest.fixture(autouse=True)
def _inference(setup: Setup) -> Iterator[None]:
    with torch.inference_mode():
        yield
        setup.end_all()


@pytest.fixture(scope="module")
def setup() -> Setup:
    with torch.inference_mode():
        synthesizer, vocoder = build_voice.synthesizer(), Vocoder(build_voice.hift())
        prompts = [build_voice.prompt(num_tokens, seed=num_tokens) for num_tokens in (3, 30, 60)]
        foreign = build_voice.synthesizer(num_steps=synthesizer.num_steps - 1)
        return Setup(
            synthesizer,
            vocoder,
            Renderer(synthesizer, vocoder, grid_on(CPU, GRID)),
            Renderer(synthesizer, vocoder, grid_on(torch.device("cuda"), GRID)),
            tuple(synthesizer.build_voice(prompt) for prompt in prompts),
            foreign.build_voice(prompts[0]),
        )


def test_a_full_unit_gives_a_second_and_the_last_unit_all_the_rest(setup: Setup) -> None:
    state = setup.open()
    assert len(setup.speak(state, UNIT)) == OUTPUT_SAMPLES_PER_UNIT
    assert len(setup.speak(state, UNIT)) == OUTPUT_SAMPLES_PER_UNIT
    # 3 tokens that were looked at, 4 new ones, and the 8 frames that the vocoder held back
    assert len(setup.speak(state, range(4), is_turn_end=True)) == (2 * 7 + 8) * 480


def test_tokens_that_do_not_fill_a_window_are_held_and_give_no_sample(setup: Setup) -> None:
    state = setup.open()
    held = setup.speak(state, UNIT[:4], is_flush=True)
    assert held.shape == (0,)
    assert held.dtype == torch.float32
    assert len(setup.speak(state, UNIT[4:])) == OUTPUT_SAMPLES_PER_UNIT


def test_a_short_first_unit_is_filled_with_silence_in_front(setup: Setup) -> None:
    samples = setup.speak(setup.open(), UNIT[:10], is_flush=True)
    assert len(samples) == OUTPUT_SAMPLES_PER_UNIT
    start = OUTPUT_SAMPLES_PER_UNIT - 2 * 10 * 480 + 3840
    assert not samples[:start].any()
    assert samples[start:].any()


def test_samples_are_steps_of_16_bit_pcm(setup: Setup) -> None:
    steps = setup.speak(setup.open(), UNIT) * 32768
    assert torch.equal(steps, steps.round())
    clipped = unit_pcm([torch.tensor([-1.5, -1.0, -0.9999 / 32767, 1.9 / 32767, 1.0, 1.05])], is_turn_end=True)
    assert (clipped * 32768).tolist() == [-32767, -32767, 0, 1, 32767, 32767]


@settings(max_examples=10)
@given(st.lists(st.integers(0, 40), max_size=8))
def test_a_turn_sounds_the_same_however_its_tokens_arrive(setup: Setup, sizes: list[int]) -> None:
    setup.end_all()
    tokens = range(sum(sizes))
    whole = setup.speak(setup.open(), tokens, is_turn_end=True)
    state, pieces, start = setup.open(), [], 0
    for size in sizes:
        pieces.append(setup.speak(state, tokens[start : start + size]))
        start += size
    pieces.append(setup.speak(state, [], is_turn_end=True))
    assert torch.equal(torch.cat(pieces), whole)


def test_every_turn_starts_anew(setup: Setup) -> None:
    state = setup.begin(setup.voices[0], NoNoise(CPU))
    turns = [
        torch.cat([setup.speak(state, UNIT, is_flush=True), setup.speak(state, UNIT[:9], is_turn_end=True)])
        for _ in range(2)
    ]
    assert torch.equal(*turns)


def test_an_interrupted_turn_leaves_nothing_to_the_next(setup: Setup) -> None:
    state, fresh = (setup.begin(setup.voices[0], NoNoise(CPU)) for _ in range(2))
    setup.speak(state, UNIT)
    setup.speak(state, UNIT[:7])
    setup.alone.reset_turn(state)
    assert torch.equal(setup.speak(state, UNIT), setup.speak(fresh, UNIT))


def test_later_tokens_do_not_change_what_was_heard(setup: Setup) -> None:
    one, other = setup.open(), setup.open()
    assert torch.equal(setup.speak(one, UNIT), setup.speak(other, UNIT))
    assert not torch.equal(setup.speak(one, UNIT), setup.speak(other, [*reversed(UNIT)]))


def test_on_the_cpu_a_session_sounds_exactly_the_same_in_any_company(setup: Setup) -> None:
    """Eight streams of three voices, each a chunk behind the one before; the caches of all are cut before the end."""
    assert all(map(torch.equal, staggered(setup, setup.alone), staggered_alone(setup)))


def test_a_shared_solve_gives_each_session_its_own_sound(setup: Setup) -> None:
    want = staggered_alone(setup)
    for got, alone in zip(staggered(setup, setup.shared), want, strict=True):
        torch.testing.assert_close(got, alone, rtol=0, atol=SHARED_TOLERANCE)
    assert all((one - other).abs().max() > 10 * SHARED_TOLERANCE for one, other in itertools.combinations(want, 2))


@contextmanager
def batch_sizes(module: nn.Module) -> Iterator[list[int]]:
    """Rows in each call of a network while the context is open."""
    seen: list[int] = []
    handle = module.register_forward_hook(lambda _module, _inputs, out: seen.append(len(out)))
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("sizes", "flow_batches", "vocoder_batches"),
    [((1, 2, 3, 16), [3, 1, 1], [2, 1, 1, 1]), ((1, 2), [2, 1, 1, 1], [2, 1, 1, 1])],
)
def test_what_is_equally_long_shares_a_solve(
    setup: Setup, sizes: tuple[int, ...], flow_batches: list[int], vocoder_batches: list[int]
) -> None:
    renderer = Renderer(setup.synthesizer, setup.vocoder, BatchGrid(sizes))
    states, models = ([setup.open(who) for who in range(5)] for _ in range(2))
    for state in (states[2], models[2]):
        setup.speak(state, UNIT)
    chunks = [
        (UNIT, False, False),  # the first second of a turn
        (UNIT, False, False),
        (UNIT, False, False),  # the second one of another, which the vocoder sees with 8 frames more
        (UNIT[:10], False, True),  # a short start
        (UNIT[:10], True, False),  # a whole turn, as short; but all of its tokens are rendered
    ]
    rows = [ChunkRow(state, *chunk) for state, chunk in zip(states, chunks, strict=True)]
    networks = setup.synthesizer.flow.encoder_proj, setup.vocoder.hift.f0_predictor
    with batch_sizes(networks[0]) as solves, batch_sizes(networks[1]) as runs:
        results = renderer.speak(rows)
    assert (solves, runs) == (flow_batches, vocoder_batches)
    for result, model, (tokens, is_turn_end, is_flush) in zip(results, models, chunks, strict=True):
        want = setup.speak(model, tokens, is_turn_end=is_turn_end, is_flush=is_flush)
        torch.testing.assert_close(heard(result), want, rtol=0, atol=SHARED_TOLERANCE)


NUM_CHUNKS = 8


def staggered(setup: Setup, renderer: Renderer) -> list[Tensor]:
    """Eight seconds of each stream; stream w begins in the step w, and all that speak are in one call."""
    states = [setup.open(who) for who in range(NUM_STREAMS)]
    pieces: list[list[Tensor]] = [[] for _ in states]
    for moment in range(NUM_STREAMS + NUM_CHUNKS - 1):
        speaking = [who for who in range(NUM_STREAMS) if 0 <= moment - who < NUM_CHUNKS]
        rows = [row(states[who], said(who, moment - who)) for who in speaking]
        for who, result in zip(speaking, renderer.speak(rows), strict=True):
            pieces[who].append(heard(result))
    return [torch.cat(own) for own in pieces]


def staggered_alone(setup: Setup) -> list[Tensor]:
    states = [setup.open(who) for who in range(NUM_STREAMS)]
    return [
        torch.cat([setup.speak(state, said(who, index)) for index in range(NUM_CHUNKS)])
        for who, state in enumerate(states)
    ]


def said(who: int, index: int) -> range:
    start = 500 * who + 50 * index
    return range(start, start + CHUNK_TOKENS)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a stream does in one step: a chunk, good or bad, or an interruption."""

    num_tokens: int
    is_turn_end: bool
    is_flush: bool
    is_bad: bool
    is_interrupted: bool


moves = st.builds(
    Turn,
    num_tokens=st.sampled_from([0, 1, 2, 5, 10, 25, 25, 25, 60]),
    is_turn_end=st.sampled_from([False] * 5 + [True]),
    is_flush=st.booleans(),
    is_bad=st.sampled_from([False] * 5 + [True]),
    is_interrupted=st.sampled_from([False] * 7 + [True]),
)
scripts = st.lists(st.dictionaries(st.integers(0, NUM_STREAMS - 1), moves), min_size=3, max_size=6)


def tokens_of(who: int, moment: int, turn: Turn) -> list[int]:
    start = 500 * who + 70 * moment
    tokens = [*range(start, start + turn.num_tokens)]
    return [*tokens[:3], (-1, VOCAB)[moment % 2], *tokens[3:]] if turn.is_bad else tokens


@settings(max_examples=12)
@given(scripts)
def test_a_stream_sounds_like_its_accepted_chunks_whatever_others_send(
    setup: Setup, script: list[dict[int, Turn]]
) -> None:
    setup.end_all()
    states, models = ([setup.open(who) for who in range(NUM_STREAMS)] for _ in range(2))
    for moment, step in enumerate(script):
        speaking = [who for who, turn in step.items() if not turn.is_interrupted]
        for who in step.keys() - speaking:
            setup.alone.reset_turn(states[who])
            setup.alone.reset_turn(models[who])
        rows = [
            ChunkRow(states[who], tokens_of(who, moment, step[who]), step[who].is_turn_end, step[who].is_flush)
            for who in speaking
        ]
        for who, result in zip(speaking, setup.alone.speak(rows), strict=True):
            turn = step[who]
            if turn.is_bad:
                assert isinstance(result, InputError)
            else:
                tokens = tokens_of(who, moment, turn)
                want = setup.speak(models[who], tokens, is_turn_end=turn.is_turn_end, is_flush=turn.is_flush)
                assert torch.equal(heard(result), want)


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_a_token_that_is_no_codec_token_is_refused_and_the_turn_goes_on(setup: Setup, wrong: int) -> None:
    state, untouched = setup.open(), setup.open()
    for one in (state, untouched):
        setup.speak(one, UNIT)
        setup.speak(one, UNIT[:7])
    before = replace(state), state.buffer.tokens
    with pytest.raises(InputError, match=rf"from 0 to {VOCAB - 1}, got {wrong}"):
        setup.speak(state, [*UNIT, wrong], is_turn_end=True)
    assert (state.speech, state.vocoder) == (before[0].speech, before[0].vocoder)
    assert state.buffer.tokens == before[1]
    assert torch.equal(setup.speak(state, UNIT), setup.speak(untouched, UNIT))


def failing_in_the_flow(setup: Setup) -> Code2WavState:
    """Its voice is of a flow with fewer steps, so that the common solve fails on the way."""
    return setup.begin(setup.foreign_voice, NoNoise(CPU))


def failing_in_the_vocoder(setup: Setup) -> Code2WavState:
    """Its noise lies on another device."""
    return setup.begin(setup.voices[0], NoNoise(torch.device("meta")))


@pytest.mark.parametrize("fail", [failing_in_the_flow, failing_in_the_vocoder])
@pytest.mark.parametrize(("is_shared", "tolerance"), [(False, 0.0), (True, SHARED_TOLERANCE)])
def test_a_session_that_fails_in_a_solve_is_as_before_and_alone_in_failing(
    setup: Setup, fail: Callable[[Setup], Code2WavState], *, is_shared: bool, tolerance: float
) -> None:
    renderer = setup.shared if is_shared else setup.alone
    states, failing = [setup.open(who) for who in (0, 1)], fail(setup)
    before = replace(failing)
    rows = [row(states[0], [*UNIT, *UNIT]), row(failing, [*UNIT, *UNIT]), row(states[1], UNIT)]
    first, error, last = renderer.speak(rows)
    for got, who, tokens in ((first, 0, [*UNIT, *UNIT]), (last, 1, UNIT)):
        torch.testing.assert_close(heard(got), setup.speak(setup.open(who), tokens), rtol=0, atol=tolerance)
    assert isinstance(error, ShapeError | InternalError)
    assert (failing.speech, failing.vocoder) == (before.speech, before.vocoder)
    assert failing.buffer.tokens == setup.open().buffer.tokens
    assert all(isinstance(result, AntiphonError) for result in renderer.speak([row(failing, UNIT)]))


def test_a_chunk_of_several_windows_fails_as_a_whole(setup: Setup) -> None:
    """The first window can be rendered, the second cannot; then the chunk can come again."""
    state, untouched = setup.open(), setup.open()
    setup.speak(state, UNIT)
    setup.speak(untouched, UNIT)
    good = state.vocoder
    assert isinstance(good, VocoderState)
    state.vocoder = replace(good, noise=BrittleNoise(good.noise, num_left=1))
    with pytest.raises(AntiphonError, match="no noise is left"):
        setup.speak(state, [*UNIT, *UNIT])
    state.vocoder = good
    assert torch.equal(setup.speak(state, [*UNIT, *UNIT]), setup.speak(untouched, [*UNIT, *UNIT]))


@dataclass(frozen=True, slots=True)
class BrittleNoise:
    """Noise that can be drawn a few times only."""

    noise: SourceNoise
    num_left: int

    def draw(self, num_samples: int, num_harmonics: int) -> tuple[Tensor, SourceNoise]:
        if not self.num_left:
            raise RuntimeError("no noise is left")
        values, after = self.noise.draw(num_samples, num_harmonics)
        return values, BrittleNoise(after, self.num_left - 1)

    def draw_uniform(self, num_samples: int, num_harmonics: int) -> tuple[Tensor, SourceNoise]:
        return self.draw(num_samples, num_harmonics)


def test_a_session_that_listens_holds_nothing_but_the_voice(setup: Setup) -> None:
    state = setup.open()
    setup.speak(state, UNIT)
    setup.speak(state, UNIT, is_turn_end=True)
    assert state.num_reserved_frames == 0
    assert state.speech.held.all == ((), (), ())
    assert state.speech.tails is state.voice.tails
    vocoder = state.vocoder
    assert isinstance(vocoder, VocoderState)
    assert sum(tail.untyped_storage().nbytes() for tail in (vocoder.mel_tail, vocoder.source_tail)) == 0
    assert vocoder.speech_tail.untyped_storage().nbytes() == 0


def test_a_session_has_one_chunk_in_a_call(setup: Setup) -> None:
    state = setup.open()
    with pytest.raises(AssertionError, match="two rows of one session"):
        setup.alone.speak([row(state, UNIT), row(state, UNIT)])


def test_a_call_without_a_chunk_is_nothing(setup: Setup) -> None:
    assert setup.alone.speak([]) == []
