"""What is measured: a model, random or from a checkpoint, on a device in a dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from antiphon.bench.environment import environment
from antiphon.bench.results import Environment
from antiphon.config import Dtype
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.source import CheckpointFolder, ModelSize, ModelSource, RandomWeights
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.runner.device import DTYPES, resolve_device
from antiphon.units import CODEC_RATE_HZ, INPUT_RATE_HZ, MEL_FRAMES_PER_CODEC_TOKEN, UNIT_SAMPLES

RANDOM = "random"
"""Weights that are no checkpoint's."""
LOUDNESS = 0.05


@dataclass(frozen=True, slots=True)
class Target:
    """description: of the model, in words."""

    source: ModelSource
    description: str
    device: torch.device
    dtype: Dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def environment(self) -> Environment:
        return environment(self.description, self.device, self.dtype.value)

    def synchronize(self) -> None:
        """Wait until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forget(self) -> None:
        """Give memory that is free back to the device, so that the next part finds it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def target(weights: str, size: ModelSize, device: str, dtype: Dtype) -> Target:
    """weights: `random`, or a checkpoint's folder or hub id; size: of random ones.

    Raises: ConfigError, CheckpointError.
    """
    on = resolve_device(device)
    if weights == RANDOM:
        return Target(RandomWeights(size), f"random weights, {size.value} size", on, dtype)
    checkpoint = open_checkpoint(weights)
    if checkpoint.is_tiny:
        torch.set_num_threads(1)  # its tensors are so small that sharing one costs more than it saves
    return Target(CheckpointFolder(checkpoint.folder), f"weights of {Path(weights).name}", on, dtype)


def random_voice(source: ModelSource, voice_s: float) -> VoicePrompt:
    """A voice of random numbers of such a length."""
    flow, generator = source.config().flow, torch.Generator().manual_seed(0)
    num_tokens = max(1, round(voice_s * CODEC_RATE_HZ))
    ids = torch.randint(flow.vocab_size, (num_tokens,), generator=generator)
    mel = torch.randn(num_tokens * MEL_FRAMES_PER_CODEC_TOKEN, flow.num_mel_bins, generator=generator)
    return VoicePrompt(tuple(ids.tolist()), mel, torch.randn(flow.speaker_size, generator=generator))


def noise_samples(num_samples: int, seed: int) -> torch.Tensor:
    """[num_samples] float32, 16 kHz."""
    return LOUDNESS * torch.randn(num_samples, generator=torch.Generator().manual_seed(seed))


def noise_second(seed: int) -> torch.Tensor:
    """[UNIT_SAMPLES] float32: what a caller says in a second."""
    return noise_samples(UNIT_SAMPLES, seed)


def noise_reference(voice_s: float) -> torch.Tensor:
    """[n] float32, 16 kHz: the voice in the prompt."""
    return noise_samples(round(voice_s * INPUT_RATE_HZ), seed=1)
