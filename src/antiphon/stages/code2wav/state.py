"""What one session owns in the code2wav stage. Not the voice, which it only refers to.

Test: tests/stages/test_code2wav.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.core.codec_buffer import CodecBuffer
from antiphon.models.minicpmo.flow_cache import SpeechState, Voice
from antiphon.models.minicpmo.vocoder import SourceNoise, VocoderState


@dataclass(slots=True, eq=False)
class Code2WavState:
    """Owned by one session, written by the stage only, between its calls. Dropping it frees everything."""

    voice: Voice
    noise: SourceNoise
    buffer: CodecBuffer
    speech: SpeechState
    vocoder: VocoderState
