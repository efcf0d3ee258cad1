"""The causal vocoder's network: its sizes, how far each part looks, its source. The chunks: test_causal_vocoder.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import build_voice
from antiphon.models.minicpmo.causal_hift import (
    FILTER_LOOKAHEAD_FRAMES,
    MEL_LOOKAHEAD_FRAMES,
    PITCH_LOOKAHEAD_FRAMES,
    CausalHift,
    history_frames,
)
from antiphon.models.minicpmo.hift import SINE_AMPLITUDE, VOICED_ABOVE_HZ
from antiphon.models.minicpmo.hift_config import Generation, hift_config
from antiphon.models.minicpmo.released import RELEASED
from antiphon.units import OUTPUT_RATE_HZ, SAMPLES_PER_MEL_FRAME
from build_voice import BINS, CAUSAL_HIFT

NUM_FRAMES, CHANGED = 60, 45
PITCH_HISTORY_FRAMES = 2 * (CAUSAL_HIFT.num_pitch_convs - 1)
ORDERS = torch.arange(1, CAUSAL_HIFT.num_harmonics + 1)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def hift() -> CausalHift:
    with torch.inference_mode():
        return build_voice.causal_hift()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def changed(values: Tensor, index: int) -> Tensor:
    """The same with another value at one place of time."""
    values = values.clone()
    values[..., index] += 1
    return values


def differing(run: Callable[[Tensor], Tensor], values: Tensor, index: int, *, per_result: int = 1) -> range:
    """The results, counted in groups of `per_result`, from the first to the last that a change at one place reaches."""
    groups = (run(values) != run(changed(values, index)))[0].reshape(-1, per_result).any(-1)
    places = groups.nonzero()[:, 0].tolist()
    return range(places[0], places[-1] + 1)


def filtered(hift: CausalHift) -> tuple[Tensor, Tensor, Tensor]:
    mel, source = random(1, BINS, NUM_FRAMES), 0.1 * random(1, NUM_FRAMES * SAMPLES_PER_MEL_FRAME, seed=1)
    return mel, source, hift.filter(mel, source)


def test_sizes_and_generation_follow_from_the_shapes_of_the_weights() -> None:
    shapes = {name: weight.shape for name, weight in build_voice.unprepared_causal_hift().state_dict().items()}
    assert hift_config(shapes) == CAUSAL_HIFT
    assert CAUSAL_HIFT.generation is Generation.V1_0_7


def test_a_pitch_follows_from_three_frames_ahead_and_two_behind_for_every_other_layer(hift: CausalHift) -> None:
    assert PITCH_LOOKAHEAD_FRAMES == 3
    mel = random(1, BINS, NUM_FRAMES)
    reached = differing(hift.pitch_hz, mel, CHANGED)
    assert reached == range(CHANGED - PITCH_LOOKAHEAD_FRAMES, CHANGED + PITCH_HISTORY_FRAMES + 1)
    assert hift.pitch_hz(mel).shape == (1, NUM_FRAMES - PITCH_LOOKAHEAD_FRAMES)


def test_the_pitch_of_a_piece_is_that_of_the_whole_to_the_last_bit(hift: CausalHift) -> None:
    """In float64 the order of the sums is far below what float32 holds of the result."""
    mel = random(1, BINS, 200)
    whole = hift.pitch_hz(mel)
    for start in range(0, 150, 7):
        piece = hift.pitch_hz(mel[..., start : start + 30])
        assert torch.equal(piece[:, PITCH_HISTORY_FRAMES:], whole[:, start + PITCH_HISTORY_FRAMES : start + 27])


def test_only_the_pitch_is_in_float64(hift: CausalHift) -> None:
    doubles = {name.split(".")[0] for name, weight in hift.state_dict().items() if weight.dtype == torch.float64}
    singles = {name.split(".")[0] for name, weight in hift.state_dict().items() if weight.dtype == torch.float32}
    assert doubles == {"f0_predictor"}
    assert "f0_predictor" not in singles
    assert not any("parametrizations" in name for name in hift.state_dict())


def test_a_sample_follows_from_four_mel_frames_ahead_and_from_the_frame_that_it_overlaps_with(hift: CausalHift) -> None:
    mel, source, _ = filtered(hift)
    reached = differing(lambda other: hift.filter(other, source), mel, CHANGED, per_result=SAMPLES_PER_MEL_FRAME)
    assert reached.start == CHANGED - MEL_LOOKAHEAD_FRAMES - 1 == CHANGED - FILTER_LOOKAHEAD_FRAMES
    first_sample = CHANGED * SAMPLES_PER_MEL_FRAME
    reached = differing(lambda other: hift.filter(mel, other), source, first_sample, per_result=SAMPLES_PER_MEL_FRAME)
    assert reached.start == CHANGED - 1
    reached = differing(lambda other: hift.filter(mel, other), source, first_sample - 1)
    assert reached.start > first_sample - 2 * SAMPLES_PER_MEL_FRAME


@pytest.mark.parametrize("start", [1, 7, 20])
def test_a_piece_sounds_as_in_the_whole_once_its_history_is_there(hift: CausalHift, start: int) -> None:
    history = history_frames(CAUSAL_HIFT)
    mel, source, whole = filtered(hift)
    piece = hift.filter(mel[..., start:], source[:, start * SAMPLES_PER_MEL_FRAME :])
    settled = history * SAMPLES_PER_MEL_FRAME
    difference = (piece - whole[:, start * SAMPLES_PER_MEL_FRAME :]).abs()
    # Sums of up to 256 products of values below 5, a few of them in a row; rounding alone, in float32.
    assert difference[:, settled:].max() < 1e-6
    assert difference[:, : settled - SAMPLES_PER_MEL_FRAME].max() > 1e-5


def test_history_is_no_longer_than_the_widths_demand() -> None:
    """By hand for the released widths: 28.5 frames of source back through the first stage, see the comments."""
    # Grid of 120 steps a mel frame, last stage: 1 + 6 behind, a resblock of kernel 11 reaches 10 * (1+3+5+3) = 120.
    last = 1 + 6 + 120
    # Grid of 40: one step for the reflection, 6 for the kernel of 7; then 120 again.
    middle = math.ceil((last + 1 + 6) / 3) + 120
    # Grid of 8: 10 for the kernel of 11; then 120; the source's resblock of kernel 7 reaches 72.
    first = math.ceil((middle + 10) / 5) + 120
    source_samples = 4 * ((first + 72) * 15 + 14) + 8
    assert history_frames(replace(RELEASED.hift, generation=Generation.V1_0_7)) == math.ceil(source_samples / 480) == 29


def test_a_steady_pitch_gives_the_sine_at_the_end_of_every_frame_wherever_it_is_cut(hift: CausalHift) -> None:
    pitch_hz = torch.full((1, 40), 130.0)
    phase = torch.zeros(1, len(ORDERS), dtype=torch.float64)
    sources = []
    for piece in torch.split(pitch_hz, [1, 16, 3, 20], dim=1):
        silence = torch.zeros(1, piece.shape[1] * SAMPLES_PER_MEL_FRAME, len(ORDERS))
        source, phase = hift.source(piece, phase, silence)
        sources.append(source)
    ends = torch.arange(1, 41, dtype=torch.float64) * SAMPLES_PER_MEL_FRAME
    turns = 130.0 * ORDERS * ends[:, None] / OUTPUT_RATE_HZ
    want = hift.m_source(SINE_AMPLITUDE * (2 * math.pi * turns).sin().float()[None])
    got = torch.cat(sources, dim=1).reshape(1, 40, SAMPLES_PER_MEL_FRAME)
    # 130 / 24000 is not a float32 number: up to 3e-8 of it, 480 times a frame for 40 frames and the ninth harmonic.
    torch.testing.assert_close(got, want[..., None].expand_as(got), rtol=0, atol=1e-4)
    assert phase.dtype == torch.float64


def test_the_phase_is_the_sum_of_what_the_frames_turned_modulo_one(hift: CausalHift) -> None:
    pitch_hz = 100 + 20 * random(1, 500).abs()
    noise = torch.zeros(1, 500 * SAMPLES_PER_MEL_FRAME, len(ORDERS))
    _, phase = hift.source(pitch_hz, torch.full((1, len(ORDERS)), 0.25, dtype=torch.float64), noise)
    turns = (pitch_hz[0, :, None] * ORDERS / OUTPUT_RATE_HZ).double()
    want = (0.25 + SAMPLES_PER_MEL_FRAME * turns.sum(0)) % 1
    distance = (phase[0] - want).abs()
    assert torch.minimum(distance, 1 - distance).max() < 1e-9
    assert 0 <= phase.min() <= phase.max() < 1


def test_noise_is_quiet_where_there_is_a_voice_and_alone_where_there_is_none() -> None:
    hift = build_voice.unprepared_causal_hift()
    hift.m_source.l_linear.weight.fill_(1 / 9)
    hift.m_source.l_linear.bias.zero_()
    pitch_hz = torch.tensor([[VOICED_ABOVE_HZ, VOICED_ABOVE_HZ + 0.1]])
    phase = torch.zeros(1, len(ORDERS), dtype=torch.float64)
    full = torch.ones(1, 2 * SAMPLES_PER_MEL_FRAME, len(ORDERS))
    (loud, _), (silent, _) = (hift.source(pitch_hz, phase, noise) for noise in (full, 0 * full))
    unvoiced, voiced = (loud.atanh() - silent.atanh())[0].chunk(2)
    torch.testing.assert_close(unvoiced, torch.full_like(unvoiced, 0.1 / 3), atol=1e-6, rtol=0)
    torch.testing.assert_close(voiced, torch.full_like(voiced, 0.003), atol=1e-6, rtol=0)
    assert not silent[:, :SAMPLES_PER_MEL_FRAME].any()
    assert silent[:, SAMPLES_PER_MEL_FRAME:].all()


def test_zeros_stand_for_what_comes_after_the_end(hift: CausalHift) -> None:
    mel, source, whole = filtered(hift)
    more = hift.filter(F.pad(mel, (0, 9)), F.pad(source, (0, 9 * SAMPLES_PER_MEL_FRAME)))
    complete = (NUM_FRAMES - 1) * SAMPLES_PER_MEL_FRAME
    torch.testing.assert_close(more[:, :complete], whole[:, :complete], rtol=0, atol=1e-6)
