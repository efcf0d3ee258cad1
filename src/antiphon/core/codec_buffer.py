"""When the vocoder may run: collects a turn's codec tokens and cuts them into windows. Pure Python, no audio.

Rules of REFERENCE 9.7. Every window ends with tokens that are only looked at; they come again at the start of the
next one, except in a turn's last window. Tests: tests/core/test_codec_buffer.py, golden code2wav (`buffering`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHUNK_TOKENS = 25
"""Tokens that a full window renders: one second."""

MIN_FLUSHED_TOKENS = 5
"""Fewest tokens that a window renders when the buffer is flushed before it holds a full one."""


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens for one run of the vocoder. is_last: no more will come in this turn, so all of them are rendered."""

    tokens: tuple[int, ...]
    is_last: bool


class CodecBuffer:
    """One session's codec tokens that are not rendered yet. Owned by the session's code2wav state.

    A turn starts with `lookahead_tokens` times silence. A window that is not the last renders at least
    `MIN_FLUSHED_TOKENS`; fewer are held and join the next, so none is ever shorter than the look-ahead needs.
    """

    def __init__(self, silence_token: int, lookahead_tokens: int) -> None:
        self._silence = [silence_token] * lookahead_tokens
        self._tokens = self._silence.copy()

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    def push(self, tokens: Sequence[int], *, is_flush: bool, is_last: bool) -> list[Window]:
        """Add tokens; returns the windows that are ready, in order.

        is_flush: do not wait for a full window
        is_last:  the turn ends here; the rest becomes a last window, and the buffer waits for `reset`
        """
        self._tokens.extend(tokens)
        lookahead = len(self._silence)
        full = CHUNK_TOKENS + lookahead
        enough = MIN_FLUSHED_TOKENS + lookahead if is_flush else full
        windows: list[Window] = []
        while len(self._tokens) >= enough:
            windows.append(Window(tuple(self._tokens[:full]), is_last=False))
            del self._tokens[: len(windows[-1].tokens) - lookahead]
        if is_last and self._tokens:
            windows.append(Window(tuple(self._tokens), is_last=True))
            self._tokens.clear()
        return windows

    def reset(self) -> None:
        """Start a turn. What was not rendered is void."""
        self._tokens = self._silence.copy()
