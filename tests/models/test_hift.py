"""Vocoder: its sizes, its source, its transforms, the joining of chunks. Numbers: tests/golden/code2wav."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import build_voice
from antiphon.errors import CheckpointError
from antiphon.models.minicpmo.captured import NumRuns
from antiphon.models.minicpmo.hift import (
    HOP_SAMPLES,
    N_FFT,
    SINE_AMPLITUDE,
    VOICED_ABOVE_HZ,
    Hift,
    _samples,
    _spectrum,
    harmonics,
)
from antiphon.models.minicpmo.hift_config import hift_config
from antiphon.models.minicpmo.vocoder import (
    OVERLAP_FRAMES,
    OVERLAP_SAMPLES,
    NoNoise,
    SeededNoise,
    TurnState,
    Vocoder,
    VocoderRow,
    VocoderState,
    spliced,
)
from antiphon.units import OUTPUT_RATE_HZ, SAMPLES_PER_MEL_FRAME
from build_voice import BINS, CPU, HIFT, unfolded_hift
from fakes.rerun import Rerun

TOLERANCE = 1e-4
"""Of samples up to 1. A shared run rounds the pitch differently. The ninth harmonic of 120 Hz turns by 2 400 radians in
18 frames, which float32 knows to 1e-4; its sine's amplitude is 0.1, and nine are added up."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def hift() -> Hift:
    with torch.inference_mode():
        return build_voice.hift()


def piece(vocoder: Vocoder, mel: Tensor, state: TurnState, *, is_last: bool = False) -> tuple[Tensor, VocoderState]:
    """A chunk of one session alone."""
    (spoken,) = vocoder.speak([VocoderRow(mel, state, is_last)])
    return spoken


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shapes() -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in unfolded_hift().state_dict().items()}


def test_sizes_follow_from_the_shapes_of_the_weights() -> None:
    assert hift_config(shapes()) == HIFT


def test_weights_of_another_network_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"kernel of 9, known are 7, 5"):
        hift_config(shapes() | {"conv_pre.parametrizations.weight.original1": torch.Size((16, BINS, 9))})
    with pytest.raises(CheckpointError, match=r"no weight 'conv_pre"):
        hift_config({})
    without_a_block = {name: shape for name, shape in shapes().items() if not name.startswith("resblocks.5.")}
    with pytest.raises(CheckpointError, match=r"5 resblocks"):
        hift_config(without_a_block)


def test_folding_the_weight_norms_changes_names_but_no_sample(hift: Hift) -> None:
    mel, source = random(1, BINS, 6), random(1, 6 * SAMPLES_PER_MEL_FRAME)
    unfolded = unfolded_hift()
    torch.testing.assert_close(hift.filter(mel, source), unfolded.filter(mel, source))
    assert not any("parametrizations" in name for name in hift.state_dict())


def test_the_inverse_transform_gives_the_samples_back() -> None:
    samples = random(2, 400)
    real, imaginary = _spectrum(samples).chunk(2, dim=1)
    spectrum = torch.complex(real, imaginary)
    torch.testing.assert_close(_samples(spectrum.abs(), spectrum.angle()), samples)


def test_the_inverse_transform_of_any_spectrum_is_the_textbooks() -> None:
    magnitude, phase = random(1, N_FFT // 2 + 1, 30).exp(), random(1, N_FFT // 2 + 1, 30, seed=1)
    want = torch.istft(torch.polar(magnitude, phase), N_FFT, HOP_SAMPLES, window=torch.hann_window(N_FFT))
    torch.testing.assert_close(_samples(magnitude, phase), want)


def test_a_steady_pitch_gives_steady_sines_of_its_multiples() -> None:
    pitch_hz, num_frames = 130.0, 6
    sines, is_voiced = harmonics(torch.full((1, num_frames), pitch_hz), 9)
    half = SAMPLES_PER_MEL_FRAME // 2
    time = torch.arange(num_frames * SAMPLES_PER_MEL_FRAME, dtype=torch.float64) + half + 0.5
    orders = torch.arange(1, 10, dtype=torch.float64)
    want = SINE_AMPLITUDE * (2 * math.pi * pitch_hz * orders * time[:, None] / OUTPUT_RATE_HZ).sin()
    inside = slice(half, -half)  # the phase stands still before the first and after the last frame's centre
    torch.testing.assert_close(sines[0, inside].double(), want[inside], atol=2e-5, rtol=0)
    torch.testing.assert_close(sines[0, :half], sines[0, :1].expand(half, -1), atol=1e-6, rtol=0)
    assert is_voiced.all()


def test_there_is_no_voice_at_or_below_the_threshold(hift: Hift) -> None:
    pitch_hz = torch.tensor([[0.0, VOICED_ABOVE_HZ, VOICED_ABOVE_HZ + 0.1]])
    source = hift.source(pitch_hz, torch.zeros(1, 3 * SAMPLES_PER_MEL_FRAME, 9))
    unvoiced = source[0, : 2 * SAMPLES_PER_MEL_FRAME]
    assert (unvoiced == hift.m_source.l_linear.bias.tanh()).all()
    assert not (source[0, 2 * SAMPLES_PER_MEL_FRAME :] == unvoiced[0]).any()


def test_noise_is_quiet_where_there_is_a_voice_and_loud_where_there_is_none() -> None:
    hift = unfolded_hift()
    hift.m_source.l_linear.weight.fill_(1 / 9)
    hift.m_source.l_linear.bias.zero_()
    pitch_hz = torch.tensor([[0.0, 50.0]])
    num_samples = 2 * SAMPLES_PER_MEL_FRAME
    silent = hift.source(pitch_hz, torch.zeros(1, num_samples, 9))
    difference = (hift.source(pitch_hz, torch.ones(1, num_samples, 9)).atanh() - silent.atanh())[0]
    voiced = difference[SAMPLES_PER_MEL_FRAME:]
    torch.testing.assert_close(voiced, torch.full_like(voiced, 0.003), atol=1e-6, rtol=0)
    unvoiced = difference[:SAMPLES_PER_MEL_FRAME]
    torch.testing.assert_close(unvoiced, torch.full_like(unvoiced, 0.1 / 3), atol=1e-6, rtol=0)


def test_chunks_come_out_as_long_as_their_frames_after_160_ms_of_silence(hift: Hift) -> None:
    vocoder = Vocoder(hift)
    first, state = piece(vocoder, random(1, BINS, 10), vocoder.at_turn_start(NoNoise(CPU)))
    second, state = piece(vocoder, random(1, BINS, 9, seed=1), state)
    last, _ = piece(vocoder, random(1, BINS, 2, seed=2), state, is_last=True)
    frames = [samples.shape[1] / SAMPLES_PER_MEL_FRAME for samples in (first, second, last)]
    assert frames == [10, 9, 2 + OVERLAP_FRAMES]
    assert not first[:, :OVERLAP_SAMPLES].any()
    assert first[:, OVERLAP_SAMPLES:].any()


def test_a_turn_of_one_chunk_has_no_silence_in_front(hift: Hift) -> None:
    vocoder = Vocoder(hift)
    samples, _ = piece(vocoder, random(1, BINS, 3), vocoder.at_turn_start(NoNoise(CPU)), is_last=True)
    assert samples.shape[1] == 3 * SAMPLES_PER_MEL_FRAME
    assert samples[0, :100].any()


def test_a_chunk_is_rendered_with_the_frames_and_the_source_before_it(hift: Hift) -> None:
    vocoder = Vocoder(hift)
    mel = random(1, BINS, 20)
    _, state = piece(vocoder, mel[..., :10], vocoder.at_turn_start(NoNoise(CPU)))
    samples, after = piece(vocoder, mel[..., 10:], state)
    seen = mel[..., 10 - OVERLAP_FRAMES :]
    source = hift.source(hift.pitch_hz(seen), torch.zeros(1, 18 * SAMPLES_PER_MEL_FRAME, HIFT.num_harmonics))
    source[:, :OVERLAP_SAMPLES] = state.source_tail
    rendered = hift.filter(seen, source)
    middle = slice(OVERLAP_SAMPLES, -OVERLAP_SAMPLES)
    assert torch.equal(samples[:, OVERLAP_SAMPLES:], rendered[:, middle])
    assert torch.equal(after.source_tail, source[:, -OVERLAP_SAMPLES:])
    assert torch.equal(after.mel_tail, mel[..., -OVERLAP_FRAMES:])


def test_renderings_that_agree_are_eight_percent_too_loud_where_they_overlap() -> None:
    level = torch.full((1, 3 * OVERLAP_SAMPLES), 0.5)
    _, tail = spliced(level, level[:, :0], is_last=False)
    joined, _ = spliced(level, tail, is_last=True)
    overlap = joined[:, :OVERLAP_SAMPLES] / 0.5
    torch.testing.assert_close(overlap, torch.full_like(overlap, 1.08), atol=2e-3, rtol=0)
    assert torch.equal(joined[:, OVERLAP_SAMPLES:], level[:, OVERLAP_SAMPLES:])


def test_a_sessions_noise_is_its_own_and_never_comes_again() -> None:
    one, two, other = SeededNoise(1, CPU), SeededNoise(1, CPU), SeededNoise(2, CPU)
    drawn, after = one.draw(5, 9)
    assert torch.equal(drawn, two.draw(5, 9)[0])
    assert not torch.equal(drawn, other.draw(5, 9)[0])
    assert not torch.equal(drawn, after.draw(5, 9)[0])


def test_noise_can_be_drawn_again_when_a_chunk_failed() -> None:
    _, noise = SeededNoise(1, CPU).draw(5, 9)
    assert torch.equal(noise.draw(5, 9)[0], noise.draw(5, 9)[0])


def test_a_recorded_run_gives_the_samples_that_a_launched_one_gives(hift: Hift) -> None:
    """Also where one session begins its turn and another goes on, and pieces are shorter or fewer than recorded."""
    launched, recorded = Vocoder(hift), Vocoder(hift)
    assert [*recorded.capture((1, 3), (10, 14), Rerun())] == [3, 2, 1, 0]
    mels = [random(1, BINS, num, seed=num) for num in (10, 10, 18, 10, 12)]
    told = []
    for vocoder in (launched, recorded):
        first, second = (vocoder.at_turn_start(SeededNoise(seed, CPU)) for seed in (1, 2))
        begun, first = piece(vocoder, mels[0], first)
        rows = [VocoderRow(mels[1], first, is_last=False), VocoderRow(mels[2], second, is_last=False)]
        (went_on, first), (began, _) = vocoder.speak(rows)
        later, first = piece(vocoder, mels[3], first)
        ended, _ = piece(vocoder, mels[4], first, is_last=True)
        told.append(torch.cat([begun, went_on, began, later, ended], dim=-1))
    torch.testing.assert_close(*told, rtol=0, atol=TOLERANCE)
    assert (launched.num_runs, recorded.num_runs) == (NumRuns(0, 4), NumRuns(4, 0))


def assert_same_state(state: VocoderState, other: VocoderState) -> None:
    """And that neither keeps more memory than it needs."""
    for mine, its in (
        (state.mel_tail, other.mel_tail),
        (state.source_tail, other.source_tail),
        (state.speech_tail, other.speech_tail),
    ):
        torch.testing.assert_close(mine, its, rtol=0, atol=TOLERANCE)
        assert mine.untyped_storage().nbytes() == mine.nbytes
    assert state.noise == other.noise


def test_pieces_of_several_lengths_share_a_run_and_sound_as_each_alone(hift: Hift) -> None:
    """The ends of turns among them, down to a frame, and turns that are one piece."""
    alone, together = Vocoder(hift), Vocoder(hift)
    assert [*together.capture((5,), (14,), Rerun())] == [0]
    states = [alone.at_turn_start(SeededNoise(seed, CPU)) for seed in range(5)]
    for number in (0, 1, 2):
        _, states[number] = piece(alone, random(1, BINS, 9, seed=number), states[number])
    lengths = (1, 14, 9, 3, 22)
    rows = [
        VocoderRow(random(1, BINS, length, seed=10 + number), state, is_last=number != 2)
        for number, (length, state) in enumerate(zip(lengths, states, strict=True))
    ]
    assert {together.kind_of(row) for row in rows} == {(22,)}
    # Nothing of a piece that stood there before is heard.
    together.speak([VocoderRow(9 * random(1, BINS, 22, seed=9), states[4], is_last=True)] * 5)
    sung = together.speak([rows[1], rows[0], rows[4], rows[2], rows[3]])
    assert together.num_runs == NumRuns(2, 0)
    for place, number in enumerate((1, 0, 4, 2, 3)):
        want, after = piece(alone, rows[number].mel, rows[number].state, is_last=rows[number].is_last)
        samples, state = sung[place]
        torch.testing.assert_close(samples, want, rtol=0, atol=TOLERANCE)
        assert_same_state(state, after)


def test_sessions_share_a_run_and_hear_nothing_of_each_other(hift: Hift) -> None:
    """One has just begun, one goes on, one ends: their pieces are equally long."""
    vocoder = Vocoder(hift)
    going, ending = (vocoder.at_turn_start(SeededNoise(seed, CPU)) for seed in (1, 2))
    _, going = piece(vocoder, random(1, BINS, 12, seed=1), going)
    _, ending = piece(vocoder, random(1, BINS, 9, seed=2), ending)
    rows = [
        VocoderRow(random(1, BINS, 18, seed=3), vocoder.at_turn_start(SeededNoise(3, CPU)), is_last=False),
        VocoderRow(random(1, BINS, 10, seed=4), going, is_last=False),
        VocoderRow(random(1, BINS, 10, seed=5), ending, is_last=True),
    ]
    together = vocoder.speak(rows)
    assert [samples.shape[1] // SAMPLES_PER_MEL_FRAME for samples, _ in together] == [18, 10, 18]
    for row, (samples, state) in zip(rows, together, strict=True):
        want, after = piece(vocoder, row.mel, row.state, is_last=row.is_last)
        torch.testing.assert_close(samples, want, rtol=0, atol=TOLERANCE)
        assert_same_state(state, after)
