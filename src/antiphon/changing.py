"""A call whose settings change while it goes on: the same past behind another prompt, voice or window.

    change ─▶ no answer is being said ─▶ retain ─▶ a successor opens beside the call ─▶ it takes over
                                                └▶ it cannot be opened: the call goes on as it was

What comes while a call or its successor opens waits, in order, for whoever goes on. A call is never without one, so a
change that does not fit costs nobody their call; it needs room for both for that time. Used in the engine's thread.
Shown by tests/test_changing.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from antiphon.call import CallPhase, MovedCall
from antiphon.config import SessionConfig
from antiphon.core.events import ChangeRefused, SessionEnded, SessionOpened, SettingsChanged
from antiphon.engine import Call, Engine
from antiphon.errors import AntiphonError
from antiphon.happenings import Happening
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.thinker.state import UnitInput


@dataclass(frozen=True, slots=True, eq=False)
class CallSettings:
    """Fields as of `Engine.begin`."""

    session: SessionConfig
    reference: Tensor
    voice: VoicePrompt


@dataclass(frozen=True, slots=True)
class _Interruption:
    """The caller's, of what was sent before it."""


class ChangingCall:
    """Begins a call, and is it from then on: tells its listener one story, whoever goes on with it.

    listener: is told what happens, as of `Engine.begin`, and for each change in order SettingsChanged or ChangeRefused,
    unless the call ends before.
    """

    def __init__(
        self, engine: Engine, session_id: str, settings: CallSettings, listener: Callable[[Happening], None]
    ) -> None:
        """Raises: as `Engine.begin`."""
        self._listener = listener
        self._wanted: deque[CallSettings] = deque()
        self._is_holding = True
        self._held: deque[UnitInput | CallSettings | _Interruption] = deque()
        self._successor: Call | None = None
        self._num_calls = 0
        listen = self._new_listener()
        self._call = engine.begin(session_id, settings.session, settings.reference, settings.voice, listen)
        self._present_number = self._num_calls

    @property
    def present(self) -> Call:
        """Who is it now."""
        return self._call

    def hear(self, heard: UnitInput) -> None:
        """As `Call.hear`."""
        if self._is_holding:
            self._held.append(heard)
        else:
            self._call.hear(heard)

    def interrupt(self) -> None:
        """As `Call.interrupt`."""
        if self._held:
            self._held.append(_Interruption())
        else:
            self._call.interrupt()

    def change(self, settings: CallSettings) -> None:
        """Go on under these settings as soon as no answer is being said."""
        if self._is_holding:
            self._held.append(settings)
        else:
            self._wanted.append(settings)
            self._move_if_due()

    def close(self) -> None:
        """As `Call.close`."""
        self._call.close()

    def _new_listener(self) -> Callable[[Happening], None]:
        self._num_calls += 1
        return partial(self._happened, self._num_calls)

    def _happened(self, number: int, happening: Happening) -> None:
        """number: of the call in which it happened."""
        if number == self._present_number:
            if isinstance(happening, SessionEnded) and self._successor is not None:
                self._successor.close()
            self._listener(happening)
            if isinstance(happening, SessionOpened):
                self._release()
            else:
                self._move_if_due()
        elif number > self._present_number:
            self._successor_happened(happening)

    def _move_if_due(self) -> None:
        record = self._call.record
        if not self._wanted or self._is_holding or record.is_answering or record.phase is not CallPhase.OPEN:
            return
        self._is_holding = True
        self._call.retain(self._retained)

    def _retained(self, moved: MovedCall | AntiphonError) -> None:
        record = self._call.record
        if record.phase is CallPhase.ENDED:
            return
        if record.is_answering:
            # It began with a second that was on its way.
            self._release()
            return
        wanted = self._wanted.popleft()
        if isinstance(moved, AntiphonError):
            self._refuse(moved.code, str(moved))
        else:
            changed = moved.under(wanted.session, wanted.reference)
            self._successor = self._call.succeed(changed, wanted.voice, self._new_listener())

    def _successor_happened(self, happening: Happening) -> None:
        match happening:
            case SessionOpened() as opened:
                assert self._successor is not None, "somebody opened"
                before, self._call, self._successor = self._call, self._successor, None
                # An interruption may have cut it since the call was retained.
                self._call.record.playback = before.record.playback
                self._present_number = self._num_calls
                before.close()
                self._listener(
                    SettingsChanged(
                        self._call.record.now_s, opened.num_prompt_tokens, opened.max_context_tokens, opened.prompt_ms
                    )
                )
                self._release()
            case SessionEnded(code=code, message=message) if self._call.record.phase is CallPhase.OPEN:
                self._successor = None
                self._refuse(code, message)
            case _:
                pass

    def _refuse(self, code: str, message: str) -> None:
        self._listener(ChangeRefused(self._call.record.now_s, code, message))
        self._release()

    def _release(self) -> None:
        """Somebody hears."""
        self._is_holding = False
        while self._held and not self._is_holding:
            match self._held.popleft():
                case _Interruption():
                    self._call.interrupt()
                case CallSettings() as settings:
                    self.change(settings)
                case heard:
                    self._call.hear(heard)
        self._move_if_due()
