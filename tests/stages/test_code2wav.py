"""The code2wav stage: units in, PCM out, turn by turn and session by session. Numbers: tests/golden/code2wav."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from antiphon.core.codec_buffer import CHUNK_TOKENS
from antiphon.models.minicpmo.flow import Flow, MelSynthesizer, draw_noise
from antiphon.models.minicpmo.flow_cache import Voice
from antiphon.models.minicpmo.flow_config import EncoderConfig, EstimatorConfig, FlowConfig
from antiphon.models.minicpmo.hift import Hift, fold_weight_norms
from antiphon.models.minicpmo.hift_config import HiftConfig
from antiphon.models.minicpmo.vocoder import NoNoise, SeededNoise, Vocoder
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.code2wav.stage import Code2WavStage, unit_pcm
from antiphon.stages.code2wav.state import Code2WavState
from antiphon.units import OUTPUT_SAMPLES_PER_UNIT

BINS = 4
VOCAB = 5000
FLOW = FlowConfig(
    vocab_size=VOCAB,
    num_mel_bins=BINS,
    speaker_size=6,
    cfg_rate=0.7,
    encoder=EncoderConfig(
        hidden_size=8,
        num_token_layers=1,
        num_frame_layers=1,
        num_heads=2,
        intermediate_size=12,
        lookahead_tokens=3,
        frames_per_token=2,
    ),
    estimator=EstimatorConfig(
        in_channels=4 * BINS, hidden_size=6, num_layers=1, num_heads=1, head_dim=4, intermediate_size=8
    ),
)
HIFT = HiftConfig(
    num_mel_bins=BINS,
    base_channels=8,
    num_harmonics=3,
    pitch_channels=4,
    num_pitch_convs=1,
    upsampling_kernels=(16, 11, 7),
    source_resblock_kernels=(3, 3, 3),
    resblock_kernels=(3,),
)
CPU = torch.device("cpu")
UNIT = range(100, 100 + CHUNK_TOKENS)


@dataclass(frozen=True, slots=True)
class Setup:
    stage: Code2WavStage
    voice: Voice

    def open(self) -> Code2WavState:
        return self.stage.open(self.voice, NoNoise(CPU))

    def speak(
        self, state: Code2WavState, tokens: Sequence[int], *, is_turn_end: bool = False, is_flush: bool = False
    ) -> Tensor:
        return self.stage.speak(state, tokens, is_turn_end=is_turn_end, is_flush=is_flush)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def randomised(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for weight in module.requires_grad_(requires_grad=False).parameters():
        weight.normal_(0, 0.3, generator=generator)


@pytest.fixture(scope="module")
def setup() -> Setup:
    with torch.inference_mode():
        flow, hift = Flow(FLOW), Hift(HIFT)
        randomised(flow)
        randomised(hift)
        fold_weight_norms(hift)
        synthesizer = MelSynthesizer(flow, draw_noise(BINS, 0, CPU), num_steps=2)
        voice = synthesizer.build_voice(VoicePrompt((1, 2, 3), torch.zeros(6, BINS), torch.ones(6)))
        return Setup(Code2WavStage(synthesizer, Vocoder(hift)), voice)


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


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=8))
def test_a_turn_sounds_the_same_however_its_tokens_arrive(setup: Setup, sizes: list[int]) -> None:
    tokens = range(sum(sizes))
    with torch.inference_mode():
        whole = setup.speak(setup.open(), tokens, is_turn_end=True)
        state, pieces, start = setup.open(), [], 0
        for size in sizes:
            pieces.append(setup.speak(state, tokens[start : start + size]))
            start += size
        pieces.append(setup.speak(state, [], is_turn_end=True))
    assert torch.equal(torch.cat(pieces), whole)


def test_every_turn_starts_anew(setup: Setup) -> None:
    state = setup.open()
    turns = [
        torch.cat([setup.speak(state, UNIT, is_flush=True), setup.speak(state, UNIT[:9], is_turn_end=True)])
        for _ in range(2)
    ]
    assert torch.equal(*turns)


def test_an_interrupted_turn_leaves_nothing_to_the_next(setup: Setup) -> None:
    state = setup.open()
    setup.speak(state, UNIT)
    setup.speak(state, UNIT[:7])
    setup.stage.reset_turn(state)
    assert torch.equal(setup.speak(state, UNIT), setup.speak(setup.open(), UNIT))


def test_later_tokens_do_not_change_what_was_heard(setup: Setup) -> None:
    one, other = setup.open(), setup.open()
    assert torch.equal(setup.speak(one, UNIT), setup.speak(other, UNIT))
    assert not torch.equal(setup.speak(one, UNIT), setup.speak(other, [*reversed(UNIT)]))


def test_a_session_sounds_the_same_whoever_else_speaks(setup: Setup) -> None:
    def open_seeded(seed: int) -> Code2WavState:
        return setup.stage.open(setup.voice, SeededNoise(seed, CPU))

    alone = open_seeded(1)
    want = [setup.speak(alone, UNIT) for _ in range(3)]
    one, other = open_seeded(1), open_seeded(2)
    for unit in want:
        assert torch.equal(setup.speak(one, UNIT), unit)
        setup.speak(other, UNIT[:11], is_flush=True)
    assert not torch.equal(setup.speak(open_seeded(2), UNIT), want[0])


def test_a_token_that_is_no_codec_token_never_reaches_the_device(setup: Setup) -> None:
    with pytest.raises(AssertionError, match="not codec tokens"):
        setup.speak(setup.open(), [VOCAB], is_turn_end=True)
