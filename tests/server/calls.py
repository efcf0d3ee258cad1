"""What happens in a call, written down; and how an engine may stand."""

from __future__ import annotations

from antiphon.core.events import (
    AnswerGrew,
    Event,
    InputRefused,
    SessionEnded,
    SessionOpened,
    SpeechLost,
    SpeechQueued,
    TurnEnded,
    TurnInterrupted,
    TurnStarted,
    TurnText,
    UnitDecided,
    UnitFinished,
    WindowSlid,
)
from antiphon.core.messages import Fault, Surveyed
from antiphon.core.prompts import PromptCounts
from antiphon.counts import EngineCounts
from antiphon.models.minicpmo.captured import NumRuns
from antiphon.stages.code2wav.state import Code2WavCounts
from antiphon.stages.code2wav.voices import VoiceCounts
from antiphon.stages.talker.state import TalkerCounts
from antiphon.stages.thinker.state import ThinkerCounts
from antiphon.units import INPUT_RATE_HZ, OUTPUT_RATE_HZ

SECRET = "my mother's maiden name"
SECRET_IDS = (90_210, 90_211)
SECOND_OUT = OUTPUT_RATE_HZ


def decided(unit: int, *, is_listen: bool) -> UnitDecided:
    said = (TurnText(0, SECRET, ends_turn=False),)
    return UnitDecided(unit, unit + 1.0, is_listen, said, SECRET_IDS, 100, 7, unit + 1)


def queued(turn: int, unit: int, num_samples: int = SECOND_OUT) -> SpeechQueued:
    return SpeechQueued(turn, unit, unit + 1.0, unit + 1.0, 25, num_samples)


OPENED = SessionOpened("call 1", 30, 500, is_prompt_hit=False, prompt_ms=250.0)
ENDED = SessionEnded(6.0, "completed", f"the caller said {SECRET}")

CALL: tuple[Event, ...] = (
    OPENED,
    decided(0, is_listen=True),
    UnitFinished(0, 1.0, 100.0, 0.0, 0.0),
    decided(1, is_listen=False),
    TurnStarted(1, 1, 2.0),
    UnitFinished(1, 2.0, 200.0, 100.0, 0.0),
    decided(2, is_listen=False),
    queued(1, 2),
    UnitFinished(2, 3.0, 300.0, 150.0, 50.0),
    WindowSlid(2, 3.0, (0, 1), 40, 60, SECRET_IDS),
    TurnEnded(1, 2, 3.0),
    decided(3, is_listen=False),
    TurnStarted(2, 3, 4.0),
    queued(2, 3),
    UnitFinished(3, 4.0, 300.0, 150.0, 50.0),
    TurnInterrupted(2, 1, 4.0, 0, SECOND_OUT // 2),
    TurnStarted(3, 4, 5.0),
    SpeechLost(3, 5.0, f"lost: {SECRET}"),
    InputRefused(5.0, INPUT_RATE_HZ, "invalid_audio", f"no sound: {SECRET}"),
    ENDED,
)

CHAT: tuple[Event, ...] = (
    SessionOpened("chat 1", 40, 500, is_prompt_hit=False, prompt_ms=50.0),
    AnswerGrew(SECRET, 10, ""),
    queued(0, 0, SECOND_OUT // 2),
    AnswerGrew(SECRET, 13, "stop"),
    ENDED,
)


def counts(num_calls: int) -> EngineCounts:
    """Of an engine with so many calls."""
    prompts = PromptCounts(num_hits=5, num_misses=2, num_evictions=1, num_blocks=3)
    thinker = ThinkerCounts(
        prompts, num_blocks=100, num_free_blocks=60, num_unreserved_blocks=40, block_bytes=1000, num_runs=NumRuns(30, 1)
    )
    voices = VoiceCounts(
        num_hits=7, num_misses=3, num_evictions=1, num_failures=1, num_voices=1, num_building=1, num_bytes=66
    )
    talker = TalkerCounts(num_waiting=1, num_rooms=2, num_runs=NumRuns(20, 0))
    code2wav = Code2WavCounts(num_due=4, num_waiting=2, num_speaking=3, voices=voices, num_runs=NumRuns(8, 2))
    return EngineCounts(
        Surveyed(1, num_calls, ((Fault.GAP, 2),), thinker),
        Surveyed(1, num_calls, (), talker),
        Surveyed(1, num_calls, (), code2wav),
    )
