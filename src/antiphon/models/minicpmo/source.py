"""Where networks and tokenizer come from: a checkpoint's folder, or random numbers of a size.

A source is small and picklable, so that a stage in a process of its own loads for itself. Shown by
tests/models/test_random_weights.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol, assert_never

import torch

from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.model import Model, ModelConfig, Section, build_model, filled_model, load_model
from antiphon.models.minicpmo.model import model_config as config_of
from antiphon.models.minicpmo.random_weights import random_stores
from antiphon.models.minicpmo.released import RELEASED
from antiphon.models.minicpmo.tiny import tiny_config, tiny_tokenizer
from antiphon.models.minicpmo.tokens import TextTokenizer, load_tokenizer


class ModelSource(Protocol):
    """Gives what a stage is made of. All raise: CheckpointError."""

    def config(self) -> ModelConfig: ...

    def load(self, section: Section, device: torch.device, dtype: torch.dtype) -> Model:
        """The networks of one section; the others stay empty. dtype: of everything but flow and vocoder."""

    def tokenizer(self) -> TextTokenizer: ...


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A checkpoint in the official layout."""

    folder: Path

    def config(self) -> ModelConfig:
        return config_of(open_checkpoint(self.folder))

    def load(self, section: Section, device: torch.device, dtype: torch.dtype) -> Model:
        return load_model(open_checkpoint(self.folder), {section: device}, dtype)

    def tokenizer(self) -> TextTokenizer:
        return load_tokenizer(self.folder)


class ModelSize(Enum):
    """Dimensions by name."""

    FULL = "full"
    """Those of the released model."""
    TINY = "tiny"
    """Those of the tiny checkpoint."""


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A model of a size without any file. Its tokenizer is the tiny one's, whose ids all sizes have."""

    size: ModelSize

    def config(self) -> ModelConfig:
        match self.size:
            case ModelSize.FULL:
                return RELEASED
            case ModelSize.TINY:
                return tiny_config()
            case never:
                assert_never(never)

    def load(self, section: Section, device: torch.device, dtype: torch.dtype) -> Model:
        config = self.config()
        return filled_model(config, random_stores(build_model(config).parts()), {section: device}, dtype)

    def tokenizer(self) -> TextTokenizer:
        return tiny_tokenizer()
