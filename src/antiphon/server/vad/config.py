"""When a turn begins and ends: the numbers of `server_vad`, decided. No pydantic past here.

Defaults are those of OpenAI's specification; `min_speech_duration_ms` is vLLM-Omni's, in name and value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from antiphon.server.events.session import ServerVad


@dataclass(frozen=True, slots=True)
class TurnConfig:
    """threshold: of the probability, 0 to 1. idle_timeout_ms: None waits for ever."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    min_speech_duration_ms: int = 96
    idle_timeout_ms: int | None = None


def turn_config(asked: ServerVad) -> TurnConfig:
    """What a client leaves out, or says null for, is the default's."""
    numbers = asked.model_dump(include=set(TurnConfig.__dataclass_fields__), exclude_none=True)
    return replace(TurnConfig(), **numbers)
