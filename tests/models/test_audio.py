"""The audio front end: mel stream against whole recomputation, encoder against itself. Numbers: tests/golden/audio."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from antiphon.errors import AudioError, ConfigError
from antiphon.models.minicpmo.audio_encoder import CHUNK_POSITIONS, AudioEncoder
from antiphon.models.minicpmo.audio_features import FFT_SAMPLES, Floor, MelExtractor
from antiphon.models.minicpmo.audio_stream import (
    CHUNK_FRAMES,
    EXTRA_FRAMES,
    FIRST_CHUNK_SAMPLES,
    MAX_WAITING_SAMPLES,
    PADDED_FIRST_SAMPLES,
    MelChunk,
    MelStream,
    MelWindow,
)
from antiphon.models.minicpmo.config import AudioConfig
from antiphon.models.minicpmo.mel_filters import slaney_filters
from antiphon.units import INPUT_RATE_HZ, UNIT_SAMPLES

CONFIG = AudioConfig(
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    intermediate_size=32,
    num_mel_bins=80,
    max_positions=1500,
    pool_step=5,
    chunk_length_s=1.0,
    output_size=24,
)
EXTRACTOR = MelExtractor(CONFIG.num_mel_bins)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def noise(num_samples: int, *, seed: int = 0, loudness: float = 0.1) -> Tensor:
    return torch.randn(num_samples, generator=torch.Generator().manual_seed(seed)) * loudness


def take_all(stream: MelStream) -> list[MelChunk]:
    return list(iter(stream.take, None))


def stream_chunks(samples: Tensor) -> list[MelChunk]:
    """One take per second of audio, as a session does it."""
    stream = MelStream(EXTRACTOR)
    chunks = []
    for packet in torch.split(samples, UNIT_SAMPLES):
        stream.push(packet)
        chunks += take_all(stream)
    return chunks


def encoder_with_random_weights(config: AudioConfig = CONFIG) -> AudioEncoder:
    with torch.device("meta"):
        encoder = AudioEncoder(config)
    generator = torch.Generator().manual_seed(1)
    weights = {
        k: torch.randn(v.shape, generator=generator) / v.shape[-1] ** 0.5 for k, v in encoder.state_dict().items()
    }
    encoder.load_state_dict(weights, assign=True)
    encoder.prepare()
    return encoder


def mel_chunk(mel: Tensor, index: int) -> MelChunk:
    """Chunk `index` of a mel [bins, frames] that has the frames after it."""
    prefix_frames = EXTRA_FRAMES if index else 0
    start_frame = index * CHUNK_FRAMES
    shown = mel[:, start_frame - prefix_frames : start_frame + CHUNK_FRAMES + EXTRA_FRAMES]
    return MelChunk(shown, prefix_frames, EXTRA_FRAMES, start_frame, 0, UNIT_SAMPLES, MelWindow(0, 0))


def test_every_wide_filter_has_unit_area() -> None:
    filters = slaney_filters(80, FFT_SAMPLES, INPUT_RATE_HZ, INPUT_RATE_HZ / 2)
    areas = filters.sum(dim=1) * INPUT_RATE_HZ / FFT_SAMPLES
    # The sum over bins h = 40 Hz apart integrates a triangle of half width w up to h^2 / 2w^2; w >= 140 Hz here.
    torch.testing.assert_close(areas[-20:], torch.ones(20, dtype=torch.float64), rtol=0.041, atol=0)
    assert (filters >= 0).all()


def test_a_stream_gives_what_recomputing_its_whole_window_gives() -> None:
    """Over two slides; the loudest values lie where the window's start or end is mirrored, and so set the floor."""
    num_chunks = 42
    samples = noise(num_chunks * UNIT_SAMPLES, loudness=1e-5)
    heard = F.pad(samples, (PADDED_FIRST_SAMPLES - UNIT_SAMPLES, 0))
    for start, loudness in ((160_000, 0.5), (320_000, 0.5), (FIRST_CHUNK_SAMPLES + 6 * UNIT_SAMPLES - 20, 0.3)):
        heard[start : start + 20] = loudness
    chunks = stream_chunks(heard[PADDED_FIRST_SAMPLES - UNIT_SAMPLES :])

    window_start = 0
    assert len(chunks) == num_chunks
    for index, chunk in enumerate(chunks):
        end = FIRST_CHUNK_SAMPLES + index * UNIT_SAMPLES
        if end - window_start >= 480_000:
            window_start += 160_000
        floor = Floor.FIXED if end - window_start < 80_000 else Floor.DYNAMIC
        mel = EXTRACTOR.mel(heard[window_start:end], floor)
        first_frame = window_start // 160
        shown = mel[:, max(100 * index - 2, 0) - first_frame : 100 * index + 102 - first_frame]
        assert chunk.window == MelWindow(first_frame, end - window_start)
        torch.testing.assert_close(chunk.mel, shown, rtol=0, atol=1e-6)
    assert window_start == 320_000


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 20_000), max_size=20))
def test_any_split_of_the_packets_gives_the_same_chunks(packet_samples: list[int]) -> None:
    samples = noise(PADDED_FIRST_SAMPLES + sum(packet_samples))
    whole = MelStream(EXTRACTOR)
    whole.push(samples)
    expected = take_all(whole)

    stream, chunks, num_pushed = MelStream(EXTRACTOR), [], 0
    for packet in torch.split(samples, [PADDED_FIRST_SAMPLES, *packet_samples]):
        stream.push(packet)
        chunks += take_all(stream)
        num_pushed += packet.numel()
        assert num_pushed == sum(chunk.consumed_samples for chunk in chunks) + stream.waiting_samples
    assert len(chunks) == len(expected)
    assert all(torch.equal(a.mel, b.mel) for a, b in zip(chunks, expected, strict=True))


def test_a_first_packet_of_one_sample_is_filled_up_with_silence_in_front() -> None:
    stream = MelStream(EXTRACTOR)
    assert stream.take() is None
    stream.push(torch.ones(1))
    chunk = stream.take()
    assert chunk is not None
    assert (chunk.padding_samples, chunk.consumed_samples) == (PADDED_FIRST_SAMPLES - 1, FIRST_CHUNK_SAMPLES)
    assert stream.waiting_samples == PADDED_FIRST_SAMPLES - FIRST_CHUNK_SAMPLES
    assert stream.take() is None


def test_a_refused_packet_leaves_the_stream_as_it_was() -> None:
    stream = MelStream(EXTRACTOR)
    stream.push(noise(MAX_WAITING_SAMPLES - 1))
    for bad in (
        torch.tensor([0.0, float("nan")]),
        torch.tensor([float("inf")]),
        torch.zeros(2),
        torch.zeros(1, 1),
        torch.zeros(1, dtype=torch.float64),
    ):
        with pytest.raises(AudioError):
            stream.push(bad)
    assert stream.waiting_samples == MAX_WAITING_SAMPLES - 1
    assert all(chunk.mel.isfinite().all() for chunk in take_all(stream))


def test_a_caller_may_reuse_the_packet_that_it_pushed() -> None:
    packet = noise(UNIT_SAMPLES)
    (expected,) = stream_chunks(packet)
    stream = MelStream(EXTRACTOR)
    stream.push(packet)
    packet.zero_()
    (chunk,) = take_all(stream)
    assert torch.equal(chunk.mel, expected.mel)


def test_a_stream_does_not_grow() -> None:
    stream = MelStream(EXTRACTOR)
    num_bytes = []
    for index in range(55):
        stream.push(noise(UNIT_SAMPLES, seed=index))
        take_all(stream)
        num_bytes.append(len(pickle.dumps(stream)))
    assert max(num_bytes[30:]) <= max(num_bytes[1:30]) + 100
    assert max(num_bytes) < 300_000


def test_reference_audio_is_cut_into_pieces_of_half_a_minute() -> None:
    samples = noise(30 * INPUT_RATE_HZ + 2_001)
    mels = EXTRACTOR.reference_mels(samples)
    assert [mel.shape[1] for mel in mels] == [3000, 13]
    assert torch.equal(mels[1], EXTRACTOR.reference_mels(samples[-2_001:])[0])
    embeds = encoder_with_random_weights().encode_reference(samples, EXTRACTOR)
    assert embeds.shape == (300 + 1, CONFIG.output_size)


@pytest.mark.parametrize("num_samples", [0, 1, 1_280])
def test_reference_audio_without_a_token_is_refused(num_samples: int) -> None:
    encoder = encoder_with_random_weights()
    with pytest.raises(AudioError):
        encoder.encode_reference(noise(num_samples), EXTRACTOR)
    assert len(encoder.encode_reference(noise(1_281), EXTRACTOR)) == 1


def test_chunks_one_by_one_give_what_the_whole_recording_gives() -> None:
    encoder, state = encoder_with_random_weights(), encoder_with_random_weights().new_state()
    mel = torch.randn(CONFIG.num_mel_bins, 3 * CHUNK_FRAMES + EXTRA_FRAMES, generator=torch.Generator().manual_seed(2))
    (whole,) = encoder.encode_mels([mel])
    streamed = torch.cat([encoder.encode_chunks([(mel_chunk(mel, index), state)])[0] for index in range(3)])
    torch.testing.assert_close(streamed, whole[: len(streamed)], rtol=0, atol=1e-4)
    assert state.num_positions == 3 * CHUNK_POSITIONS


def test_a_row_is_the_same_alone_and_in_a_batch_with_a_new_session() -> None:
    encoder = encoder_with_random_weights()
    old, young = stream_chunks(noise(3 * UNIT_SAMPLES, seed=1)), stream_chunks(noise(UNIT_SAMPLES, seed=2))
    alone, together, joining = encoder.new_state(), encoder.new_state(), encoder.new_state()
    expected = [encoder.encode_chunks([(chunk, alone)])[0] for chunk in old]
    for chunk in old[:-1]:
        encoder.encode_chunks([(chunk, together)])
    got = encoder.encode_chunks([(young[0], joining), (old[-1], together)])
    torch.testing.assert_close(got[1], expected[-1], rtol=0, atol=1e-4)
    torch.testing.assert_close(got[0], encoder.encode_chunks([(young[0], encoder.new_state())])[0], rtol=0, atol=1e-4)


def test_a_full_history_is_dropped_and_the_next_chunk_is_heard_as_by_a_fresh_encoder() -> None:
    chunks = stream_chunks(noise(31 * UNIT_SAMPLES))
    encoder = encoder_with_random_weights()
    state = encoder.new_state()
    filled = []
    for chunk in chunks[:30]:
        embeds = encoder.encode_chunks([(chunk, state)])
        filled.append(state.num_positions)
    assert max(filled) == filled[28] == 1450
    assert (filled[29], state.num_resets) == (CHUNK_POSITIONS, 1)
    torch.testing.assert_close(embeds, encoder.encode_chunks([(chunks[29], encoder.new_state())]), rtol=0, atol=0)


def test_recordings_in_one_batch_do_not_hear_each_other() -> None:
    encoder = encoder_with_random_weights()
    generator = torch.Generator().manual_seed(3)
    mels = [torch.randn(CONFIG.num_mel_bins, frames, generator=generator) for frames in (90, 330)]
    _, long = encoder.encode_mels(mels)
    torch.testing.assert_close(long, encoder.encode_mels([mels[1]])[0], rtol=0, atol=1e-4)
    short, _ = encoder.encode_mels(mels)
    other, _ = encoder.encode_mels([mels[0], torch.zeros_like(mels[1])])
    assert torch.equal(short, other)


def test_a_short_recording_in_a_batch_sees_as_much_padding_as_it_has_audio() -> None:
    encoder = encoder_with_random_weights()
    short = torch.randn(CONFIG.num_mel_bins, 40, generator=torch.Generator().manual_seed(4))
    got, _ = encoder.encode_mels([short, torch.zeros(CONFIG.num_mel_bins, 330)])
    (padded,) = encoder.encode_mels([F.pad(short, (0, 40))])
    torch.testing.assert_close(got, padded[: len(got)], rtol=0, atol=1e-4)


def test_the_encoder_works_in_the_dtype_and_on_the_device_of_its_weights() -> None:
    (chunk,) = stream_chunks(noise(UNIT_SAMPLES))
    half = encoder_with_random_weights().bfloat16()
    assert half.encode_chunks([(chunk, half.new_state())]).dtype == torch.bfloat16
    for encoder in (half, encoder_with_random_weights().to("meta")):
        weight = encoder.apm.conv1.weight
        recording = encoder.encode_reference(noise(2 * UNIT_SAMPLES), EXTRACTOR)
        assert (recording.dtype, recording.device) == (weight.dtype, weight.device)


def test_a_model_without_room_for_one_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_source_positions is 49"), torch.device("meta"):
        AudioEncoder(AudioConfig(16, 1, 2, 32, 80, 49, 5, 1.0, 24))
