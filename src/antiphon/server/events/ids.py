"""Names that the server gives: of events, items, responses, sessions, conversations and function calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable


def random_name() -> str:
    """96 bits, as 24 hexadecimal digits: nobody meets or guesses another's."""
    return secrets.token_hex(12)


class Ids:
    """draw: what stands behind the prefix; each call gives another."""

    def __init__(self, draw: Callable[[], str] = random_name) -> None:
        self._draw = draw

    def event(self) -> str:
        return f"event_{self._draw()}"

    def item(self) -> str:
        return f"item_{self._draw()}"

    def response(self) -> str:
        return f"resp_{self._draw()}"

    def session(self) -> str:
        return f"sess_{self._draw()}"

    def conversation(self) -> str:
        return f"conv_{self._draw()}"

    def call(self) -> str:
        return f"call_{self._draw()}"
