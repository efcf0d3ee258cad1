"""Vocoder: its sizes, its source, its transforms, the joining of chunks. Numbers: tests/golden/code2wav."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from antiphon.errors import CheckpointError
from antiphon.models.minicpmo.hift import (
    HOP_SAMPLES,
    N_FFT,
    SINE_AMPLITUDE,
    VOICED_ABOVE_HZ,
    Hift,
    _samples,
    _spectrum,
    fold_weight_norms,
    harmonics,
)
from antiphon.models.minicpmo.hift_config import HiftConfig, VocoderGeneration, hift_config, vocoder_generation
from antiphon.models.minicpmo.vocoder import (
    OVERLAP_FRAMES,
    OVERLAP_SAMPLES,
    NoNoise,
    SeededNoise,
    Vocoder,
    spliced,
)
from antiphon.units import OUTPUT_RATE_HZ, SAMPLES_PER_MEL_FRAME

BINS = 5
CONFIG = HiftConfig(
    num_mel_bins=BINS,
    base_channels=16,
    num_harmonics=9,
    pitch_channels=6,
    num_pitch_convs=2,
    upsampling_kernels=(16, 11, 7),
    source_resblock_kernels=(7, 7, 11),
    resblock_kernels=(3, 5),
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def build_hift() -> Hift:
    generator = torch.Generator().manual_seed(0)
    hift = Hift(CONFIG).requires_grad_(requires_grad=False)
    for weight in hift.parameters():
        weight.normal_(0, 0.2, generator=generator)
    hift.f0_predictor.classifier.bias.fill_(120.0)
    return hift


@pytest.fixture(scope="module")
def hift() -> Hift:
    with torch.inference_mode():
        built = build_hift()
        fold_weight_norms(built)
        return built


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shapes() -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in build_hift().state_dict().items()}


def test_sizes_follow_from_the_shapes_of_the_weights() -> None:
    assert hift_config(shapes()) == CONFIG
    assert vocoder_generation(shapes()) is VocoderGeneration.V1_0_5


def test_the_causal_vocoder_of_1_0_7_is_recognised_and_refused() -> None:
    causal = shapes() | {"conv_pre.parametrizations.weight.original1": torch.Size((16, BINS, 5))}
    assert vocoder_generation(causal) is VocoderGeneration.V1_0_7
    with pytest.raises(CheckpointError, match=r"1\.0\.7.*serves the vocoder of 1\.0\.5"):
        hift_config(causal)


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
    unfolded = build_hift()
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
    hift = build_hift()
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
    vocoder, noise = Vocoder(hift), NoNoise(CPU)
    state = vocoder.at_turn_start()
    first, state = vocoder.speak(random(1, BINS, 10), state, noise, is_last=False)
    second, state = vocoder.speak(random(1, BINS, 9, seed=1), state, noise, is_last=False)
    last, _ = vocoder.speak(random(1, BINS, 2, seed=2), state, noise, is_last=True)
    frames = [samples.shape[1] / SAMPLES_PER_MEL_FRAME for samples in (first, second, last)]
    assert frames == [10, 9, 2 + OVERLAP_FRAMES]
    assert not first[:, :OVERLAP_SAMPLES].any()
    assert first[:, OVERLAP_SAMPLES:].any()


def test_a_turn_of_one_chunk_has_no_silence_in_front(hift: Hift) -> None:
    vocoder = Vocoder(hift)
    samples, _ = vocoder.speak(random(1, BINS, 3), vocoder.at_turn_start(), NoNoise(CPU), is_last=True)
    assert samples.shape[1] == 3 * SAMPLES_PER_MEL_FRAME
    assert samples[0, :100].any()


def test_a_chunk_is_rendered_with_the_frames_and_the_source_before_it(hift: Hift) -> None:
    vocoder, noise = Vocoder(hift), NoNoise(CPU)
    mel = random(1, BINS, 20)
    _, state = vocoder.speak(mel[..., :10], vocoder.at_turn_start(), noise, is_last=False)
    samples, after = vocoder.speak(mel[..., 10:], state, noise, is_last=False)
    piece = mel[..., 10 - OVERLAP_FRAMES :]
    source = hift.source(hift.pitch_hz(piece), noise.draw(18 * SAMPLES_PER_MEL_FRAME, 9))
    source[:, :OVERLAP_SAMPLES] = state.source_tail
    rendered = hift.filter(piece, source)
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


def test_a_sessions_noise_is_its_own() -> None:
    one, two = SeededNoise(1, CPU), SeededNoise(1, CPU)
    other = SeededNoise(2, CPU)
    drawn = one.draw(5, 9)
    assert not torch.equal(drawn, other.draw(5, 9))
    assert torch.equal(drawn, two.draw(5, 9))
    assert not torch.equal(drawn, two.draw(5, 9))
