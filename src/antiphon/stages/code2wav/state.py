"""What one session owns in the code2wav stage. Not the voice, which it only refers to.

Test: tests/stages/test_code2wav.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.core.codec_buffer import CodecBuffer
from antiphon.core.sampling import Draws
from antiphon.models.minicpmo.captured import NumRuns
from antiphon.models.minicpmo.flow_cache import SpeechState, Voice
from antiphon.models.minicpmo.vocoder import TurnState
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.code2wav.voices import VoiceCounts


@dataclass(frozen=True, slots=True, eq=False)
class Code2WavSession:
    """Settings of a session. seed: of the noise in its vocoder's source."""

    session_id: str
    voice: VoicePrompt
    draws: Draws
    seed: int


@dataclass(slots=True, eq=False)
class Code2WavState:
    """Owned by one session, written by the `Renderer` only, between its calls.

    num_reserved_frames: of the arena for its turn; 0 between turns.
    """

    voice: Voice
    buffer: CodecBuffer
    speech: SpeechState
    vocoder: TurnState
    num_reserved_frames: int = 0


@dataclass(slots=True, eq=False)
class Caller:
    """Owned by one session, written by the `Code2WavStage`. state: None until its voice is there."""

    session: Code2WavSession
    state: Code2WavState | None = None


@dataclass(frozen=True, slots=True)
class Code2WavCounts:
    """num_due: chunks that wait; num_waiting: those of them that find no room, for too many speak.

    num_speaking: sessions in a turn, which hold room for it.
    num_runs: of flow and vocoder; what is launched on a GPU was not recorded at start.
    """

    num_due: int
    num_waiting: int
    num_speaking: int
    voices: VoiceCounts
    num_runs: NumRuns
