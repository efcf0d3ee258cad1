"""What does it cost in sound if the vocoder computes or remembers in fewer bits? A whole turn against float32.

Distances are root mean squares over mel bands of 20 log10 of magnitudes, their mean over frames. The samples' ratio to
their error is also printed, though it tells little of 1.0.5: a pitch that differs in the last bits shifts the phase of
all that follows, which nobody hears. As a command: `error.py`. Shown by tests/bench/test_vocoder_error.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.config import Dtype
from antiphon.core.codec_buffer import CHUNK_TOKENS
from antiphon.models.minicpmo.captured import GraphRecorder
from antiphon.models.minicpmo.flow import NUM_FLOW_STEPS, draw_noise
from antiphon.models.minicpmo.flow_cache import FlowShape, SpeechState
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.flow_inputs import FlowRow
from antiphon.models.minicpmo.flow_membership import Retention
from antiphon.models.minicpmo.model import Model
from antiphon.models.minicpmo.speech_arena import ArenaSize, SpeechArena
from antiphon.models.minicpmo.vocoder import NoNoise, VocoderRow
from antiphon.models.minicpmo.voice_mel import PromptMel
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.runner.device import DTYPES
from antiphon.units import CODEC_RATE_HZ, MEL_FRAMES_PER_CODEC_TOKEN

_DB_PER_NATURAL_LOG = 20 / math.log(10)
_VOICE_S = 6


@dataclass(frozen=True, slots=True)
class Precision:
    """compute: as `Code2WavConfig.compute`. kept_in: as its dtype."""

    compute: Compute
    kept_in: Dtype


EXACT = Precision(Compute.FLOAT32, Dtype.FLOAT32)
PRECISIONS = (
    EXACT,
    Precision(Compute.FLOAT32, Dtype.BFLOAT16),
    Precision(Compute.TF32, Dtype.FLOAT32),
    Precision(Compute.BFLOAT16, Dtype.FLOAT32),
    Precision(Compute.BFLOAT16, Dtype.BFLOAT16),
)


@dataclass(frozen=True, slots=True)
class VocoderError:
    """Against float32, over a whole turn.

    mel_db:        distance of the flow's mel, from which the sound is made
    sound_db:      distance of the mel of the samples, what a listener can tell
    samples_to_error_db: power of the samples over that of their difference
    filter_to_error_db:  the same of the vocoder alone, given the mel of float32
    """

    precision: Precision
    mel_db: float
    sound_db: float
    samples_to_error_db: float
    filter_to_error_db: float


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """mels: [1, T, M] float32 of each chunk. samples: [n] float32, also of the vocoder given other mels."""

    mels: tuple[Tensor, ...]
    samples: Tensor

    @property
    def mel(self) -> Tensor:
        return torch.cat(self.mels, dim=1)[0]


def vocoder_errors(
    model: Model, device: torch.device, num_chunks: int, precisions: Sequence[Precision]
) -> Iterator[VocoderError]:
    """model: with the networks of flow and vocoder on the device. num_chunks: of a second each, then a shorter one."""
    with torch.inference_mode():
        exact = _turn(model, device, num_chunks, EXACT, ())
        for precision in precisions:
            other = _turn(model, device, num_chunks, precision, ())
            filtered = _turn(model, device, num_chunks, precision, exact.mels)
            yield VocoderError(
                precision,
                mel_db=_distance_db(exact.mel, other.mel),
                sound_db=_distance_db(*(_mel_of(turn.samples) for turn in (exact, other))),
                samples_to_error_db=_ratio_db(exact.samples, other.samples),
                filter_to_error_db=_ratio_db(exact.samples, filtered.samples),
            )


def _turn(model: Model, device: torch.device, num_chunks: int, precision: Precision, given: Sequence[Tensor]) -> _Turn:
    """given: the mels that the vocoder gets instead of the flow's, if there are any."""
    config = model.config.flow
    generator = torch.Generator().manual_seed(0)
    num_voice_tokens = _VOICE_S * CODEC_RATE_HZ
    voice_frames = num_voice_tokens * MEL_FRAMES_PER_CODEC_TOKEN
    size = ArenaSize.for_turns(Retention.REFERENCE, voice_frames, max_speaking=1, largest_batch=1)
    arena = SpeechArena(FlowShape(config, NUM_FLOW_STEPS), Retention.REFERENCE, size, DTYPES[precision.kept_in], device)
    synthesizer = model.synthesizer(draw_noise(config.num_mel_bins, 0, device), arena, precision.compute)
    vocoder = model.vocoder(precision.compute)
    if device.type == "cuda":
        recorder = GraphRecorder.on(device)
        sizes = (1,)
        for _ in synthesizer.capture(sizes, (CHUNK_TOKENS,), voice_frames, recorder):
            pass
        for _ in vocoder.capture(sizes, (CHUNK_TOKENS * MEL_FRAMES_PER_CODEC_TOKEN,), recorder):
            pass

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(torch.randint(config.vocab_size, (number,), generator=generator).tolist())

    said = VoicePrompt(
        tokens(num_voice_tokens),
        torch.randn(voice_frames, config.num_mel_bins, generator=generator),
        torch.randn(config.speaker_size, generator=generator),
    )
    voice = synthesizer.build_voice(said)
    spoken, lookahead = tokens(num_chunks * CHUNK_TOKENS + CHUNK_TOKENS // 2), synthesizer.lookahead_tokens
    speech, state = SpeechState.at_turn_start(voice), vocoder.at_turn_start(NoNoise(device))
    mels, pieces = [], []
    for number in range(num_chunks + 1):
        start, is_last = number * CHUNK_TOKENS, number == num_chunks
        window = spoken[start:] if is_last else spoken[start : start + CHUNK_TOKENS + lookahead]
        before = speech
        ((mel, speech),) = synthesizer.speak([FlowRow(window, voice, before, is_last)])
        arena.keep_only(speech, [before])
        mels.append(mel)
        heard = given[number] if given else mel
        ((samples, state),) = vocoder.speak([VocoderRow(heard.mT, state, is_last)])
        pieces.append(samples[0])
    return _Turn(tuple(mels), torch.cat(pieces))


def _mel_of(samples: Tensor) -> Tensor:
    """[T, 80] float32, natural logarithms."""
    return PromptMel(80).frames(samples.cpu())


def _distance_db(one: Tensor, other: Tensor) -> float:
    """one, other: [T, M] float32, natural logarithms."""
    return float((one - other).square().mean(dim=1).sqrt().mean()) * _DB_PER_NATURAL_LOG


def _ratio_db(exact: Tensor, other: Tensor) -> float:
    """Infinite where nothing differs."""
    error = float((exact - other).double().square().sum())
    return 10 * math.log10(float(exact.double().square().sum()) / error) if error else math.inf
