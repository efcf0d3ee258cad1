"""What a case of an operator is, and what all cases are made with. The cases are in `kernel_cases.py`.

Bytes are those that have to move at least, each once; sizes are the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.models.minicpmo.model import ModelConfig

Launch = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sizes:
    """num_sessions: in a step. context_tokens: of each. step_tokens: of a mixed step. cached_frames: of speech."""

    num_sessions: tuple[int, ...]
    context_tokens: int
    step_tokens: int
    cached_frames: int


@dataclass(frozen=True, slots=True)
class Rival:
    """Another way to the same result."""

    name: str
    make: Callable[[], Launch]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """kernel: the operator's folder. case: in words. per, number: what it is repeated over.

    make: gives a launch on operands of its own.
    """

    kernel: str
    case: str
    per: str
    number: int
    num_bytes: int
    num_flops: int
    make: Callable[[], Launch]
    rivals: tuple[Rival, ...] = ()


@dataclass(frozen=True, slots=True)
class CaseMaker:
    """Makes cases of some operators. dtype: of thinker and talker; the vocoder is float32."""

    config: ModelConfig
    sizes: Sizes
    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers, of the model's dtype unless said."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)
