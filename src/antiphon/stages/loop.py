"""A stage as the engine sees it: typed messages in, one answer to each out, and nothing raised.

Here is what all stages have in common: a session is bound to its request before anything can fail, its messages count
exactly once and in order, its work waits for its turn, and its failure is its own. What a stage does is behind `Stage`;
where it runs is `runner`'s. Shown by tests/stages/test_loop.py.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeAlias, TypeVar, assert_never

from antiphon.core.inlet import Inlet
from antiphon.core.messages import (
    Address,
    Close,
    Done,
    Dropped,
    Failed,
    Fault,
    Interrupt,
    Open,
    Opened,
    Refused,
    Survey,
    Surveyed,
    Work,
)
from antiphon.errors import AntiphonError, InputError, InternalError

SettingsT = TypeVar("SettingsT")
SettingsT_contra = TypeVar("SettingsT_contra", contravariant=True)
WorkT = TypeVar("WorkT", bound=Work)
WorkT_contra = TypeVar("WorkT_contra", bound=Work, contravariant=True)
StateT = TypeVar("StateT")
AboutT = TypeVar("AboutT")
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)
CountsT_co = TypeVar("CountsT_co", covariant=True)
CountsT = TypeVar("CountsT")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready(Generic[AboutT]):
    """A session can take work from now on."""

    about: AboutT


@dataclass(frozen=True, slots=True)
class Part(Generic[ResultT]):
    """What a piece of work came to so far, which goes on."""

    result: ResultT


class Stage(Protocol[SettingsT_contra, WorkT_contra, StateT, AboutT, ResultT_co, CountsT_co]):
    """What one stage does for its sessions; each has at most one piece of work under way.

    An `InputError` says that the work cannot be done as it is and the session is as before; any other that the session
    must end.
    """

    def open(self, settings: SettingsT_contra) -> StateT:
        """Create a session; its first result is `Ready`. Raises: AntiphonError; nothing is held then."""

    def start(self, state: StateT, work: WorkT_contra) -> None:
        """Begin a piece of work. Raises: AntiphonError."""

    @property
    def is_idle(self) -> bool:
        """No step could do anything before the next call."""

    def step(self) -> Mapping[str, Ready[AboutT] | Part[ResultT_co] | ResultT_co | AntiphonError]:
        """One batched step for the most urgent sessions. Returns what came to its end, or so far, by session id."""

    def interrupt(self, state: StateT, epoch: int) -> None:
        """Stop the session's present answer."""

    def close(self, state: StateT) -> None:
        """Stop whatever the session does and free what it holds; idempotent."""

    def survey(self) -> CountsT_co:
        """How things stand."""


class Interruption(Enum):
    """What an interruption means for the work of a session that is under way or waits."""

    VOIDS_WORK = "voids_work"
    """It belongs to the interrupted answer."""
    KEEPS_WORK = "keeps_work"
    """It is what the caller said, and goes on."""


@dataclass(slots=True)
class _Session(Generic[StateT, WorkT]):
    """under_way: what the stage is doing; None when nothing. is_ready: it was said to be."""

    state: StateT
    inlet: Inlet = field(default_factory=Inlet)
    waiting: deque[WorkT] = field(default_factory=deque)
    under_way: WorkT | None = None
    is_ready: bool = False


Message: TypeAlias = Open[SettingsT] | WorkT | Interrupt | Close | Survey
Answer: TypeAlias = Opened[AboutT] | Done[ResultT] | Dropped | Refused | Failed | Surveyed[CountsT]


def _nothing() -> None:
    """A stage that holds nothing beside its sessions has nothing to release."""


class StageLoop(Generic[SettingsT, WorkT, StateT, AboutT, ResultT, CountsT]):
    """Owns one stage and what it holds for each session.

    release: gives back what the stage holds for no session; idempotent.
    """

    def __init__(
        self,
        stage: Stage[SettingsT, WorkT, StateT, AboutT, ResultT, CountsT],
        interruption: Interruption,
        release: Callable[[], None] = _nothing,
    ) -> None:
        self._stage = stage
        self._release = release
        self._interruption = interruption
        self._sessions: dict[str, _Session[StateT, WorkT]] = {}
        self._answers: list[Answer[AboutT, ResultT, CountsT]] = []
        self._faults: Counter[Fault] = Counter()

    @property
    def is_idle(self) -> bool:
        """No step is needed until the next message."""
        return not self._answers and self._stage.is_idle

    def close(self) -> None:
        """After the last step; idempotent."""
        self._release()

    def take(self, message: Message[SettingsT, WorkT]) -> None:
        """Obey a message, or answer why not. Never raises."""
        if isinstance(message, Survey):
            faults = tuple(self._faults.items())
            self._answers.append(Surveyed(message.ticket, len(self._sessions), faults, self._stage.survey()))
            return
        if isinstance(message, Open):
            self._open(message)
            return
        session_id = message.address.session_id if not isinstance(message, Interrupt | Close) else message.session_id
        session = self._sessions.get(session_id)
        if session is None:
            # It has failed or was closed, and whoever sent this knows or will know.
            self._faults[Fault.UNKNOWN] += 1
            return
        if isinstance(message, Close):
            self._forget(session_id)
            self._answers = [one for one in self._answers if not _is_about(one, session_id)]
        elif isinstance(message, Interrupt):
            self._interrupt(session_id, session, message.epoch)
        else:
            self._accept(session, message)

    def step(self) -> list[Answer[AboutT, ResultT, CountsT]]:
        """One step of the stage. Returns the answers that are due. Never raises."""
        try:
            results = self._stage.step()
        except Exception as error:
            logger.exception("a step failed as a whole")
            for session_id in [key for key, one in self._sessions.items() if one.under_way is not None]:
                self._fail(session_id, _internal(error))
            results = {}
        for session_id, result in results.items():
            self._end_work(session_id, self._sessions[session_id], result)
        answers, self._answers = self._answers, []
        return answers

    def _open(self, message: Open[SettingsT]) -> None:
        session_id = message.session_id
        if session_id in self._sessions:
            self._faults[Fault.REPEATED] += 1
            return

        def create() -> None:
            self._sessions[session_id] = _Session(self._stage.open(message.settings))

        self._fenced(session_id, create)

    def _accept(self, session: _Session[StateT, WorkT], work: WorkT) -> None:
        address = work.address
        if address.epoch > session.inlet.epoch:
            # The message that announces it was lost or is late.
            self._interrupt(address.session_id, session, address.epoch)
        fault = session.inlet.judge(address)
        if fault is not None:
            self._drop(address, fault)
            return
        session.waiting.append(work)
        self._start_next(address.session_id, session)

    def _interrupt(self, session_id: str, session: _Session[StateT, WorkT], epoch: int) -> None:
        if not session.inlet.enter(epoch):
            return
        match self._interruption:
            case Interruption.VOIDS_WORK:
                if session.under_way is not None:
                    session.waiting.appendleft(session.under_way)
                    session.under_way = None
                self._drop_waiting(session, Fault.STALE)
            case Interruption.KEEPS_WORK:
                pass
            case never:
                assert_never(never)
        self._fenced(session_id, lambda: self._stage.interrupt(session.state, epoch))

    def _start_next(self, session_id: str, session: _Session[StateT, WorkT]) -> None:
        while session.is_ready and session.under_way is None and session.waiting:
            work = session.under_way = session.waiting.popleft()
            try:
                self._stage.start(session.state, work)
            except InputError as error:
                self._refuse(session, work, error)
            except Exception as error:  # noqa: BLE001 - the fence: one session's failure stays its own
                self._fail(session_id, _internal(error))
                return

    def _end_work(
        self,
        session_id: str,
        session: _Session[StateT, WorkT],
        result: Ready[AboutT] | Part[ResultT] | ResultT | AntiphonError,
    ) -> None:
        if isinstance(result, Ready):
            session.is_ready = True
            self._answers.append(Opened(session_id, result.about))
        elif isinstance(result, InputError) and session.under_way is not None:
            self._refuse(session, session.under_way, result)
        elif isinstance(result, AntiphonError):
            self._fail(session_id, result)
            return
        else:
            work = session.under_way
            assert work is not None, f"{session_id} had no work under way and came to {result}"
            if isinstance(result, Part):
                self._answers.append(Done(work.address, result.result))
                return
            session.under_way = None
            self._answers.append(Done(work.address, result))
        self._start_next(session_id, session)

    def _refuse(self, session: _Session[StateT, WorkT], work: WorkT, error: AntiphonError) -> None:
        session.under_way = None
        self._answers.append(Refused(work.address, error))
        if self._interruption is Interruption.VOIDS_WORK:
            # An answer with a hole in it is not gone on with.
            session.inlet.break_off()
            self._drop_waiting(session, Fault.VOID)

    def _drop_waiting(self, session: _Session[StateT, WorkT], fault: Fault) -> None:
        for work in session.waiting:
            self._drop(work.address, fault)
        session.waiting.clear()

    def _drop(self, address: Address, fault: Fault) -> None:
        self._faults[fault] += 1
        self._answers.append(Dropped(address, fault))

    def _fenced(self, session_id: str, action: Callable[[], None]) -> None:
        """Do something for one session; what it raises is the end of that session."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the fence: one session's failure stays its own
            self._fail(session_id, _internal(error))

    def _fail(self, session_id: str, error: AntiphonError) -> None:
        self._forget(session_id)
        self._answers.append(Failed(session_id, error))

    def _forget(self, session_id: str) -> None:
        """Its state goes, also when freeing it fails; what it was asked to do is not answered any more."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        try:
            self._stage.close(session.state)
        except Exception:
            logger.exception("closing a session failed")


def _internal(error: Exception) -> AntiphonError:
    """The error itself if we raised it on purpose, else what the caller is told instead."""
    if isinstance(error, AntiphonError):
        return error
    logger.error("a session failed", exc_info=error)
    return InternalError(f"the engine failed on this session: {type(error).__name__}; others go on")


def _is_about(answer: Answer[AboutT, ResultT, CountsT], session_id: str) -> bool:
    match answer:
        case Surveyed():
            return False
        case Opened() | Failed():
            return answer.session_id == session_id
        case _:
            return answer.address.session_id == session_id
