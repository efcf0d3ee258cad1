"""A stage in its place: messages are sent to it, and its answers come back, whichever place that is.

`Here` steps when it is told to; `Threaded` steps by itself, as does a process (`process.py`). All of them drive the
same loop with the same messages. Shown by tests/runner/test_placed.py.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

import torch

from antiphon.runner.device import Precedence, on_device

MessageT = TypeVar("MessageT")
MessageT_co = TypeVar("MessageT_co", covariant=True)
MessageT_contra = TypeVar("MessageT_contra", contravariant=True)
AnswerT = TypeVar("AnswerT")

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 5e-4
"""For which a thread keeps the interpreter while others want it. Python's 5 ms are as long as a step of the thinker:
a stage that has read what its last step drew waited for it, and the device for the stage. With 96 calls and more a unit
was some percent sooner decided, with 32 no sooner (docs/numbers.md)."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The last message to a stage."""


@dataclass(frozen=True, slots=True)
class Died:
    """The last answer of a stage that failed as a whole: nothing that was asked of it will be answered."""

    reason: str


class Loop(Protocol[MessageT_contra, AnswerT]):
    """What a place drives: `antiphon.stages.loop.StageLoop`."""

    @property
    def is_idle(self) -> bool: ...

    def take(self, message: MessageT_contra) -> None: ...

    def step(self) -> list[AnswerT]: ...

    def close(self) -> None:
        """Nothing else is asked of it afterwards; idempotent."""


class Inbox(Protocol[MessageT_co]):
    """Where a driven loop's messages come from. get: the next one, waiting for it."""

    def empty(self) -> bool: ...

    def get(self) -> MessageT_co: ...


class Placed(Protocol[MessageT_contra]):
    """A stage in its place. Used by one thread; answers go to the `emit` that it was made with."""

    @property
    def is_idle(self) -> bool:
        """It does not need `step`: it has nothing to do, or steps by itself."""

    def start(self) -> None:
        """Raises: AntiphonError if the stage cannot be made there."""

    def send(self, message: MessageT_contra) -> None: ...

    def step(self) -> None: ...

    def stop(self) -> None:
        """Wait for its end; idempotent."""


class Here(Generic[MessageT, AnswerT]):
    """A stage in the thread that uses it."""

    def __init__(self, loop: Loop[MessageT, AnswerT], emit: Callable[[AnswerT | Died], None]) -> None:
        self._loop = loop
        self._emit = emit

    @property
    def is_idle(self) -> bool:
        return self._loop.is_idle

    def start(self) -> None:
        pass

    def send(self, message: MessageT) -> None:
        with torch.inference_mode():
            self._loop.take(message)

    def step(self) -> None:
        with torch.inference_mode():
            for answer in self._loop.step():
                self._emit(answer)

    def stop(self) -> None:
        self._loop.close()


class Threaded(Generic[MessageT, AnswerT]):
    """A stage in a thread of its own. device: on which it runs. precedence: there."""

    def __init__(
        self,
        name: str,
        loop: Loop[MessageT, AnswerT],
        device: torch.device,
        precedence: Precedence,
        emit: Callable[[AnswerT | Died], None],
    ) -> None:
        self._loop = loop
        self._device = device
        self._precedence = precedence
        self._emit = emit
        self._inbox: SimpleQueue[MessageT | Stop] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"antiphon {name}", daemon=True)

    @property
    def is_idle(self) -> bool:
        return True

    def start(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self._thread.start()

    def send(self, message: MessageT) -> None:
        self._inbox.put(message)

    def step(self) -> None:
        pass

    def stop(self) -> None:
        if self._thread.is_alive():
            self._inbox.put(Stop())
            self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        try:
            with on_device(self._device, self._precedence):
                drive(self._loop, self._inbox, self._emit)
        except Exception as error:
            logger.exception("the stage of thread %s failed", self._thread.name)
            self._emit(Died(f"{type(error).__name__}: {error}"))


def drive(loop: Loop[MessageT, AnswerT], inbox: Inbox[MessageT | Stop], emit: Callable[[AnswerT], None]) -> None:
    """Take what has come in, step, tell what came of it, until `Stop`; waits only while there is nothing to do."""
    while True:
        while loop.is_idle or not inbox.empty():
            message = inbox.get()
            if isinstance(message, Stop):
                return
            loop.take(message)
        for answer in loop.step():
            emit(answer)
