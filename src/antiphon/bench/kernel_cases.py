"""The cases of every operator. Shown by tests/bench/test_kernels.py, which finds an operator that has none."""

from __future__ import annotations

import torch

from antiphon.bench.decoder_kernels import DecoderKernels
from antiphon.bench.kernel_case import KernelCase, Sizes
from antiphon.bench.sound_kernels import SoundKernels
from antiphon.models.minicpmo.model import ModelConfig


def kernel_cases(config: ModelConfig, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[KernelCase, ...]:
    """dtype: of thinker and talker; the vocoder is float32."""
    makers = (DecoderKernels(config, sizes, device, dtype), SoundKernels(config, sizes, device, dtype))
    return tuple(case for maker in makers for case in maker.cases())
