"""Settings of an engine and of a session, fully decided: no field means "work it out later".

The dataclasses of single concerns (window, sampling, loop) live in `core`; this joins them and checks them together.
No torch here, so that whoever only talks to an engine can read and write settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from antiphon.core.batch_grid import BatchGrid, LengthGrid
from antiphon.core.cache_dtype import CacheDtype
from antiphon.core.chat import AnswerConfig
from antiphon.core.duplex import DuplexConfig
from antiphon.core.sampling import CHAT_CODEC, CHAT_TEXT, CodecSampling, Draws, TextSampling
from antiphon.core.window import BasicWindow, ContextWindow, OffWindow, SlideMode, WindowPolicy
from antiphon.errors import ConfigError
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.flow_membership import Retention
from antiphon.models.minicpmo.prompt import DEFAULT_INSTRUCTIONS, PromptText, wrap

TRAINED_CONTEXT_TOKENS = 8192
"""MiniCPM-o 4.5 was trained to this length (REFERENCE 1.1); a window that is off ends here."""

DEFAULT_HIGH_TOKENS = 8000
DEFAULT_LOW_TOKENS = 6000
DEFAULT_MAX_UNITS = 24
DEFAULT_PREVIOUS_MAX_TOKENS = 500


class Dtype(Enum):
    """Of numbers on the device."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Placement(Enum):
    """Where a stage runs. What it does and is told is the same everywhere."""

    HERE = "here"
    """In whatever thread uses the engine, one step after the other: for tests and for debugging."""
    THREAD = "thread"
    """In a thread of its own."""
    PROCESS = "process"
    """In a process of its own, with its own copy of what it loads."""


@dataclass(frozen=True, slots=True)
class StageConfig:
    """device: cpu, cuda or cuda:N."""

    device: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class StagesConfig:
    """Where each stage runs."""

    thinker: StageConfig
    talker: StageConfig
    code2wav: StageConfig


def everywhere(device: str, placement: Placement = Placement.THREAD) -> StagesConfig:
    """All stages alike."""
    stage = StageConfig(device, placement)
    return StagesConfig(stage, stage, stage)


@dataclass(frozen=True, slots=True)
class Code2WavConfig:
    """What the vocoder's flow remembers, and how many sessions it serves at once.

    retention: of a turn's speech. dtype: of what is remembered. compute: of the flow's estimator, and on a GPU of the
    vocoder's filter; everything else is float32.
    voice_s: length of the voices that the memory is made for; turns with longer ones take more of it.
    grid: numbers of sessions in one solve on a GPU; on a CPU each is solved alone.
    chunk_tokens: rendered codec tokens of the chunks that solves are recorded for on a GPU.
    """

    retention: Retention = Retention.REFERENCE
    dtype: Dtype = Dtype.FLOAT32
    voice_s: float = 15.0
    grid: BatchGrid = field(default_factory=lambda: BatchGrid((1, 2, 4, 8)))
    compute: Compute = Compute.FLOAT32
    chunk_tokens: LengthGrid = field(default_factory=lambda: LengthGrid((10, 25, 28)))

    def __post_init__(self) -> None:
        if not 0 < self.voice_s < math.inf:
            raise ConfigError(
                f"voice_s must be above 0, got {self.voice_s}; give the seconds of the longest usual voice"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """dtype: of everything but flow and vocoder, which are float32.

    max_calls: sessions of the kind that the engine is made for whose caches fit at once.

    speaking_share: the part of them that may speak at the same time; who comes later waits until a turn ends.
    max_speaking_chats: chats that may speak at the same time, besides them.
    max_prompt_tokens: prompts above it are refused.
    shares_prompts: calls with equal prompts use one copy; up to max_stored_prompt_bytes stay when their last user goes.
    max_stored_voice_bytes: of conditioned voices; beyond them, those without a user go.
    kv_dtype: of the thinker's keys and values; the talker keeps its own in `dtype`.
    """

    stages: StagesConfig
    dtype: Dtype
    max_calls: int = 1
    max_prompt_tokens: int = 2048
    speaking_share: float = 1.0
    shares_prompts: bool = True
    max_stored_prompt_bytes: int = 2**30
    max_stored_voice_bytes: int = 2**30
    code2wav: Code2WavConfig = field(default_factory=Code2WavConfig)
    max_speaking_chats: int = 1
    kv_dtype: CacheDtype = CacheDtype.MODEL

    def __post_init__(self) -> None:
        if not 0 < self.speaking_share <= 1:
            raise ConfigError(f"speaking_share must be above 0 and at most 1, got {self.speaking_share}")
        if self.max_speaking_chats < 1:
            raise ConfigError(f"max_speaking_chats must be at least 1, got {self.max_speaking_chats}")

    @property
    def max_speaking_calls(self) -> int:
        return math.ceil(self.speaking_share * self.max_calls)

    @property
    def max_speaking(self) -> int:
        """Of both kinds."""
        return self.max_speaking_calls + self.max_speaking_chats


class WindowMode(Enum):
    """Which policy a window follows, by name."""

    OFF = "off"
    BASIC = "basic"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """The limits of every mode; a window has those of its own.

    max_tokens: of `off`. high_tokens, low_tokens: of `basic`. max_units, previous_max_tokens: of `context`.
    """

    max_tokens: int = TRAINED_CONTEXT_TOKENS
    high_tokens: int = DEFAULT_HIGH_TOKENS
    low_tokens: int = DEFAULT_LOW_TOKENS
    max_units: int = DEFAULT_MAX_UNITS
    previous_max_tokens: int = DEFAULT_PREVIOUS_MAX_TOKENS

    def policy(self, mode: WindowMode, marker: tuple[int, ...]) -> WindowPolicy:
        """marker: ids in front of `previous` text. Raises: ConfigError if the limits contradict each other."""
        match mode:
            case WindowMode.OFF:
                return OffWindow(self.max_tokens)
            case WindowMode.BASIC:
                return BasicWindow(self.high_tokens, self.low_tokens)
            case WindowMode.CONTEXT:
                return ContextWindow(self.max_units, self.previous_max_tokens, marker)
            case never:
                assert_never(never)


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """max_pictures: in one second. max_slices: items that a picture may be cut into besides the view; 1 for none.

    max_text_tokens: of what is typed in one second.
    keeps_inputs: the call can be moved to another worker, at the price of the embeddings of all that its window holds,
    on the host.
    script: of measurements, ids that the text draws come to, one after the other and again from the start; with none,
    as in every server, the model decides.
    """

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
    max_text_tokens: int = 64
    keeps_inputs: bool = False
    script: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """How one chat is answered. draws: of the text; its speech is always sampled."""

    answer: AnswerConfig
    text: TextSampling = CHAT_TEXT
    codec: CodecSampling = CHAT_CODEC
    draws: Draws = Draws.SAMPLED
    seed: int = 0


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
