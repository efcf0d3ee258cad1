"""Flow: what it remembers, whose it is, and its configuration. Numbers against the reference: tests/golden/code2wav."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from antiphon.errors import AudioError, CheckpointError
from antiphon.models.minicpmo.flow import LONGEST_CHUNK_FRAMES, Flow, MelSynthesizer, draw_noise
from antiphon.models.minicpmo.flow_cache import (
    EncoderCache,
    FlowCache,
    KeysValues,
    Past,
    SpeechState,
    StepCache,
    Voice,
)
from antiphon.models.minicpmo.flow_config import (
    EncoderConfig,
    EstimatorConfig,
    FlowConfig,
    flow_config,
    read_flow_yaml,
)
from antiphon.models.minicpmo.flow_retention import PINNED_FRAMES
from antiphon.models.minicpmo.voice_prompt import VoicePrompt

BINS = 4
CONFIG = FlowConfig(
    vocab_size=5000,
    num_mel_bins=BINS,
    speaker_size=6,
    cfg_rate=0.7,
    encoder=EncoderConfig(
        hidden_size=8,
        num_token_layers=2,
        num_frame_layers=1,
        num_heads=2,
        intermediate_size=12,
        lookahead_tokens=3,
        frames_per_token=2,
    ),
    estimator=EstimatorConfig(
        in_channels=4 * BINS, hidden_size=6, num_layers=2, num_heads=2, head_dim=4, intermediate_size=10
    ),
)
NOISE_FRAMES = 400
YAML = """
flow: !new:some.package.Flow
    input_size: 32
    output_size: 80
    spk_embed_dim: 192
    output_type: "mel"
    vocab_size: 6561
    encoder: !new:some.package.Encoder
        {input_size: 32, output_size: 32, input_layer: "linear", pre_lookahead_len: 3, num_blocks: 2,
         num_up_blocks: 1, up_stride: 2, up_scale_factor: 2.0, attention_heads: 4, linear_units: 64,
         pos_enc_layer_type: "rel_pos_espnet", selfattention_layer_type: "rel_selfattn", key_bias: true,
         normalize_before: true, dropout_rate: 0.1}
    decoder: !new:some.package.Solver
        inference_cfg_rate: 0.7
        estimator: !new:some.package.DiT
            {in_channels: 320, out_channels: 80, mlp_ratio: 4.0, depth: 3, num_heads: 2, head_dim: 32, hidden_size: 48}
"""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def synthesizer() -> MelSynthesizer:
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        flow = Flow(CONFIG).requires_grad_(requires_grad=False)
        for weight in flow.parameters():
            weight.normal_(0, 0.3, generator=generator)
        return MelSynthesizer(flow, draw_noise(BINS, 0, torch.device("cpu"))[:, :NOISE_FRAMES], num_steps=3)


def prompt(num_tokens: int, *, seed: int = 0) -> VoicePrompt:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CONFIG.vocab_size, (num_tokens,), generator=generator)
    mel = torch.randn(2 * num_tokens, BINS, generator=generator)
    return VoicePrompt(tuple(tokens.tolist()), mel, torch.randn(CONFIG.speaker_size, generator=generator))


def speak(synthesizer: MelSynthesizer, voice: Voice, chunks: Sequence[Sequence[int]]) -> list[Tensor]:
    speech = SpeechState.at_turn_start(voice)
    mels = []
    for chunk in chunks:
        mel, speech = synthesizer.speak(chunk, voice, speech, is_last=False)
        mels.append(mel)
    return mels


def labelled(ids: range) -> KeysValues:
    keys = torch.tensor(ids).reshape(1, 1, 1, -1, 1)
    return KeysValues(keys, keys)


def labels(tokens: range) -> FlowCache:
    """A cache of some tokens and their frames, with ids in place of keys."""
    frames, nothing = labelled(range(2 * tokens.start, 2 * tokens.stop)), torch.zeros(1, 1, 0)
    return FlowCache(EncoderCache(nothing, nothing, labelled(tokens), frames), (StepCache(frames, nothing),))


def ids(past: Past) -> list[int]:
    return [int(key) for key in KeysValues.joined(past).keys.flatten()]


def trimmed(cache: list[int], num_prompt_frames: int) -> list[int]:
    """The reference's trim of a packed cache (golden README)."""
    if len(cache) <= num_prompt_frames + PINNED_FRAMES:
        return cache
    return cache[:num_prompt_frames] + cache[-PINNED_FRAMES:]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.lists(st.integers(1, 30), max_size=12))
def test_a_turn_keeps_what_the_references_packed_caches_keep(num_prompt: int, chunks: list[int]) -> None:
    P = 2 * num_prompt
    voice = Voice(torch.zeros(1, 1), labels(range(num_prompt)))
    speech = SpeechState.at_turn_start(voice)
    estimator, frame_layers, token_layers = [*range(P)], [*range(P)], [*range(num_prompt)]
    start = num_prompt
    for num_tokens in chunks:
        tokens = range(start, start + num_tokens)
        frames = range(2 * tokens.start, 2 * tokens.stop)
        start = tokens.stop
        speech = speech.followed_by(labels(tokens), voice)

        estimator = trimmed([*frames, *estimator], P)
        frame_layers = trimmed([*frame_layers, *frames], P)
        twice = trimmed(2 * [*token_layers, *tokens], P)
        token_layers = twice[: len(twice) // 2]

        assert ids(speech.past_of_step(0, voice)) == estimator
        assert ids(speech.past_frames(voice)) == frame_layers
        assert ids(speech.past_tokens(voice)) == token_layers
        assert speech.num_past_frames(voice) == len(estimator)


def test_a_voice_is_never_written_and_sessions_that_share_it_do_not_hear_each_other(
    synthesizer: MelSynthesizer,
) -> None:
    voice = synthesizer.build_voice(prompt(60))
    before = copy.deepcopy(voice)
    chunks = [[range(40 * i, 40 * i + 28) for i in range(7)], [range(900 - i, 917) for i in range(7)]]
    alone = [speak(synthesizer, copy.deepcopy(voice), own) for own in chunks]

    states = [SpeechState.at_turn_start(voice) for _ in chunks]
    for turn in range(7):
        for session, own in enumerate(chunks):
            mel, states[session] = synthesizer.speak(own[turn], voice, states[session], is_last=False)
            assert torch.equal(mel, alone[session][turn])
    for now, then in zip(tensors(voice), tensors(before), strict=True):
        assert torch.equal(now, then)


def tensors(voice: Voice) -> list[Tensor]:
    encoder = voice.cache.encoder
    kept = [voice.speaker, encoder.lookahead_tail, encoder.upsampling_tail]
    for entries in (encoder.tokens, encoder.frames, *(step.frames for step in voice.cache.steps)):
        kept += [entries.keys, entries.values]
    return kept + [step.conv_tails for step in voice.cache.steps]


def test_a_chunk_can_be_spoken_again_from_the_state_before_it(synthesizer: MelSynthesizer) -> None:
    voice = synthesizer.build_voice(prompt(10))
    _, speech = synthesizer.speak(range(20), voice, SpeechState.at_turn_start(voice), is_last=False)
    first, _ = synthesizer.speak(range(30, 50), voice, speech, is_last=False)
    again, _ = synthesizer.speak(range(30, 50), voice, speech, is_last=False)
    assert torch.equal(first, again)


def test_the_last_chunk_renders_the_tokens_that_others_only_look_at(synthesizer: MelSynthesizer) -> None:
    voice = synthesizer.build_voice(prompt(10))
    start = SpeechState.at_turn_start(voice)
    assert synthesizer.speak(range(9), voice, start, is_last=False)[0].shape == (1, 12, BINS)
    assert synthesizer.speak(range(9), voice, start, is_last=True)[0].shape == (1, 18, BINS)
    assert synthesizer.speak(range(1), voice, start, is_last=True)[0].shape == (1, 2, BINS)


def test_the_lookahead_decides_how_the_token_before_it_sounds(synthesizer: MelSynthesizer) -> None:
    voice = synthesizer.build_voice(prompt(10))
    one, other = speak(synthesizer, voice, [[1, 2, 3, 4, 5]])[0], speak(synthesizer, voice, [[1, 2, 3, 4, 6]])[0]
    assert not torch.equal(one, other)


@pytest.mark.parametrize("num_prompt_tokens", [10, 80])
def test_memory_of_a_turn_is_bounded_however_long_it_gets(synthesizer: MelSynthesizer, num_prompt_tokens: int) -> None:
    voice = synthesizer.build_voice(prompt(num_prompt_tokens))
    speech = SpeechState.at_turn_start(voice)
    for _ in range(10):
        _, speech = synthesizer.speak(range(28), voice, speech, is_last=False)
    bound = max(voice.num_frames, PINNED_FRAMES)
    for step in speech.cache.steps:
        assert step.frames.num_entries == bound
        assert step.frames.keys.untyped_storage().nbytes() == step.frames.keys.nbytes
    assert speech.cache.encoder.frames.num_entries == PINNED_FRAMES
    assert speech.cache.encoder.tokens.num_entries == PINNED_FRAMES // 2


def test_later_chunks_of_a_turn_start_from_the_same_noise(synthesizer: MelSynthesizer) -> None:
    voice = synthesizer.build_voice(prompt(10))
    speech = SpeechState.at_turn_start(voice)
    starts = []
    for _ in range(5):
        starts.append(speech.num_past_frames(voice))
        _, speech = synthesizer.speak(range(28), voice, speech, is_last=False)
    assert starts == [20, 70, 120, 120, 120]


def test_a_chunk_reads_the_noise_after_its_past_and_no_other(synthesizer: MelSynthesizer) -> None:
    chunks = [range(28)] * 4
    want = speak(synthesizer, synthesizer.build_voice(prompt(10)), chunks)
    noise = synthesizer.noise.clone()
    noise[:, 170:] = torch.nan
    poisoned = MelSynthesizer(synthesizer.flow, noise, synthesizer.num_steps)
    assert torch.equal(torch.cat(speak(poisoned, poisoned.build_voice(prompt(10)), chunks)), torch.cat(want))
    noise[:, 169] = torch.nan
    is_broken = [bool(mel.isnan().any()) for mel in speak(poisoned, poisoned.build_voice(prompt(10)), chunks)]
    assert is_broken == [False, False, True, True]


def test_the_noise_depends_on_its_seed_alone() -> None:
    cpu = torch.device("cpu")
    torch.manual_seed(1)
    first = draw_noise(BINS, 5, cpu)
    torch.manual_seed(2)
    assert torch.equal(first, draw_noise(BINS, 5, cpu))
    assert not torch.equal(first, draw_noise(BINS, 6, cpu))


def test_the_loudness_of_a_speaker_embedding_says_nothing(synthesizer: MelSynthesizer) -> None:
    embedding = torch.arange(1.0, 1 + CONFIG.speaker_size)[None]
    speaker = synthesizer.flow.speaker
    torch.testing.assert_close(speaker(embedding), speaker(7 * embedding))


def test_a_voice_that_does_not_fit_the_model_is_refused(synthesizer: MelSynthesizer) -> None:
    good = prompt(3)
    with pytest.raises(AudioError, match=r"go from 0 to 4999"):
        synthesizer.build_voice(VoicePrompt((1, 2, CONFIG.vocab_size), good.mel, good.speaker))
    with pytest.raises(AudioError, match=r"takes 4 and 6"):
        synthesizer.build_voice(VoicePrompt(good.tokens, good.mel, torch.zeros(5)))
    longest = (NOISE_FRAMES - PINNED_FRAMES - LONGEST_CHUNK_FRAMES) // 2
    synthesizer.build_voice(prompt(longest))
    with pytest.raises(AudioError, match=r"leaves room for 244"):
        synthesizer.build_voice(prompt(longest + 1))


def test_flow_yaml_is_read_without_importing_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "flow.yaml"
    path.write_text(YAML)
    config = read_flow_yaml(path)
    assert config.encoder == EncoderConfig(32, 2, 1, 4, 64, 3, 2)
    assert config.estimator == EstimatorConfig(320, 48, 3, 2, 32, 192)
    assert (config.vocab_size, config.num_mel_bins, config.speaker_size, config.cfg_rate) == (6561, 80, 192, 0.7)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("depth: 3, ", "", r"decoder.estimator.depth: Field required"),
        ("rel_selfattn", "selfattn", r"selfattention_layer_type"),
        ("up_scale_factor: 2.0", "up_scale_factor: 3", r"up_scale_factor is 3.0, the rest of the file needs 2"),
        ("in_channels: 320", "in_channels: 300", r"in_channels is 300, the rest of the file needs 320"),
        ("flow: !new", "flow: !call", r"cannot be read"),
        ("flow: !new", "model: !new", r"no mapping `flow`"),
        ("flow: !new", "flow: [", r"cannot be read"),
    ],
)
def test_a_flow_yaml_that_the_code_does_not_implement_is_refused(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    path = tmp_path / "flow.yaml"
    path.write_text(YAML.replace(old, new))
    with pytest.raises(CheckpointError, match=complaint):
        read_flow_yaml(path)


def test_a_missing_flow_yaml_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        read_flow_yaml(tmp_path / "flow.yaml")


def test_an_empty_flow_configuration_names_every_missing_part() -> None:
    with pytest.raises(CheckpointError, match=r"encoder: Field required.*decoder: Field required"):
        flow_config({})
