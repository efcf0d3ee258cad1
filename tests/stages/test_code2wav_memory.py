"""What code2wav remembers: shared voices, the two retentions, both dtypes, and the room for windows under way."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

import build_voice
from antiphon.core.batch_grid import BatchGrid
from antiphon.core.codec_buffer import CHUNK_TOKENS
from antiphon.errors import AntiphonError, InputError
from antiphon.models.minicpmo.flow import MelSynthesizer
from antiphon.models.minicpmo.flow_cache import SpeechState, Voice
from antiphon.models.minicpmo.flow_inputs import FlowRow
from antiphon.models.minicpmo.flow_membership import Retention
from antiphon.models.minicpmo.hift_config import Generation
from antiphon.models.minicpmo.speech_arena import ArenaSize
from antiphon.models.minicpmo.vocoder import NoNoise, SeededNoise, Vocoder
from antiphon.stages.code2wav.renderer import ChunkRow, Renderer
from antiphon.stages.code2wav.state import Code2WavState
from antiphon.units import OUTPUT_SAMPLES_PER_UNIT
from build_voice import CPU

UNIT = range(100, 100 + CHUNK_TOKENS)
NUM_CHUNKS = 8
ORDER_TOLERANCE = 1e-5
"""Times the largest value, as in tests/models/test_flow.py: the same sums in another order."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def vocoder() -> Vocoder:
    with torch.inference_mode():
        return Vocoder(build_voice.hift())


def heard(result: Tensor | AntiphonError) -> Tensor:
    """What a row came to. Raises: its error."""
    if isinstance(result, AntiphonError):
        raise result
    return result


def row(state: Code2WavState, tokens: Sequence[int]) -> ChunkRow:
    return ChunkRow(state, tokens, is_turn_end=False, is_flush=False)


@pytest.mark.parametrize("generation", Generation)
@pytest.mark.parametrize("retention", Retention)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_voice_sounds_exactly_as_one_of_ones_own(
    generation: Generation, retention: Retention, dtype: torch.dtype
) -> None:
    """Three voices, two sessions of each, eight seconds, every session with words of its own: mel and PCM."""
    synthesizer = build_voice.synthesizer(generation=generation, retention=retention, dtype=dtype)
    renderer = Renderer(synthesizer, build_voice.vocoder(generation), BatchGrid((1,)))
    prompts = [build_voice.prompt(num_tokens, seed=num_tokens) for num_tokens in (3, 30, 60)]
    own = [synthesizer.build_voice(prompt) for _ in range(2) for prompt in prompts]
    shared = [synthesizer.build_voice(prompt) for prompt in prompts] * 2
    before = copy.deepcopy(shared)
    for spoken in (partial(sung, synthesizer), partial(rendered, renderer)):
        one, other = spoken(own), spoken(shared)
        assert all(map(torch.equal, one, other))
        assert not any(torch.equal(*pair) for pair in itertools.combinations(one, 2))
        assert synthesizer.arena.num_held.all == (0, 0, 0)
    for voice, then in zip(shared, before, strict=True):
        assert all(map(torch.equal, build_voice.tensors(voice), build_voice.tensors(then)))


def said(who: int, second: int) -> range:
    start = 500 * who + 50 * second
    return range(start, start + CHUNK_TOKENS)


def sung(synthesizer: MelSynthesizer, voices: Sequence[Voice]) -> list[Tensor]:
    """Mel of one session per voice, second by second. What each remembers is cut for at least three of them."""
    arena, states = synthesizer.arena, [SpeechState.at_turn_start(voice) for voice in voices]
    pieces: list[list[Tensor]] = [[] for _ in voices]
    nums_cut = [0 for _ in voices]
    for second in range(NUM_CHUNKS):
        for who, voice in enumerate(voices):
            row = FlowRow([*said(who, second), *said(who, second + 1)[:3]], voice, states[who], is_last=False)
            ((mel, speech),) = synthesizer.speak([row])
            grown = speech.reads.zip(states[who].reads, lambda after, before: len(after) - len(before))
            nums_cut[who] += grown.tokens < CHUNK_TOKENS and max(grown.frames, grown.steps) < mel.shape[1]
            arena.keep_only(speech, [states[who]])
            states[who] = speech
            pieces[who].append(mel)
    for voice, speech in zip(voices, states, strict=True):
        arena.keep_only(SpeechState.at_turn_start(voice), [speech])
    assert min(nums_cut) >= 3
    return [torch.cat(own, dim=1) for own in pieces]


def rendered(renderer: Renderer, voices: Sequence[Voice]) -> list[Tensor]:
    """PCM of the same, each with a noise of its own; then all turns are over."""
    states = [renderer.open(voice, SeededNoise(who, CPU)) for who, voice in enumerate(voices)]
    pieces: list[list[Tensor]] = [[] for _ in states]
    for second in range(NUM_CHUNKS):
        results = renderer.speak([row(state, said(who, second)) for who, state in enumerate(states)])
        for own, result in zip(pieces, results, strict=True):
            own.append(heard(result))
    for state in states:
        renderer.reset_turn(state)
    return [torch.cat(own) for own in pieces]


def spoken_mel(retention: Retention, dtype: torch.dtype, num_tokens: int) -> Tensor:
    """Six seconds. [T, M] float32."""
    synthesizer = build_voice.synthesizer(retention=retention, dtype=dtype)
    voice = synthesizer.build_voice(build_voice.prompt(num_tokens, seed=num_tokens))
    speech, mels = SpeechState.at_turn_start(voice), []
    for second in range(6):
        tokens = range(40 * second, 40 * second + CHUNK_TOKENS + 3)
        ((mel, speech),) = synthesizer.speak([FlowRow(tokens, voice, speech, is_last=False)])
        mels.append(mel[0])
    return torch.cat(mels)


@pytest.mark.parametrize("retention", Retention)
@pytest.mark.parametrize("num_tokens", [30, 60])
def test_memory_in_bfloat16_changes_the_mel_by_its_rounding(retention: Retention, num_tokens: int) -> None:
    """Each key and value loses up to 2^-9 of itself, and sums over many lose less: here 1.6e-5 at most was measured."""
    exact, rounded = (spoken_mel(retention, dtype, num_tokens) for dtype in (torch.float32, torch.bfloat16))
    error = float((rounded - exact).norm() / exact.norm())
    assert 0 < error < 1e-4


def test_voice_first_is_another_sound_once_the_reference_forgets() -> None:
    """Not before: two seconds and the voice are all there is then, read in another order."""
    ours, reference = (spoken_mel(retention, torch.float32, 60) for retention in Retention)
    tolerance = ORDER_TOLERANCE * float(reference.abs().max())
    torch.testing.assert_close(ours[:150], reference[:150], rtol=0, atol=tolerance)
    assert float((ours[150:] - reference[150:]).abs().max()) > 100 * tolerance


def test_a_chunk_with_more_windows_than_there_is_room_for_is_refused_and_changes_nothing(vocoder: Vocoder) -> None:
    size = ArenaSize.for_turns(Retention.REFERENCE, 60, max_speaking=1, largest_batch=1)
    synthesizer = build_voice.synthesizer(size=size)
    renderer = Renderer(synthesizer, vocoder, BatchGrid((1,)))
    state = renderer.open(synthesizer.build_voice(build_voice.prompt(30)), NoNoise(CPU))
    (result,) = renderer.speak([row(state, [*UNIT, *UNIT, *UNIT])])
    assert isinstance(result, InputError)
    assert "makes 3 windows; there is room for 2" in str(result)
    assert (state.num_reserved_frames, synthesizer.arena.num_held.all) == (0, (0, 0, 0))
    (result,) = renderer.speak([row(state, [*UNIT, *UNIT])])
    assert len(heard(result)) == 2 * OUTPUT_SAMPLES_PER_UNIT


def test_rows_whose_windows_do_not_fit_at_once_take_turns(vocoder: Vocoder) -> None:
    size = ArenaSize.for_turns(Retention.REFERENCE, 60, max_speaking=5, largest_batch=2)
    synthesizer = build_voice.synthesizer(size=size)
    renderer = Renderer(synthesizer, vocoder, BatchGrid((1,)))
    voice = synthesizer.build_voice(build_voice.prompt(30, seed=30))
    states = [renderer.open(voice, NoNoise(CPU)) for _ in range(5)]
    for _ in range(4):
        results = [heard(result) for result in renderer.speak([row(state, [*UNIT, *UNIT]) for state in states])]
        assert all(torch.equal(result, results[0]) for result in results)
