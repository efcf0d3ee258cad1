"""What the engine and its stages tell each other. Frozen, picklable, the same for threads and processes.

Into a stage: `Open`, work with an `Address`, `Interrupt`, `Close`. Out of it: one answer to each. Work goes
HeardUnit → Handoff → CodecChunk → Spoken. Arrays are opaque here and always in host memory, so that no stage waits for
another one's device. Shown by tests/core/test_messages.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from antiphon.errors import AntiphonError, InputError

HiddenT = TypeVar("HiddenT")
HeardT = TypeVar("HeardT")
SamplesT = TypeVar("SamplesT")
SettingsT = TypeVar("SettingsT")
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a message belongs.

    epoch: counts interruptions of the session. turn: counts its spoken answers.
    seq: counts the messages of this kind in the session's epoch, from 0.
    Raises: InputError if one of them is no count.
    """

    session_id: str
    epoch: int
    turn: int
    seq: int

    def __post_init__(self) -> None:
        for name, value in (("epoch", self.epoch), ("turn", self.turn), ("seq", self.seq)):
            require_count(name, value)


def require_count(name: str, value: object) -> None:
    """Raises: InputError unless value is an integer from 0 on. A boolean is none, and nothing is not 0."""
    if type(value) is not int or value < 0:
        raise InputError(f"{name} must be an integer from 0 on, got {value!r}")


class Work(Protocol):
    """What a stage does something about. deadline_s: when its audio must exist, on the engine's clock."""

    @property
    def address(self) -> Address: ...

    @property
    def deadline_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class HeardUnit(Generic[HeardT]):
    """Engine to thinker: one second of the caller. address.turn: of the present or next answer."""

    address: Address
    deadline_s: float
    heard: HeardT


@dataclass(frozen=True, slots=True)
class Retain:
    """Engine to thinker: say all that is needed to go on with the session elsewhere."""

    address: Address
    deadline_s: float


@dataclass(frozen=True, slots=True)
class GoOn:
    """Engine to thinker: decide the next piece of a chat's answer; to talker: say more of what it was handed."""

    address: Address
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Handoff(Generic[HiddenT]):
    """Thinker to talker: what to say in this unit, or in this piece of a chat's answer.

    hidden: [len(token_ids), hidden_size], the thinker's final-norm state at each token's own position.
    """

    address: Address
    deadline_s: float
    unit: int
    token_ids: tuple[int, ...]
    hidden: HiddenT
    ends_turn: bool


@dataclass(frozen=True, slots=True)
class CodecChunk:
    """Talker to code2wav.

    is_first_of_turn: code2wav speaks at once instead of waiting for a full window; never in a chat.
    goes_on: the talker has more to say of the same handoff.
    """

    address: Address
    deadline_s: float
    unit: int
    codec_tokens: tuple[int, ...]
    is_first_of_turn: bool
    ends_turn: bool
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Spoken(Generic[SamplesT]):
    """Code2wav to the engine: a chunk and its sound. samples: [n] float32, 24 kHz; n = 0 when all is held back.

    goes_on: the end of the turn follows, as a chunk of no tokens, under the same address.
    """

    chunk: CodecChunk
    samples: SamplesT
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Open(Generic[SettingsT]):
    """Create a session's state; whatever fails from here on is that session's."""

    session_id: str
    settings: SettingsT


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The session enters `epoch`: answers of older ones are void."""

    session_id: str
    epoch: int

    def __post_init__(self) -> None:
        require_count("epoch", self.epoch)


@dataclass(frozen=True, slots=True)
class Close:
    """Forget the session, wherever its work is; no answer follows."""

    session_id: str


@dataclass(frozen=True, slots=True)
class Survey:
    """Tell how things stand. ticket: comes back with the answer."""

    ticket: int


class Fault(Enum):
    """Why a message was not obeyed."""

    REPEATED = "repeated"
    """It was there before, or comes after a later one."""
    STALE = "stale"
    """Its epoch is over."""
    GAP = "gap"
    """One before it is missing; the rest of the epoch cannot be trusted."""
    VOID = "void"
    """It comes after a gap or a refusal in its epoch."""
    UNKNOWN = "unknown"
    """There is no such session."""


@dataclass(frozen=True, slots=True)
class Opened(Generic[ResultT_co]):
    """The session is ready for work. about: what the stage says about it."""

    session_id: str
    about: ResultT_co


@dataclass(frozen=True, slots=True)
class Done(Generic[ResultT_co]):
    """Work came to its end, or to a part of a result that goes on. address: of the work."""

    address: Address
    result: ResultT_co


@dataclass(frozen=True, slots=True)
class Dropped:
    """Work that nobody will do. Of an unknown session nothing is said to anybody: it is only counted."""

    address: Address
    fault: Fault


@dataclass(frozen=True, slots=True)
class Refused:
    """Work that cannot be done as it is; the session is as before."""

    address: Address
    error: AntiphonError


@dataclass(frozen=True, slots=True)
class Failed:
    """The session is over in this stage, and everything that it held there is free."""

    session_id: str
    error: AntiphonError


@dataclass(frozen=True, slots=True)
class Surveyed(Generic[ResultT_co]):
    """How things stand in a stage. faults: how often which one was met. counts: what only this kind of stage has."""

    ticket: int
    num_sessions: int
    faults: tuple[tuple[Fault, int], ...]
    counts: ResultT_co
