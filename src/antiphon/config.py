"""Settings of an engine and of a session, fully decided: no field means "work it out later".

The dataclasses of single concerns (window, sampling, loop) live in `core`; this joins them and checks them together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from antiphon.core.duplex import DuplexConfig
from antiphon.core.sampling import CodecSampling, Draws, TextSampling
from antiphon.core.window import BasicWindow, SlideMode, WindowPolicy
from antiphon.errors import ConfigError
from antiphon.models.minicpmo.prompt import DEFAULT_INSTRUCTIONS, PromptText, wrap

TRAINED_CONTEXT_TOKENS = 8192
"""MiniCPM-o 4.5 was trained to this length (REFERENCE 1.1); a window that is off ends here."""

DEFAULT_HIGH_TOKENS = 8000
DEFAULT_LOW_TOKENS = 6000
DEFAULT_MAX_UNITS = 24
DEFAULT_PREVIOUS_MAX_TOKENS = 500


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """max_calls: sessions of the kind that the engine is made for whose caches fit at once.

    max_prompt_tokens: prompts above it are refused.
    shares_prompts: calls with equal prompts use one copy; up to max_stored_prompt_bytes stay when their last user goes.
    """

    device: torch.device
    dtype: torch.dtype
    max_calls: int = 1
    max_prompt_tokens: int = 2048
    shares_prompts: bool = True
    max_stored_prompt_bytes: int = 2**30


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """max_pictures: in one second. max_slices: items that a picture may be cut into besides the view; 1 for none."""

    prompt: PromptText = field(default_factory=lambda: wrap(DEFAULT_INSTRUCTIONS))
    window: WindowPolicy = field(default_factory=lambda: BasicWindow(DEFAULT_HIGH_TOKENS, DEFAULT_LOW_TOKENS))
    slide: SlideMode = SlideMode.ROTATE_QUERY
    duplex: DuplexConfig = field(default_factory=DuplexConfig)
    text: TextSampling = field(default_factory=TextSampling)
    codec: CodecSampling = field(default_factory=CodecSampling)
    draws: Draws = Draws.SAMPLED
    seed: int = 0
    max_pictures: int = 1
    max_slices: int = 1


def check_window(window: WindowPolicy, max_unit_tokens: int, max_position_tokens: int) -> None:
    """Raises: ConfigError if the window reaches beyond the positions of the model, or holds no unit."""
    peak_tokens = window.peak_tokens(0, max_unit_tokens)
    if peak_tokens > max_position_tokens:
        raise ConfigError(
            f"a window {window} with units of up to {max_unit_tokens} tokens holds {peak_tokens} tokens and is over "
            f"the model's length of {max_position_tokens} tokens; keep less"
        )
    if window.max_prompt_tokens(max_unit_tokens, max_position_tokens) < 0:
        raise ConfigError(f"a window {window} has no room for a unit of up to {max_unit_tokens} tokens; keep more")


def resolve_device(name: str) -> torch.device:
    """Raises: ConfigError if torch has no such device here."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
