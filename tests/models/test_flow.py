"""Flow: what it remembers, whose it is, and its configuration. Numbers against the reference: tests/golden/code2wav."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import build_voice
from antiphon.errors import AudioError, CheckpointError, ShapeError
from antiphon.models.minicpmo.flow import LONGEST_CHUNK_FRAMES, SILENCE_TOKEN, MelSynthesizer, draw_noise
from antiphon.models.minicpmo.flow_cache import SpeechState, Voice
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.flow_config import EncoderConfig, EstimatorConfig, flow_config, read_flow_yaml
from antiphon.models.minicpmo.flow_inputs import FlowRow
from antiphon.models.minicpmo.flow_membership import (
    Listed,
    Retention,
    max_speech_frames,
    next_frames,
    next_steps,
    next_tokens,
    of_voice,
)
from antiphon.models.minicpmo.flow_retention import PINNED_FRAMES, PINNED_TOKENS
from antiphon.models.minicpmo.flow_rules import flow_rules
from antiphon.models.minicpmo.hift_config import Generation
from antiphon.models.minicpmo.speech_arena import ArenaSize
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from build_voice import BINS, FLOW, FLOW_NOISE_FRAMES, prompt, tensors

TOLERANCE = 1e-5
"""Times the largest value. A shared solve rounds sums of up to 200 terms in another order, about 20 times in a row."""

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


@pytest.fixture
def synthesizer() -> MelSynthesizer:
    return build_voice.synthesizer()


def say(
    synthesizer: MelSynthesizer, tokens: Sequence[int], voice: Voice, speech: SpeechState, *, is_last: bool = False
) -> tuple[Tensor, SpeechState]:
    """A chunk of one session alone."""
    (spoken,) = synthesizer.speak([FlowRow(tokens, voice, speech, is_last=is_last)])
    return spoken


def speak(synthesizer: MelSynthesizer, voice: Voice, chunks: Sequence[Sequence[int]]) -> list[Tensor]:
    start = speech = SpeechState.at_turn_start(voice)
    mels = []
    for chunk in chunks:
        before = speech
        mel, speech = say(synthesizer, chunk, voice, before)
        synthesizer.arena.keep_only(speech, [before])
        mels.append(mel)
    synthesizer.arena.keep_only(start, [speech])
    return mels


def ids(listed: Listed, num_prompt: int) -> list[int]:
    """Numbers from the start of the prompt on; places are numbers from the start of the turn on."""
    return [num_prompt + entry if entry >= 0 else -1 - entry for entry in listed]


def trimmed(cache: list[int], num_prompt_frames: int) -> list[int]:
    """The reference's trim of a packed cache (golden README)."""
    if len(cache) <= num_prompt_frames + PINNED_FRAMES:
        return cache
    return cache[:num_prompt_frames] + cache[-PINNED_FRAMES:]


def trimmed_tokens(cache: list[int], num_prompt: int, generation: Generation) -> list[int]:
    """The same of the token-rate layers, where 1.0.5 stores them twice in a row and reads the first half back."""
    match generation:
        case Generation.V1_0_5:
            twice = trimmed(2 * cache, 2 * num_prompt)
            return twice[: len(twice) // 2]
        case Generation.V1_0_7:
            return cache[:num_prompt] + cache[num_prompt:][-PINNED_TOKENS:]


@pytest.mark.parametrize("generation", Generation)
@settings(max_examples=60, deadline=None)
@given(num_prompt=st.integers(1, 90), chunks=st.lists(st.integers(1, 30), max_size=12))
def test_a_turn_keeps_what_the_references_packed_caches_keep(
    generation: Generation, num_prompt: int, chunks: list[int]
) -> None:
    P, rule = 2 * num_prompt, Retention.REFERENCE
    kept_tokens = flow_rules(generation, rule).kept_tokens
    estimator, frame_layers, token_layers = [*range(P)], [*range(P)], [*range(num_prompt)]
    steps, frames, tokens = of_voice(range(P)), of_voice(range(P)), of_voice(range(num_prompt))
    start = 0
    for num_tokens in chunks:
        new_tokens, new_frames = range(start, start + num_tokens), range(2 * start, 2 * (start + num_tokens))
        start += num_tokens
        steps = next_steps(rule, P, steps, new_frames)
        frames = next_frames(P, frames, new_frames)
        tokens = next_tokens(kept_tokens, num_prompt, tokens, new_tokens)

        estimator = trimmed([*(P + frame for frame in new_frames), *estimator], P)
        frame_layers = trimmed([*frame_layers, *(P + frame for frame in new_frames)], P)
        all_tokens = [*token_layers, *(num_prompt + token for token in new_tokens)]
        token_layers = trimmed_tokens(all_tokens, num_prompt, generation)

        assert ids(steps, P) == estimator
        assert ids(frames, P) == frame_layers
        assert ids(tokens, num_prompt) == token_layers
        assert sum(entry >= 0 for entry in steps) <= max_speech_frames(rule, P)


@pytest.mark.parametrize("generation", Generation)
@given(num_prompt=st.integers(1, 90), chunks=st.lists(st.integers(1, 30), max_size=12))
def test_voice_first_keeps_the_whole_voice_and_the_newest_two_seconds(
    generation: Generation, num_prompt: int, chunks: list[int]
) -> None:
    P, rule = 2 * num_prompt, Retention.VOICE_FIRST
    kept_tokens = flow_rules(generation, rule).kept_tokens
    steps, tokens = of_voice(range(P)), of_voice(range(num_prompt))
    start = 0
    for num_tokens in chunks:
        new = range(start, start + num_tokens)
        start += num_tokens
        steps = next_steps(rule, P, steps, range(2 * new.start, 2 * new.stop))
        tokens = next_tokens(kept_tokens, num_prompt, tokens, new)
        assert sorted(ids(steps, P)) == [*range(P), *range(P + max(0, 2 * start - PINNED_FRAMES), P + 2 * start)]
        first = num_prompt + max(0, start - PINNED_TOKENS)
        assert ids(tokens, num_prompt) == [*range(num_prompt), *range(first, num_prompt + start)]


def test_a_voice_of_1_0_7_is_conditioned_with_its_own_beginning_ahead_and_one_of_1_0_5_with_silence() -> None:
    """What the last frames see ahead of them: with a prompt that begins with silence, both voices are the same."""
    old, new = (build_voice.synthesizer(generation=generation) for generation in Generation)
    alike = replace(prompt(6), tokens=(*[SILENCE_TOKEN] * FLOW.encoder.lookahead_tokens, 1, 2, 3))
    for said, are_equal in ((alike, True), (prompt(6), False)):
        frames = [synthesizer.build_voice(said).entries.frames.keys for synthesizer in (old, new)]
        assert torch.equal(*frames) is are_equal
        assert frames[0].shape == frames[1].shape


def test_a_voice_too_short_to_be_its_own_lookahead_is_refused() -> None:
    with pytest.raises(AudioError, match="2 codec tokens, 3 are needed"):
        build_voice.synthesizer(generation=Generation.V1_0_7).build_voice(prompt(2))


def test_sessions_share_a_solve_and_hear_nothing_of_each_other(synthesizer: MelSynthesizer) -> None:
    """Voices and pasts of different lengths; the caches of all are cut before the end."""
    voices = [synthesizer.build_voice(prompt(num_tokens, seed=num_tokens)) for num_tokens in (10, 60, 80, 10)]
    before = copy.deepcopy(voices)
    chunks = [[range(900 * who + 40 * i, 900 * who + 40 * i + 28) for i in range(9)] for who in range(len(voices))]
    alone = [speak(synthesizer, voice, own) for voice, own in zip(voices, chunks, strict=True)]

    states = [SpeechState.at_turn_start(voice) for voice in voices]
    for moment in range(9 + len(voices) - 1):
        # A session begins one moment after the one before it, so that the longest pasts meet the shortest.
        speaking = [who for who in range(len(voices)) if 0 <= moment - who < 9]
        rows = [FlowRow(chunks[who][moment - who], voices[who], states[who], is_last=False) for who in speaking]
        for who, (mel, speech) in zip(speaking, synthesizer.speak(rows), strict=True):
            want = alone[who][moment - who]
            torch.testing.assert_close(mel, want, rtol=0, atol=TOLERANCE * float(want.abs().max()))
            synthesizer.arena.keep_only(speech, [states[who]])
            states[who] = speech
    assert len({speech.num_past_frames for speech in states}) == 3
    for voice, then in zip(voices, before, strict=True):
        assert all(map(torch.equal, tensors(voice), tensors(then)))


def test_chunks_of_any_length_share_a_solve_and_sound_as_each_alone(synthesizer: MelSynthesizer) -> None:
    """Also of turns that end, whose lookahead is silence; and what they leave behind is what each leaves alone."""
    voice = synthesizer.build_voice(prompt(10))
    _, spoken = say(synthesizer, range(500, 520), voice, SpeechState.at_turn_start(voice))
    start = SpeechState.at_turn_start(voice)
    rows = [
        FlowRow(range(28), voice, start, is_last=False),
        FlowRow(range(100, 105), voice, spoken, is_last=False),
        FlowRow(range(200, 207), voice, spoken, is_last=True),
        FlowRow(range(300, 304), voice, start, is_last=False),
    ]
    together = synthesizer.speak(rows)
    assert [mel.shape[1] for mel, _ in together] == [50, 4, 14, 2]
    for row, (mel, speech) in zip(rows, together, strict=True):
        want, after = say(synthesizer, row.tokens, voice, row.speech, is_last=row.is_last)
        torch.testing.assert_close(mel, want, rtol=0, atol=TOLERANCE * float(want.abs().max()))
        following, alone = (say(synthesizer, range(28), voice, state)[0] for state in (speech, after))
        torch.testing.assert_close(following, alone, rtol=0, atol=TOLERANCE * float(alone.abs().max()))


def test_a_session_that_listens_holds_no_memory_of_its_own(synthesizer: MelSynthesizer) -> None:
    voice = synthesizer.build_voice(prompt(10))
    start = SpeechState.at_turn_start(voice)
    assert (start.held.all, start.tail_places) == (((), (), ()), ())
    assert start.tails is voice.tails


def test_a_chunk_can_be_spoken_again_from_the_state_before_it(synthesizer: MelSynthesizer) -> None:
    voice = synthesizer.build_voice(prompt(10))
    _, speech = say(synthesizer, range(20), voice, SpeechState.at_turn_start(voice))
    first, _ = say(synthesizer, range(30, 50), voice, speech)
    again, _ = say(synthesizer, range(30, 50), voice, speech)
    assert torch.equal(first, again)


def test_the_last_chunk_renders_the_tokens_that_others_only_look_at(synthesizer: MelSynthesizer) -> None:
    voice = synthesizer.build_voice(prompt(10))
    start = SpeechState.at_turn_start(voice)
    assert say(synthesizer, range(9), voice, start)[0].shape == (1, 12, BINS)
    assert say(synthesizer, range(9), voice, start, is_last=True)[0].shape == (1, 18, BINS)
    assert say(synthesizer, range(1), voice, start, is_last=True)[0].shape == (1, 2, BINS)


def test_the_lookahead_decides_how_the_token_before_it_sounds(synthesizer: MelSynthesizer) -> None:
    voice = synthesizer.build_voice(prompt(10))
    one, other = speak(synthesizer, voice, [[1, 2, 3, 4, 5]])[0], speak(synthesizer, voice, [[1, 2, 3, 4, 6]])[0]
    assert not torch.equal(one, other)


@pytest.mark.parametrize("num_prompt_tokens", [10, 80])
@pytest.mark.parametrize("retention", Retention)
def test_memory_of_a_turn_is_bounded_however_long_it_gets(num_prompt_tokens: int, retention: Retention) -> None:
    size = ArenaSize.for_turns(retention, 2 * num_prompt_tokens, max_speaking=1, largest_batch=1)
    synthesizer = build_voice.synthesizer(size=size, retention=retention)
    voice, arena = synthesizer.build_voice(prompt(num_prompt_tokens)), synthesizer.arena
    speech = SpeechState.at_turn_start(voice)
    for _ in range(10):
        before = speech
        _, speech = say(synthesizer, range(28), voice, before)
        arena.keep_only(speech, [before])
        assert arena.num_held == speech.held.map(len)
    assert arena.num_held.all == (len(speech.held.tokens), PINNED_FRAMES, size.max_frames)
    arena.keep_only(SpeechState.at_turn_start(voice), [speech])
    assert arena.num_held.all == (0, 0, 0)


def test_what_fails_in_a_solve_takes_no_place(synthesizer: MelSynthesizer) -> None:
    voice, foreign = synthesizer.build_voice(prompt(10)), build_voice.synthesizer(num_steps=2).build_voice(prompt(10))
    rows = [FlowRow(range(28), one, SpeechState.at_turn_start(one), is_last=False) for one in (voice, foreign)]
    held = synthesizer.arena.num_held
    with pytest.raises(ShapeError, match="do not fit the sessions'"):
        synthesizer.speak(rows)
    assert synthesizer.arena.num_held == held


def test_later_chunks_of_a_turn_start_from_the_same_noise(synthesizer: MelSynthesizer) -> None:
    voice = synthesizer.build_voice(prompt(10))
    speech = SpeechState.at_turn_start(voice)
    starts = []
    for _ in range(5):
        starts.append(speech.num_past_frames)
        _, speech = say(synthesizer, range(28), voice, speech)
    assert starts == [20, 70, 120, 120, 120]


def test_a_chunk_reads_the_noise_after_its_past_and_no_other(synthesizer: MelSynthesizer) -> None:
    chunks = [range(28)] * 4
    want = speak(synthesizer, synthesizer.build_voice(prompt(10)), chunks)
    noise = synthesizer.noise.clone()

    def poisoned_from(first: int) -> list[Tensor]:
        noise[:, first:] = torch.nan
        poisoned = MelSynthesizer(synthesizer.flow, noise, synthesizer.arena, Generation.V1_0_5, Compute.FLOAT32)
        return speak(poisoned, poisoned.build_voice(prompt(10)), chunks)

    assert torch.equal(torch.cat(poisoned_from(170)), torch.cat(want))
    assert [bool(mel.isnan().any()) for mel in poisoned_from(169)] == [False, False, True, True]


def test_the_noise_depends_on_its_seed_alone() -> None:
    cpu = torch.device("cpu")
    torch.manual_seed(1)
    first = draw_noise(BINS, 5, cpu)
    torch.manual_seed(2)
    assert torch.equal(first, draw_noise(BINS, 5, cpu))
    assert not torch.equal(first, draw_noise(BINS, 6, cpu))


def test_the_loudness_of_a_speaker_embedding_says_nothing(synthesizer: MelSynthesizer) -> None:
    embedding = torch.arange(1.0, 1 + FLOW.speaker_size)[None]
    speaker = synthesizer.flow.speaker
    torch.testing.assert_close(speaker(embedding), speaker(7 * embedding))


def test_a_voice_that_does_not_fit_the_model_is_refused(synthesizer: MelSynthesizer) -> None:
    good = prompt(3)
    with pytest.raises(AudioError, match=r"go from 0 to 4999"):
        synthesizer.build_voice(VoicePrompt((1, 2, FLOW.vocab_size), good.mel, good.speaker))
    with pytest.raises(AudioError, match=r"takes 4 and 6"):
        synthesizer.build_voice(VoicePrompt(good.tokens, good.mel, torch.zeros(5)))
    longest = (FLOW_NOISE_FRAMES - PINNED_FRAMES - LONGEST_CHUNK_FRAMES) // 2
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
