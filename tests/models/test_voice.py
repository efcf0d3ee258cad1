"""From a recording to a voice's prompt, with tiny ONNX models in place of the released ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

from antiphon.errors import AudioError, CheckpointError
from antiphon.models.minicpmo.mel_filters import slaney_filters
from antiphon.models.minicpmo.voice import (
    MAX_RECORDING_S,
    MIN_RECORDING_S,
    TOKEN_MEL_BINS,
    WINDOW_FRAMES,
    VoicePreparer,
    speaker_features,
)
from antiphon.models.minicpmo.voice_mel import FFT_SAMPLES, MAX_HZ, PromptMel
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.units import CODEC_RATE_HZ, INPUT_RATE_HZ, OUTPUT_RATE_HZ

BINS = 80


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def save(path: Path, nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, list[int | str]]]) -> Path:
    """A model whose last node's output is its only one."""
    constants = {"first": [0], "second": [1], "end": [2**31 - 1], "step": [4], "axis": [1], "axis2": [2]}
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_empty_tensor_value_info(nodes[-1].output[0])],
        [helper.make_tensor(name, TensorProto.INT64, [1], value) for name, value in constants.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tokenizer that reads off a quarter of every fourth frame's first bin, and a speaker model of maxima."""
    folder = tmp_path_factory.mktemp("voice")
    tokenizer = save(
        folder / "tokenizer.onnx",
        [
            helper.make_node("Slice", ["feats", "first", "second", "axis"], ["bin"]),
            helper.make_node("Slice", ["bin", "first", "end", "axis2", "step"], ["fourth"]),
            helper.make_node("Squeeze", ["fourth", "axis"], ["row"]),
            helper.make_node("Cast", ["step"], ["four"], to=TensorProto.FLOAT),
            helper.make_node("Div", ["row", "four"], ["quarter"]),
            helper.make_node("Abs", ["quarter"], ["positive"]),
            helper.make_node("Cast", ["positive"], ["codes"], to=TensorProto.INT64),
        ],
        {
            "feats": (TensorProto.FLOAT, [1, TOKEN_MEL_BINS, "T"]),
            "feats_length": (TensorProto.INT32, [1]),
        },
    )
    speaker = save(
        folder / "speaker.onnx",
        [helper.make_node("ReduceMax", ["feats"], ["maxima"], axes=[1], keepdims=0)],
        {"feats": (TensorProto.FLOAT, [1, "T", 80])},
    )
    return tokenizer, speaker


@pytest.fixture
def preparer(models: tuple[Path, Path]) -> VoicePreparer:
    return VoicePreparer(*models, num_mel_bins=BINS)


def tone(hz: float, length_s: float, rate_hz: int) -> Tensor:
    return 0.5 * (2 * math.pi * hz * torch.arange(round(length_s * rate_hz)) / rate_hz).sin()


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 24_000, 44_100])
def test_a_recording_of_any_rate_becomes_tokens_twice_as_many_frames_and_a_speaker(
    preparer: VoicePreparer, rate_hz: int
) -> None:
    prompt = preparer.prepare(tone(300, 1.5, rate_hz)[None], rate_hz)
    assert len(prompt.tokens) == pytest.approx(1.5 * CODEC_RATE_HZ, abs=1)
    assert prompt.mel.shape == (2 * len(prompt.tokens), BINS)
    assert prompt.speaker.shape == (80,)


def test_tokens_and_speaker_come_from_the_first_channel_and_the_mel_from_the_mean(preparer: VoicePreparer) -> None:
    left, silence = tone(300, 1.0, INPUT_RATE_HZ), torch.zeros(INPUT_RATE_HZ)
    mono = preparer.prepare(left[None], INPUT_RATE_HZ)
    stereo = preparer.prepare(torch.stack((left, silence)), INPUT_RATE_HZ)
    assert stereo.tokens == mono.tokens
    assert torch.equal(stereo.speaker, mono.speaker)
    loudest = mono.mel.argmax(dim=1, keepdim=True)
    half = mono.mel.gather(1, loudest) - stereo.mel.gather(1, loudest)
    torch.testing.assert_close(half, torch.full_like(half, math.log(2)), atol=1e-3, rtol=0)


@pytest.mark.parametrize("num_frames", [4, 400, WINDOW_FRAMES - 4, WINDOW_FRAMES, WINDOW_FRAMES + 4, 5600, 5604, 9000])
def test_windows_of_a_long_recording_join_to_every_token_once(preparer: VoicePreparer, num_frames: int) -> None:
    mel = torch.zeros(TOKEN_MEL_BINS, num_frames)
    mel[0] = torch.arange(num_frames)
    assert preparer.speech_tokens(mel) == tuple(range(num_frames // 4))


def test_a_tone_is_loudest_in_the_mel_bin_around_it() -> None:
    filters = slaney_filters(BINS, FFT_SAMPLES, OUTPUT_RATE_HZ, MAX_HZ)
    for hz in (250.0, 1000.0, 5000.0):
        frames = PromptMel(BINS).frames(tone(hz, 0.5, OUTPUT_RATE_HZ))
        assert frames.shape == (25, BINS)
        loudest = int(frames[12].argmax())
        assert loudest == int(filters[:, round(hz * FFT_SAMPLES / OUTPUT_RATE_HZ)].argmax())


def test_mel_filters_have_one_area_and_end_at_8_khz() -> None:
    filters = slaney_filters(BINS, FFT_SAMPLES, OUTPUT_RATE_HZ, MAX_HZ)
    bin_hz = OUTPUT_RATE_HZ / FFT_SAMPLES
    areas = filters[40:].sum(dim=1) * bin_hz  # the lower ones are too narrow for a sum to be their area
    torch.testing.assert_close(areas, torch.ones_like(areas), atol=0.01, rtol=0)
    assert not filters[:, round(8000 / bin_hz) :].any()


def test_mel_filters_match_known_values() -> None:
    """Of librosa 0.11: filters.mel(sr=24000, n_fft=1920, n_mels=80, fmin=0, fmax=8000)."""
    filters = slaney_filters(BINS, FFT_SAMPLES, OUTPUT_RATE_HZ, MAX_HZ)
    known = {(0, 1): 0.0090138, (0, 3): 0.0266654, (20, 60): 0.0037611, (40, 138): 0.0143697, (79, 620): 0.0028047}
    for place, value in known.items():
        assert float(filters[place]) == pytest.approx(value, abs=1e-6)


def test_speaker_features_are_kaldis_frames_without_their_mean() -> None:
    speech = torch.randn(INPUT_RATE_HZ, generator=torch.Generator().manual_seed(0)) * 0.1
    features = speaker_features(speech)
    assert features.shape == (1 + (INPUT_RATE_HZ - 400) // 160, 80)
    torch.testing.assert_close(features.mean(dim=0), torch.zeros(80), atol=1e-5, rtol=0)
    assert torch.equal(features, speaker_features(speech))
    torch.testing.assert_close(features, speaker_features(2 * speech), atol=1e-3, rtol=0)


def test_speaker_features_match_known_values() -> None:
    """Of torchaudio 2.8: compliance.kaldi.fbank(x, num_mel_bins=80, dither=0) less its mean, of this chirp."""
    time_s = torch.arange(INPUT_RATE_HZ) / INPUT_RATE_HZ
    features = speaker_features(0.5 * (2 * math.pi * (200 + 400 * time_s) * time_s).sin())
    known = {
        (0, 5): 11.3698,
        (0, 20): -8.1585,
        (50, 10): -1.0979,
        (50, 20): 7.4894,
        (97, 15): -6.0797,
        (97, 40): 2.6279,
    }
    for place, value in known.items():
        assert float(features[place]) == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize(
    ("samples", "complaint"),
    [
        (torch.zeros(1, round(MIN_RECORDING_S * INPUT_RATE_HZ) - 1), r"lasts 0\.50 s; give 0\.5 s to 60\.0 s"),
        (torch.zeros(1, round(MAX_RECORDING_S * INPUT_RATE_HZ) + 1), r"lasts 60\.00 s"),
        (torch.zeros(1, 0), r"lasts 0\.00 s"),
        (torch.zeros(0, INPUT_RATE_HZ), r"lasts 0\.00 s"),
        (torch.zeros(INPUT_RATE_HZ), r"shape \[channels, n\]"),
        (torch.zeros(1, INPUT_RATE_HZ, dtype=torch.int16), r"torch\.int16"),
        (torch.full((1, INPUT_RATE_HZ), math.nan), r"16000 samples .* not finite"),
    ],
)
def test_what_is_no_usable_recording_is_refused(preparer: VoicePreparer, samples: Tensor, complaint: str) -> None:
    with pytest.raises(AudioError, match=complaint):
        preparer.prepare(samples, INPUT_RATE_HZ)


def test_a_rate_of_nothing_is_refused(preparer: VoicePreparer) -> None:
    with pytest.raises(AudioError, match=r"at 0 Hz"):
        preparer.prepare(torch.zeros(1, INPUT_RATE_HZ), 0)


def test_files_that_are_not_the_models_are_refused(tmp_path: Path, models: tuple[Path, Path]) -> None:
    tokenizer, speaker = models
    broken = tmp_path / "campplus.onnx"
    broken.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointError, match=r"campplus\.onnx cannot be loaded"):
        VoicePreparer(tokenizer, broken, num_mel_bins=BINS)
    with pytest.raises(CheckpointError, match=r"missing\.onnx cannot be loaded"):
        VoicePreparer(tmp_path / "missing.onnx", speaker, num_mel_bins=BINS)
    with pytest.raises(CheckpointError, match=r"takes 1 inputs \(feats\), expected 2"):
        VoicePreparer(speaker, tokenizer, num_mel_bins=BINS)


def test_numbers_that_do_not_belong_together_are_no_voice() -> None:
    good = (torch.zeros(4, BINS), torch.zeros(192))
    VoicePrompt((1, 2), *good)
    with pytest.raises(AudioError, match=r"needs a mel \[2, bins\]"):
        VoicePrompt((1,), *good)
    with pytest.raises(AudioError, match=r"of 0 codec tokens"):
        VoicePrompt((), torch.zeros(0, BINS), good[1])
    with pytest.raises(AudioError, match=r"NaN or infinity"):
        VoicePrompt((1, 2), good[0], torch.full((192,), math.inf))
