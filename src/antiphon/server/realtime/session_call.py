"""The call of a session: begun when it is needed first, as it was chosen by then, and changed as the choices change.

Shown by tests/server/test_changes.py.
"""

from __future__ import annotations

from typing import Protocol

from antiphon.aio import AsyncSession
from antiphon.server.realtime.settings import Choices


class Opener(Protocol):
    """Starts a call."""

    def __call__(self, choices: Choices) -> AsyncSession: ...


class SessionCall:
    """Owns the call, and what is known of how it goes on. One change is under way at a time."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._call: AsyncSession | None = None
        self._in_force: Choices | None = None
        self._on_its_way: Choices | None = None

    @property
    def is_open(self) -> bool:
        """It has begun."""
        return self._call is not None

    def open(self, choices: Choices) -> AsyncSession:
        """The call, which begins with these choices if it has not begun."""
        if self._call is None:
            self._call, self._in_force = self._opener(choices), choices
            if choices.opening_text:
                self._call.send_text(choices.opening_text)
        return self._call

    def follow(self, choices: Choices) -> None:
        """Have the call as the client wants it by now, from the end of the present answer on."""
        if self._call is None or self._in_force is None or self._on_its_way is not None:
            return
        if not choices.is_same_call(self._in_force):
            self._on_its_way = choices
            self._call.change(choices.config, choices.voice.reference, choices.voice.prompt)

    def has_changed(self, choices: Choices) -> None:
        """The change is in force. choices: those of by now, which may want another one."""
        assert self._on_its_way is not None, "nobody asked for a change"
        self._in_force, self._on_its_way = self._on_its_way, None
        self.follow(choices)

    def was_refused(self, choices: Choices) -> Choices:
        """The call goes on as it was. Returns the choices without what cannot be had."""
        assert self._in_force is not None, "nobody asked for a change"
        self._on_its_way = None
        return choices.with_call_of(self._in_force)

    def interrupt(self) -> None:
        """Stop the present answer, if there can be one."""
        if self._call is not None:
            self._call.interrupt()

    def close(self) -> None:
        """Idempotent."""
        if self._call is not None:
            self._call.close()
