"""A stage in a process of its own, on a device of its own. Messages and answers travel pickled through a pipe.

Arrays in messages are in host memory and go through the pipe as bytes: nothing is left behind in shared memory, however
a process ends. The child builds its stage itself, so that no weights travel. Shown by tests/test_placements.py.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Generic, Protocol, TypeVar

import torch

from antiphon.errors import AntiphonError, InternalError, places
from antiphon.garbage import look_at_all_again, spare_what_is_there
from antiphon.runner.device import Precedence, on_device
from antiphon.runner.placed import Died, Loop, Stop, drive

MessageT = TypeVar("MessageT")
AnswerT = TypeVar("AnswerT")
MessageT_contra = TypeVar("MessageT_contra", contravariant=True)

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
"""A child that has not ended by then is killed."""


class Builder(Protocol[MessageT_contra, AnswerT]):
    """Picklable; makes a stage where it is called."""

    @property
    def device(self) -> torch.device: ...

    @property
    def precedence(self) -> Precedence:
        """On that device."""

    def build(self) -> Loop[MessageT_contra, AnswerT]:
        """Raises: AntiphonError."""


@dataclass(frozen=True, slots=True)
class Logged:
    """What a child has to log; it has no log of its own, and here errors are without their words."""

    logger: str
    level: int
    message: str


class Separate(Generic[MessageT, AnswerT]):
    """A stage in a process of its own."""

    def __init__(self, name: str, builder: Builder[MessageT, AnswerT], emit: Callable[[AnswerT | Died], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._theirs = theirs
        self._emit = emit
        self._is_stopping = False
        self._process = context.Process(
            target=_run,
            args=(builder, theirs, torch.get_num_threads(), logging.getLogger().level),
            name=f"antiphon {name}",
            daemon=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"antiphon {name} answers", daemon=True)

    @property
    def is_idle(self) -> bool:
        return True

    def start(self) -> None:
        self._process.start()
        self._theirs.close()
        try:
            while isinstance(first := pickle.loads(self._pipe.recv_bytes()), Logged):
                _log(first)
        except EOFError:
            first = InternalError(f"{self._process.name} ended before its stage was built")
        if isinstance(first, AntiphonError):
            self._process.join()
            raise first
        self._reader.start()

    def send(self, message: MessageT) -> None:
        try:
            self._pipe.send_bytes(pickle.dumps(message))
        except OSError:
            logger.debug("a message came too late for %s", self._process.name)  # the reader tells that it died

    def step(self) -> None:
        pass

    def stop(self) -> None:
        self._is_stopping = True
        if self._process.is_alive():
            self._send_stop()
            self._process.join(STOP_TIMEOUT_S)
            self._process.kill()
        if self._reader.is_alive():
            self._reader.join()
        self._pipe.close()

    def _send_stop(self) -> None:
        try:
            self._pipe.send_bytes(pickle.dumps(Stop()))
        except OSError:
            logger.debug("%s has ended by itself", self._process.name)

    def _read(self) -> None:
        """Hand every answer on, until the process closes its end."""
        while True:
            try:
                answer = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                break
            if isinstance(answer, Logged):
                _log(answer)
            else:
                self._emit(answer)
        if not self._is_stopping:
            self._process.join()
            self._emit(Died(f"{self._process.name} ended with status {self._process.exitcode}"))


class _PipeInbox(Generic[MessageT]):
    """The child's end of the pipe. Whoever closes the other end wants the stage to stop."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def empty(self) -> bool:
        return not self._pipe.poll()

    def get(self) -> MessageT | Stop:
        try:
            message: MessageT = pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            return Stop()
        return message


def _log(told: Logged) -> None:
    logging.getLogger(told.logger).log(told.level, "%s", told.message)


class _TellingHandler(logging.Handler):
    """Of a child: what it logs goes to whoever started it."""

    def __init__(self, tell: Callable[[object], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        lines = [record.getMessage(), *(places(error) if error is not None else ())]
        self._tell(Logged(record.name, record.levelno, "\n".join(lines)))


def _run(builder: Builder[MessageT, AnswerT], pipe: Connection, num_threads: int, log_level: int) -> None:
    """What the process does. num_threads, log_level: of torch and of the log in the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it decides when it ends
    torch.set_num_threads(num_threads)

    lock = threading.Lock()

    def tell(message: object) -> None:
        with lock:
            pipe.send_bytes(pickle.dumps(message))

    logging.getLogger().handlers = [_TellingHandler(tell)]
    logging.getLogger().setLevel(log_level)
    try:
        loop = builder.build()
    except AntiphonError as error:
        tell(error)
        return
    spare_what_is_there()
    tell(None)
    try:
        with on_device(builder.device, builder.precedence):
            drive(loop, _PipeInbox[MessageT](pipe), tell)
        loop.close()
    except Exception:
        # Not left to multiprocessing, which prints an error with all its words.
        logger.exception("the stage failed")
        raise SystemExit(1) from None
    finally:
        # Else libraries that count what is left of them at the end complain.
        look_at_all_again()
