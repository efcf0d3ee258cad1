"""What one session owns in the code2wav stage. Not the voice, which it only refers to.

Test: tests/stages/test_code2wav.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.core.codec_buffer import CodecBuffer
from antiphon.core.sampling import Draws
from antiphon.models.minicpmo.flow_cache import SpeechState, Voice
from antiphon.models.minicpmo.vocoder import TurnState
from antiphon.models.minicpmo.voice_prompt import VoicePrompt


@dataclass(frozen=True, slots=True, eq=False)
class Code2WavSession:
    """Settings of a session. seed: of the noise in its vocoder's source."""

    session_id: str
    voice: VoicePrompt
    draws: Draws
    seed: int


@dataclass(slots=True, eq=False)
class Code2WavState:
    """Owned by one session, written by the `Renderer` only, between its calls. Dropping it frees everything."""

    voice: Voice
    buffer: CodecBuffer
    speech: SpeechState
    vocoder: TurnState


@dataclass(frozen=True, slots=True)
class Code2WavCounts:
    """num_due: chunks that wait. num_voices, voice_bytes: kept for whoever speaks with them next."""

    num_due: int
    num_voices: int
    voice_bytes: int
