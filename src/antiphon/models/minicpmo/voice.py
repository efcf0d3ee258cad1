"""A recording to a voice's prompt: codec tokens and speaker embedding by the two ONNX models, and the prompt's mel.

Source: REFERENCE 9.1 and 2.9. Resampling is soxr's, not torchaudio's. Runs on the host, once per voice. Not the
conditioning of the flow: `MelSynthesizer.build_voice`. Test: tests/models/test_voice.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import kaldi_native_fbank as knf
import numpy as np
import onnxruntime as ort
import soxr
import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.errors import AudioError, CheckpointError
from antiphon.models.minicpmo.audio_features import Floor, MelExtractor
from antiphon.models.minicpmo.voice_mel import PromptMel
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.units import INPUT_RATE_HZ, MEL_FRAMES_PER_CODEC_TOKEN, OUTPUT_RATE_HZ

MIN_RECORDING_S = 0.5
"""Shorter than this the speaker model averages over too few frames to tell speakers apart."""

MAX_RECORDING_S = 60.0
"""Our bound on memory: a voice keeps 1.3 MB of float32 per mel frame in the released model with 10 Euler steps, 66 MB
a second. The reference ends at 16.9 s, where its scratch is full (REFERENCE 9.9); distances in the conformer, which it
tabulates up to 5000, are computed here. Later chunks of a turn read little more than the prompt's last two seconds."""

TOKEN_MEL_BINS = 128
SPEAKER_MEL_BINS = 80

WINDOW_FRAMES = 3000
STRIDE_FRAMES = 2600
CUT_TOKENS = 50
"""Longer recordings are tokenised in windows of 30 s every 26 s; both sides of an overlap lose half of it."""


class VoicePreparer:
    """Holds the models and tables. Stateless, so any thread may use it."""

    def __init__(self, speech_tokenizer: Path, speaker_encoder: Path, num_mel_bins: int) -> None:
        """The checkpoint's `speech_tokenizer_v2_25hz.onnx` and `campplus.onnx`; num_mel_bins: of the flow.

        Raises: CheckpointError if a file is no such model.
        """
        self._speech_tokenizer = _session(speech_tokenizer, num_inputs=2)
        self._speaker_encoder = _session(speaker_encoder, num_inputs=1)
        self._token_mel = MelExtractor(TOKEN_MEL_BINS)
        self._prompt_mel = PromptMel(num_mel_bins)

    def prepare(self, samples: Tensor, rate_hz: int) -> VoicePrompt:
        """A voice's prompt from a recording of one speaker.

        samples: [channels, n] float32 in -1..1, of any rate. As in the reference, tokens and speaker come from the
                 first channel, the mel from the mean of all.
        Raises: AudioError if the recording is too short or too long, not finite, or no such tensor.
        """
        _check_recording(samples, rate_hz)
        speech = _resampled(samples[0], rate_hz, INPUT_RATE_HZ)
        tokens = self.speech_tokens(self._token_mel.mel(speech, Floor.DYNAMIC))
        mel = self._prompt_mel.frames(_resampled(samples.mean(dim=0), rate_hz, OUTPUT_RATE_HZ))
        return VoicePrompt(tokens, _fitted(mel, len(tokens) * MEL_FRAMES_PER_CODEC_TOKEN), self.speaker(speech))

    def speech_tokens(self, mel: Tensor) -> tuple[int, ...]:
        """mel: [128, T] float32, 100 frames a second -> one token for four frames."""
        tokens: list[int] = []
        starts = range(0, max(1, mel.shape[1] - (WINDOW_FRAMES - STRIDE_FRAMES)), STRIDE_FRAMES)
        for start in starts:
            window = mel[:, start : start + WINDOW_FRAMES].numpy()[None]
            length = np.array([window.shape[2]], dtype=np.int32)
            codes = self._speech_tokenizer(window, length)[0].tolist()
            is_first, is_last = start == starts[0], start == starts[-1]
            tokens += codes[0 if is_first else CUT_TOKENS : len(codes) if is_last else -CUT_TOKENS]
        return tuple(tokens)

    def speaker(self, speech: Tensor) -> Tensor:
        """speech: [n] float32, 16 kHz -> [S] float32."""
        features = speaker_features(speech)
        return torch.from_numpy(self._speaker_encoder(features.numpy()[None])[0])


def speaker_features(speech: Tensor) -> Tensor:
    """Kaldi's log filter banks, without dither, less their mean over time.

    speech: [n] float32, 16 kHz, in -1..1 -> [T, 80] float32, 100 frames a second.
    """
    options = knf.FbankOptions()
    options.frame_opts.samp_freq = INPUT_RATE_HZ
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = SPEAKER_MEL_BINS
    bank = knf.OnlineFbank(options)
    bank.accept_waveform(INPUT_RATE_HZ, speech.numpy())
    bank.input_finished()
    features = torch.from_numpy(np.stack([bank.get_frame(frame) for frame in range(bank.num_frames_ready)]))
    return features - features.mean(dim=0)


def _session(path: Path, num_inputs: int) -> Callable[..., np.ndarray]:
    """The model as a function of its inputs in order, to its first output."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # sessions that speak need the other cores
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded as an ONNX model: {error}; fetch the file again") from error
    names = [one.name for one in session.get_inputs()]
    if len(names) != num_inputs:
        raise CheckpointError(f"{path} takes {len(names)} inputs ({', '.join(names)}), expected {num_inputs}")

    def call(*inputs: np.ndarray) -> np.ndarray:
        output: np.ndarray = session.run(None, dict(zip(names, inputs, strict=True)))[0]
        return output

    return call


def _check_recording(samples: Tensor, rate_hz: int) -> None:
    if samples.dim() != 2 or samples.dtype != torch.float32 or rate_hz <= 0:
        raise AudioError(
            f"a voice recording is {samples.dtype} {tuple(samples.shape)} at {rate_hz} Hz; "
            "give float32 samples of shape [channels, n] and their rate"
        )
    length_s = samples.shape[1] / rate_hz if samples.shape[0] else 0.0
    if not MIN_RECORDING_S <= length_s <= MAX_RECORDING_S:
        raise AudioError(
            f"a voice recording lasts {length_s:.2f} s; give {MIN_RECORDING_S} s to {MAX_RECORDING_S} s, "
            "best 5 to 15 s of clean speech"
        )
    if not samples.isfinite().all():
        raise AudioError(f"{int((~samples.isfinite()).sum())} samples of the voice recording are not finite numbers")


def _resampled(samples: Tensor, from_hz: int, to_hz: int) -> Tensor:
    """samples: [n] float32 -> [m] float32."""
    return torch.from_numpy(soxr.resample(samples.numpy(), from_hz, to_hz, quality="VHQ"))


def _fitted(mel: Tensor, num_frames: int) -> Tensor:
    """Cut, or filled with the last frame. mel: [T, M] float32 -> [num_frames, M]."""
    missing = max(0, num_frames - len(mel))
    return F.pad(mel.T[None], (0, missing), mode="replicate")[0].T[:num_frames].contiguous()
