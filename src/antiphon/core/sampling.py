"""How thinker and talker choose their tokens: settings only. The rules are in kernels/sampling.

Defaults are the reference's (REFERENCE 4.7, 8.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from antiphon.errors import ConfigError


class Draws(Enum):
    """What happens wherever the model draws: text, codec tokens, the vocoder's source noise."""

    SAMPLED = "sampled"
    MOST_LIKELY = "most_likely"
    """The likeliest text and codec token, zero noise: the same call gives the same output whatever the seed."""


@dataclass(frozen=True, slots=True)
class TextSampling:
    """top_k: at least 1. listen_top_k: 0 switches the rule off. repetition_window_tokens: ids that are remembered."""

    temperature: float = 0.7
    top_k: int = 20
    top_p: float = 0.8
    repetition_penalty: float = 1.05
    repetition_window_tokens: int = 512
    length_penalty: float = 1.1
    listen_scale: float = 1.0
    listen_top_k: int = 0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(f"the temperature must be above 0, got {self.temperature}; use greedy for the likeliest")
        if self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.repetition_penalty <= 0 or self.length_penalty <= 0:
            raise ConfigError("penalties must be above 0; 1 changes nothing")
        if self.repetition_window_tokens < 1:
            raise ConfigError(f"the repetition window must hold at least 1 id, got {self.repetition_window_tokens}")


CHAT_TEXT = TextSampling(temperature=0.7, top_k=100, top_p=0.8, repetition_penalty=1.02, length_penalty=1.0)
"""How a chat chooses its words unless somebody says otherwise (REFERENCE 14.4)."""


ALL_TOKENS = 2**31 - 1
"""More than there are."""


@dataclass(frozen=True, slots=True)
class CodecSampling:
    """repetition_window_tokens: of the present chunk, in a chat of the answer; the reference never looks further back.

    top_p, top_k: what is chosen of. A call chooses of all tokens, as the reference does (REFERENCE 8.2).
    """

    temperature: float = 0.8
    repetition_penalty: float = 1.05
    repetition_window_tokens: int = 16
    top_p: float = 1.0
    top_k: int = ALL_TOKENS

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(f"the codec temperature must be above 0, got {self.temperature}")
        if self.repetition_penalty <= 0:
            raise ConfigError(f"the codec repetition penalty must be above 0, got {self.repetition_penalty}")
        if self.repetition_window_tokens < 1:
            raise ConfigError(f"the codec repetition window holds at least 1, got {self.repetition_window_tokens}")
        if not 0 < self.top_p <= 1 or self.top_k < 1:
            raise ConfigError(f"codec top_p must be in (0, 1] and top_k at least 1, got {self.top_p} and {self.top_k}")

    @property
    def is_cut(self) -> bool:
        """Not all tokens may be chosen."""
        return self.top_p < 1 or self.top_k < ALL_TOKENS


CHAT_CODEC = CodecSampling(top_p=0.85, top_k=25)
"""How a chat's speech is chosen (REFERENCE 14.5); its first token is of all."""
