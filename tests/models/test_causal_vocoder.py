"""The causal vocoder chunk by chunk: however a turn is cut it sounds the same, 160 ms late, from a bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import build_voice
from antiphon.models.minicpmo.captured import NumRuns
from antiphon.models.minicpmo.causal_vocoder import DELAY_FRAMES, CausalState, CausalVocoder
from antiphon.models.minicpmo.vocoder import NoNoise, SeededNoise, TurnState, VocoderRow
from antiphon.units import OUTPUT_RATE_HZ, SAMPLES_PER_MEL_FRAME
from build_voice import BINS, CAUSAL_HIFT, CPU
from fakes.rerun import Rerun

TOLERANCE = 1e-6
"""Of samples below 1: float32 sums of up to 256 products, rounded in another order where a tensor is longer."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def vocoder() -> CausalVocoder:
    with torch.inference_mode():
        return CausalVocoder(build_voice.causal_hift())


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def piece(
    vocoder: CausalVocoder, mel: Tensor, state: TurnState, *, is_last: bool = False
) -> tuple[Tensor, CausalState]:
    """A chunk of one session alone."""
    (spoken,) = vocoder.speak([VocoderRow(mel, state, is_last)])
    return spoken


def spoken(vocoder: CausalVocoder, mel: Tensor, lengths: Sequence[int], *, is_ended: bool) -> list[Tensor]:
    """The chunks of a turn in pieces of these lengths."""
    state: CausalState = vocoder.at_turn_start(SeededNoise(1, CPU))
    chunks = []
    for index, own in enumerate(torch.split(mel, list(lengths), dim=-1)):
        samples, state = piece(vocoder, own, state, is_last=is_ended and index == len(lengths) - 1)
        chunks.append(samples)
    return chunks


def tensors(state: CausalState) -> list[Tensor]:
    values = [getattr(state, field.name) for field in fields(state)]
    return [value for value in values if isinstance(value, Tensor)]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_a_turn_sounds_the_same_however_it_is_cut(vocoder: CausalVocoder, lengths: list[int]) -> None:
    mel = random(1, BINS, sum(lengths))
    whole = spoken(vocoder, mel, [sum(lengths)], is_ended=True)[0]
    cut = torch.cat(spoken(vocoder, mel, lengths, is_ended=True), dim=1)
    has_silence = sum(lengths[:-1]) > DELAY_FRAMES
    want = F.pad(whole, (DELAY_FRAMES * SAMPLES_PER_MEL_FRAME if has_silence else 0, 0))
    torch.testing.assert_close(cut, want, rtol=0, atol=TOLERANCE)


def test_a_turn_in_one_piece_is_one_run_of_the_network(vocoder: CausalVocoder) -> None:
    mel, hift = random(1, BINS, 50), vocoder.hift
    samples, _ = piece(vocoder, mel, vocoder.at_turn_start(SeededNoise(1, CPU)), is_last=True)
    drawn, _ = SeededNoise(1, CPU).draw_uniform(50 * SAMPLES_PER_MEL_FRAME, CAUSAL_HIFT.num_harmonics)
    phase = torch.zeros(1, CAUSAL_HIFT.num_harmonics, dtype=torch.float64)
    source, _ = hift.source(hift.pitch_hz(F.pad(mel, (0, 3))), phase, drawn)
    assert torch.equal(samples, hift.filter(mel, source))


def test_chunks_come_out_as_long_as_their_frames_after_160_ms_of_silence(vocoder: CausalVocoder) -> None:
    first, second, last = spoken(vocoder, random(1, BINS, 31), [20, 9, 2], is_ended=True)
    frames = [samples.shape[1] / SAMPLES_PER_MEL_FRAME for samples in (first, second, last)]
    assert frames == [20, 9, 2 + DELAY_FRAMES]
    silence = round(0.16 * OUTPUT_RATE_HZ)
    assert not first[:, :silence].any()
    assert first[:, silence:].all()


def test_the_sound_is_eight_frames_late_and_needs_no_more(vocoder: CausalVocoder) -> None:
    """Nine frames give the first frame's sound, and it stays what it was whatever comes then."""
    assert DELAY_FRAMES == 8
    mel = random(1, BINS, 40)
    eight, ninth = spoken(vocoder, mel[..., :9], [8, 1], is_ended=False)
    assert eight.shape == (1, 0)
    assert ninth.shape == (1, (DELAY_FRAMES + 1) * SAMPLES_PER_MEL_FRAME)
    (whole,) = spoken(vocoder, mel, [40], is_ended=True)
    first_frame = ninth[:, -SAMPLES_PER_MEL_FRAME:]
    torch.testing.assert_close(first_frame, whole[:, :SAMPLES_PER_MEL_FRAME], rtol=0, atol=TOLERANCE)


def test_a_turn_of_one_chunk_has_no_silence_in_front(vocoder: CausalVocoder) -> None:
    (samples,) = spoken(vocoder, random(1, BINS, 3), [3], is_ended=True)
    assert samples.shape[1] == 3 * SAMPLES_PER_MEL_FRAME
    assert samples.all()


def test_an_empty_last_chunk_gives_what_was_held_back(vocoder: CausalVocoder) -> None:
    mel = random(1, BINS, 30)
    *_, rest = spoken(vocoder, mel, [30, 0], is_ended=True)
    (whole,) = spoken(vocoder, mel, [30], is_ended=True)
    assert rest.shape[1] == DELAY_FRAMES * SAMPLES_PER_MEL_FRAME
    torch.testing.assert_close(rest, whole[:, -rest.shape[1] :], rtol=0, atol=TOLERANCE)
    (nothing,) = spoken(vocoder, mel[..., :0], [0], is_ended=True)
    assert nothing.shape == (1, 0)


def test_after_its_last_chunk_a_turns_state_is_that_of_the_next_turn(vocoder: CausalVocoder) -> None:
    mel = random(1, BINS, 30)
    _, state = piece(vocoder, mel[..., :20], vocoder.at_turn_start(SeededNoise(1, CPU)))
    _, ended = piece(vocoder, mel[..., 20:], state, is_last=True)
    assert all(map(torch.equal, tensors(ended), tensors(vocoder.at_turn_start(ended.noise))))
    assert ended.noise == SeededNoise(1, CPU, num_drawn_samples=30 * SAMPLES_PER_MEL_FRAME)


def test_the_sine_goes_on_from_chunk_to_chunk() -> None:
    """A network whose pitch is 123.4 Hz whatever it hears."""
    hift = build_voice.unprepared_causal_hift()
    hift.f0_predictor.classifier.weight.zero_()
    hift.f0_predictor.classifier.bias.fill_(123.4)
    hift.prepare()
    vocoder = CausalVocoder(hift)
    state: CausalState = vocoder.at_turn_start(NoNoise(CPU))
    orders = torch.arange(1, CAUSAL_HIFT.num_harmonics + 1)
    turns_per_sample = (torch.tensor(123.4) * orders / OUTPUT_RATE_HZ).double()
    num_frames = -3  # the pitch of the newest three is not known yet
    for length in (10, 50, 50, 7, 50):
        _, state = piece(vocoder, random(1, BINS, length, seed=length), state)
        num_frames += length
        want = (turns_per_sample * SAMPLES_PER_MEL_FRAME * num_frames) % 1
        torch.testing.assert_close(state.phase[0], want, rtol=0, atol=1e-9)
        at_ends = (2 * torch.pi * state.phase).sin().float() * 0.1
        assert torch.equal(hift.m_source(at_ends[:, None])[0], state.source_tail[0, -1:])


def test_the_memory_of_a_turn_does_not_grow_over_100_chunks(vocoder: CausalVocoder) -> None:
    state: CausalState = vocoder.at_turn_start(SeededNoise(1, CPU))
    shapes = []
    for number in range(100):
        _, state = piece(vocoder, random(1, BINS, 50, seed=number), state)
        shapes.append([tensor.shape for tensor in tensors(state)])
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors(state))
    assert all(now == shapes[0] for now in shapes)
    history = vocoder.num_history_frames
    assert state.mel_tail.shape == (1, BINS, history + 8)
    assert state.source_tail.shape == (1, (history + 5) * SAMPLES_PER_MEL_FRAME)
    assert 0 <= state.phase.min() <= state.phase.max() < 1


def test_a_chunk_can_be_rendered_again(vocoder: CausalVocoder) -> None:
    _, state = piece(vocoder, random(1, BINS, 50), vocoder.at_turn_start(SeededNoise(1, CPU)))
    mel = random(1, BINS, 20, seed=1)
    assert torch.equal(piece(vocoder, mel, state)[0], piece(vocoder, mel, state)[0])


def assert_each_is_as_alone(
    vocoder: CausalVocoder, rows: Sequence[VocoderRow], together: Sequence[tuple[Tensor, CausalState]]
) -> None:
    """vocoder: one that launches."""
    for row, (samples, state) in zip(rows, together, strict=True):
        want, after = piece(vocoder, row.mel, row.state, is_last=row.is_last)
        torch.testing.assert_close(samples, want, rtol=0, atol=TOLERANCE)
        for mine, alone in zip(tensors(state), tensors(after), strict=True):
            torch.testing.assert_close(mine, alone, rtol=0, atol=TOLERANCE)
            assert mine.untyped_storage().nbytes() == mine.nbytes
        assert state.noise == after.noise


def going_on(vocoder: CausalVocoder, seed: int) -> CausalState:
    """A session in a turn whose tails are full."""
    _, state = piece(vocoder, random(1, BINS, 90, seed=seed), vocoder.at_turn_start(SeededNoise(seed, CPU)))
    return state


def test_sessions_share_a_run_and_hear_nothing_of_each_other(vocoder: CausalVocoder) -> None:
    """Two go on, one ends: their pieces are equally long."""
    rows = [
        VocoderRow(random(1, BINS, 10, seed=3), going_on(vocoder, 1), is_last=False),
        VocoderRow(random(1, BINS, 10, seed=4), going_on(vocoder, 2), is_last=False),
        VocoderRow(random(1, BINS, 7, seed=5), going_on(vocoder, 3), is_last=True),
    ]
    assert len({vocoder.kind_of(row) for row in rows}) == 1
    together = vocoder.speak(rows)
    frames = [samples.shape[1] // SAMPLES_PER_MEL_FRAME for samples, _ in together]
    assert frames == [10, 10, 7 + DELAY_FRAMES]
    assert_each_is_as_alone(vocoder, rows, together)


def test_ends_of_turns_share_a_recorded_run_whatever_their_lengths(vocoder: CausalVocoder) -> None:
    """Those that go on, and those that are one piece; of fewer than were recorded."""
    recorded = CausalVocoder(build_voice.causal_hift())
    assert [*recorded.capture((4,), (10, 14), Rerun())] == [3, 2, 1, 0]
    ends = [VocoderRow(random(1, BINS, n, seed=n), going_on(vocoder, n), is_last=True) for n in (8, 14, 11)]
    turns = [
        VocoderRow(random(1, BINS, n, seed=n), vocoder.at_turn_start(SeededNoise(n, CPU)), is_last=True)
        for n in (9, 12, 14)
    ]
    for rows in (ends, turns, ends):
        assert_each_is_as_alone(vocoder, rows, recorded.speak(rows))
    goes_on = VocoderRow(random(1, BINS, 9), going_on(vocoder, 9), is_last=False)
    assert recorded.kind_of(goes_on) not in {recorded.kind_of(row) for row in ends}, "its phase has to end with it"
    assert recorded.num_runs == NumRuns(num_replayed=3)


def test_a_sessions_noise_is_its_own_and_the_same_in_any_pieces() -> None:
    noise = SeededNoise(1, CPU)
    whole, after = noise.draw_uniform(1000, 9)
    first, rest = noise.draw_uniform(3, 9)
    assert torch.equal(torch.cat((first, rest.draw_uniform(997, 9)[0]), dim=1), whole)
    assert whole.shape == (1, 1000, 9)
    assert not torch.equal(after.draw_uniform(1000, 9)[0], whole)
    assert not torch.equal(SeededNoise(2, CPU).draw_uniform(1000, 9)[0], whole)
    assert whole.min() > 0
    assert whole.max() < 1
    # The mean of 9000 numbers from 0 to 1 strays by 0.003; five times that.
    assert abs(whole.mean() - 0.5) < 0.015
    assert len(set(whole.flatten().tolist())) > 8900
