"""What happened in a call, for whoever watches it. Facts only: no tensors, no audio.

Times in seconds of the call's input (`at_s`), or in milliseconds of computing (`*_ms`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """is_prompt_hit: another call's prompt could be used. prompt_ms: opening took, the prompt's computing included."""

    session_id: str
    num_prompt_tokens: int
    max_context_tokens: int
    is_prompt_hit: bool
    prompt_ms: float


@dataclass(frozen=True, slots=True)
class TurnText:
    """Words of one turn in one unit. text: what can be shown of them so far, whole characters only."""

    turn: int
    text: str
    ends_turn: bool


@dataclass(frozen=True, slots=True)
class UnitDecided:
    """One second was heard and decided. The context's numbers are after its close and slide.

    said: by turn, in order; more than one if a turn ends and the next begins within the second.
    """

    unit: int
    at_s: float
    is_listen: bool
    said: tuple[TurnText, ...]
    token_ids: tuple[int, ...]
    num_context_tokens: int
    num_context_blocks: int
    num_retained_units: int


@dataclass(frozen=True, slots=True)
class UnitFinished:
    """Nothing of the unit is on its way any more. *_ms: as of `StageTimes`."""

    unit: int
    at_s: float
    thinker_ms: float
    talker_ms: float
    code2wav_ms: float


@dataclass(frozen=True, slots=True)
class WindowSlid:
    """previous_ids: the ids of dropped words that the context keeps, marker included."""

    unit: int
    at_s: float
    dropped_units: tuple[int, ...]
    num_dropped_tokens: int
    num_context_tokens: int
    previous_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TurnStarted:
    turn: int
    unit: int
    at_s: float


@dataclass(frozen=True, slots=True)
class TurnEnded:
    turn: int
    unit: int
    at_s: float


@dataclass(frozen=True, slots=True)
class SpeechQueued:
    """Speech became available at `at_s` and plays from `start_s`, after what was queued before."""

    turn: int
    unit: int
    at_s: float
    start_s: float
    num_codec_tokens: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class TurnInterrupted:
    """The answer was stopped from outside.

    num_heard_samples: of the turn's speech, what had been played by then, by the playback clock.
    num_void_samples: queued speech that nobody will hear.
    """

    turn: int
    epoch: int
    at_s: float
    num_heard_samples: int
    num_void_samples: int


@dataclass(frozen=True, slots=True)
class SpeechLost:
    """Part of an answer got lost on its way through the engine; the answer is over, the call goes on."""

    turn: int
    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """From here on the call goes on under the settings that were asked for last, with the past that their window holds.

    num_context_tokens: of that past and the new prompt. took_ms: that it took, opening included.
    """

    at_s: float
    num_context_tokens: int
    max_context_tokens: int
    took_ms: float


@dataclass(frozen=True, slots=True)
class ChangeRefused:
    """The settings that were asked for cannot be had; the call goes on under those that it has."""

    at_s: float
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class AnswerGrew:
    """A piece of a chat's answer was decided.

    text: what can be shown more of it. num_tokens: of the answer so far.
    end: why it is over, by name; empty if it goes on.
    """

    text: str
    num_tokens: int
    end: str


@dataclass(frozen=True, slots=True)
class InputRefused:
    """Something that the caller sent could not be used or was lost; the call goes on without it.

    num_samples: sound that will not be heard.
    """

    at_s: float
    num_samples: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """code: `completed`, or the code of the error that ended the session."""

    at_s: float
    code: str
    message: str


Event = (
    SessionOpened
    | UnitDecided
    | UnitFinished
    | WindowSlid
    | TurnStarted
    | TurnEnded
    | TurnInterrupted
    | SpeechQueued
    | SpeechLost
    | SettingsChanged
    | ChangeRefused
    | AnswerGrew
    | InputRefused
    | SessionEnded
)
