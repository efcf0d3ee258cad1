"""Live calls: an engine in a thread of its own, and sessions that talk to it from any other thread.

A session sends sound, pictures and interruptions as they come and reads what happens; units are cut here, and a unit
starts as soon as its second is complete, in whatever step the engine is. Not a server: no network, no pacing.
Shown by tests/test_live.py.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from types import TracebackType

import torch
from PIL import Image
from torch import Tensor

from antiphon.config import SessionConfig
from antiphon.core.events import Event, InputRefused, SessionEnded, SpeechQueued
from antiphon.engine import Call, Engine, Speech, UnitResult
from antiphon.errors import AntiphonError, AudioError, ImageError
from antiphon.models.minicpmo.audio_features import check_samples
from antiphon.models.minicpmo.flow_cache import Voice
from antiphon.stages.thinker.state import UnitInput
from antiphon.units import INPUT_RATE_HZ, UNIT_S, UNIT_SAMPLES

MAX_WAITING_SAMPLES = 10 * INPUT_RATE_HZ
"""Sound that may wait for the engine; who sends faster than speech is told so."""

_STOPPED = ("engine_stopped", "the engine was stopped")

Happening = Event | Speech
"""What a session reads: events, and speech with its samples."""


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    session: LiveSession
    config: SessionConfig
    reference: Tensor
    voice: Voice


@dataclass(frozen=True, slots=True, eq=False)
class _Sound:
    session: LiveSession
    samples: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Picture:
    session: LiveSession
    image: Image.Image


@dataclass(frozen=True, slots=True, eq=False)
class _Interrupt:
    session: LiveSession


@dataclass(frozen=True, slots=True, eq=False)
class _Close:
    session: LiveSession


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = _Open | _Sound | _Picture | _Interrupt | _Close | _Stop


class LiveSession:
    """One call, for its caller's threads. Everything sent is taken in order; `happenings` ends with SessionEnded."""

    def __init__(self, session_id: str, inbox: SimpleQueue[_Command]) -> None:
        self.session_id = session_id
        self._inbox = inbox
        self._happened: SimpleQueue[Happening] = SimpleQueue()
        self._waiting_lock = threading.Lock()
        self._waiting_samples = 0

    def send_audio(self, samples: Tensor) -> None:
        """samples: [n] float32 on the host, 16 kHz, any n.

        Raises: AudioError if they are not finite or no such tensor, or if more waits than the engine has taken in
        `MAX_WAITING_SAMPLES`; nothing is sent then.
        """
        check_samples(samples)
        with self._waiting_lock:
            if self._waiting_samples + samples.numel() > MAX_WAITING_SAMPLES:
                raise AudioError(
                    f"{self._waiting_samples} samples wait and {samples.numel()} more came; the limit is "
                    f"{MAX_WAITING_SAMPLES}: send audio no faster than it is spoken"
                )
            self._waiting_samples += samples.numel()
        self._inbox.put(_Sound(self, samples.clone()))

    def send_picture(self, image: Image.Image) -> None:
        """An RGB picture of the present second; of more than the session takes in a second the newest are seen."""
        self._inbox.put(_Picture(self, image))

    def interrupt(self) -> None:
        """Stop the present answer: at once between units, else when the unit on its way is over, unheard."""
        self._inbox.put(_Interrupt(self))

    def close(self) -> None:
        """End the call; idempotent. What is on its way is dropped."""
        self._inbox.put(_Close(self))

    def happenings(self) -> Iterator[Happening]:
        """Everything that happens in the call, waiting for it, until it has ended. For one reader."""
        while True:
            happening = self._happened.get()
            yield happening
            if isinstance(happening, SessionEnded):
                return

    def tell(self, happening: Happening) -> None:
        """For the engine's thread: something happened."""
        self._happened.put(happening)

    def took(self, num_samples: int) -> None:
        """For the engine's thread: so much sound waits no longer."""
        with self._waiting_lock:
            self._waiting_samples -= num_samples


@dataclass(slots=True, eq=False)
class _Ongoing:
    """A session as the engine's thread sees it. is_void: it was interrupted while a unit was on its way."""

    session: LiveSession
    call: Call
    max_pictures: int
    sound: Tensor = field(default_factory=lambda: torch.empty(0))
    pictures: deque[Image.Image] = field(default_factory=deque)
    num_units: int = 0
    is_on_its_way: bool = False
    is_void: bool = False


class LiveEngine:
    """Owns the thread that drives an engine; nothing else may touch that engine while it runs. Use as a context."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._ongoing: dict[LiveSession, _Ongoing] = {}
        # Held to open a session or to stop opening them, so that none comes between the last look and the end.
        self._gate = threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="antiphon engine", daemon=True)

    def __enter__(self) -> LiveEngine:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inbox.put(_Stop())
        self._thread.join()

    def open(self, session_id: str, config: SessionConfig, reference: Tensor, voice: Voice) -> LiveSession:
        """Start a call; its first happening is SessionOpened, or SessionEnded with the reason why it could not start.

        reference: [n] float32 on the host, 16 kHz, the voice in the prompt; n = 0 for none.
        """
        session = LiveSession(session_id, self._inbox)
        with self._gate:
            if self._is_over:
                session.tell(SessionEnded(0.0, *_STOPPED))
            else:
                self._inbox.put(_Open(session, config, reference, voice))
        return session

    def _run(self) -> None:
        reason = ("internal_error", "the engine failed")
        try:
            with torch.inference_mode():
                while self._take_commands():
                    self._start_units()
                    for call, result in self._engine.step():
                        self._end_unit(call, result)
            reason = _STOPPED
        finally:
            with self._gate:
                self._is_over = True
            # Nobody is left waiting, not even who came too late or was there when the engine failed.
            for ongoing in list(self._ongoing.values()):
                self._end(ongoing, *reason)
            while not self._inbox.empty():
                command = self._inbox.get()
                if isinstance(command, _Open):
                    command.session.tell(SessionEnded(0.0, *reason))

    def _take_commands(self) -> bool:
        """Obey what has come in, waiting for something if there is nothing to do. Returns False to stop."""
        while self._is_idle or not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, _Stop):
                return False
            self._obey(command)
        return True

    @property
    def _is_idle(self) -> bool:
        return self._engine.is_idle and not any(self._is_due(ongoing) for ongoing in self._ongoing.values())

    def _obey(self, command: _Open | _Sound | _Picture | _Interrupt | _Close) -> None:
        if isinstance(command, _Open):
            self._open(command)
            return
        ongoing = self._ongoing.get(command.session)
        if ongoing is None:
            return  # it has ended, and was told so
        match command:
            case _Sound(samples=samples):
                ongoing.sound = torch.cat([ongoing.sound, samples])
            case _Picture(image=image):
                ongoing.pictures.append(image)
                if len(ongoing.pictures) > ongoing.max_pictures:
                    ongoing.pictures.popleft()
            case _Interrupt():
                ongoing.is_void = ongoing.is_on_its_way
                if not ongoing.is_on_its_way:
                    self._interrupt(ongoing)
            case _Close():
                self._end(ongoing, "completed", "the caller closed the call")

    def _open(self, command: _Open) -> None:
        session = command.session
        try:
            call = self._engine.open(session.session_id, command.config, command.reference, command.voice)
        except AntiphonError as error:
            session.tell(SessionEnded(0.0, error.code, str(error)))
            return
        self._ongoing[session] = _Ongoing(session, call, command.config.max_pictures)
        session.tell(call.opened)

    @staticmethod
    def _is_due(ongoing: _Ongoing) -> bool:
        return not ongoing.is_on_its_way and ongoing.sound.numel() >= UNIT_SAMPLES

    def _start_units(self) -> None:
        for ongoing in [one for one in self._ongoing.values() if self._is_due(one)]:
            # Split, so that what waits does not keep alive what was heard.
            second, ongoing.sound = ongoing.sound[:UNIT_SAMPLES].clone(), ongoing.sound[UNIT_SAMPLES:].clone()
            ongoing.session.took(UNIT_SAMPLES)
            heard = UnitInput(second, tuple(ongoing.pictures))
            ongoing.pictures.clear()
            try:
                self._start(ongoing, heard)
            except AntiphonError as error:
                self._end(ongoing, error.code, str(error))
            else:
                ongoing.is_on_its_way = True

    def _start(self, ongoing: _Ongoing, heard: UnitInput) -> None:
        """A second goes on without pictures that cannot be used."""
        try:
            self._engine.start_unit(ongoing.call, heard)
        except ImageError as error:
            ongoing.session.tell(InputRefused(ongoing.num_units * UNIT_S, error.code, str(error)))
            self._engine.start_unit(ongoing.call, replace(heard, pictures=()))

    def _end_unit(self, call: Call, result: UnitResult | AntiphonError) -> None:
        (ongoing,) = (one for one in self._ongoing.values() if one.call is call)
        ongoing.is_on_its_way = False
        if isinstance(result, AntiphonError):
            self._end(ongoing, result.code, str(result))
            return
        ongoing.num_units += 1
        if ongoing.is_void:
            for event in result.events:
                if not isinstance(event, SpeechQueued):
                    ongoing.session.tell(event)
            ongoing.is_void = False
            self._interrupt(ongoing)
            return
        for happening in (*result.events, *result.speech):
            ongoing.session.tell(happening)

    def _interrupt(self, ongoing: _Ongoing) -> None:
        interrupted = self._engine.interrupt(ongoing.call)
        if interrupted is not None:
            ongoing.session.tell(interrupted)

    def _end(self, ongoing: _Ongoing, code: str, message: str) -> None:
        self._engine.close(ongoing.call)
        del self._ongoing[ongoing.session]
        ongoing.session.tell(SessionEnded(ongoing.num_units * UNIT_S, code, message))
