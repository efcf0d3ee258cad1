"""An operator's settings as an engine takes them. No torch. Shown by tests/server/test_settings.py."""

from __future__ import annotations

from antiphon.config import Code2WavConfig, EngineConfig, SessionConfig, StageConfig, StagesConfig, WindowLimits
from antiphon.server.settings import ServerSettings


def engine_config(settings: ServerSettings) -> EngineConfig:
    return EngineConfig(
        stages=StagesConfig(
            thinker=StageConfig(settings.thinker_device, settings.thinker_placement),
            talker=StageConfig(settings.talker_device, settings.talker_placement),
            code2wav=StageConfig(settings.code2wav_device, settings.code2wav_placement),
        ),
        dtype=settings.dtype,
        max_calls=settings.max_calls,
        max_prompt_tokens=settings.max_prompt_tokens,
        speaking_share=settings.speaking_share,
        max_stored_prompt_bytes=settings.max_stored_prompt_bytes,
        max_stored_voice_bytes=settings.max_stored_voice_bytes,
        code2wav=Code2WavConfig(
            retention=settings.code2wav_retention,
            dtype=settings.code2wav_dtype,
            voice_s=settings.code2wav_voice_s,
            grid=settings.code2wav_grid,
            compute=settings.code2wav_compute,
            chunk_tokens=settings.code2wav_chunk_tokens,
        ),
        max_speaking_chats=settings.max_speaking_chats,
        kv_dtype=settings.kv_dtype,
    )


def window_limits(settings: ServerSettings) -> WindowLimits:
    """Of whichever mode a call chooses."""
    return WindowLimits(
        max_tokens=settings.window_max_tokens,
        high_tokens=settings.window_high_tokens,
        low_tokens=settings.window_low_tokens,
        max_units=settings.window_max_units,
        previous_max_tokens=settings.window_previous_max_tokens,
    )


def session_config(settings: ServerSettings, marker: tuple[int, ...]) -> SessionConfig:
    """A call that asks for nothing else; the engine's caches are sized for such calls.

    marker: ids in front of `previous` text. Raises: ConfigError if the window's limits contradict each other.
    """
    return SessionConfig(
        window=window_limits(settings).policy(settings.window, marker),
        slide=settings.slide,
        max_pictures=settings.max_pictures,
        max_slices=settings.max_slices,
        max_text_tokens=settings.max_text_tokens,
        keeps_inputs=settings.keeps_inputs,
    )
