"""What happens in a chat, in numbers; the collectors are of `metrics.py`. Shown by tests/server/test_metrics.py."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram

from antiphon.core.clock import Clock
from antiphon.core.events import AnswerGrew, SessionEnded, SessionOpened, SpeechQueued
from antiphon.happenings import Happening
from antiphon.units import OUTPUT_RATE_HZ


@dataclass(frozen=True, slots=True, eq=False)
class ChatCollectors:
    """clock: of what takes time. spoken_s: of calls too."""

    clock: Clock
    chats: Gauge
    ended: Counter
    prompt_tokens: Counter
    answer_tokens: Counter
    first_token_s: Histogram
    spoken_s: Counter


class ChatWatch:
    """Owns what has to be remembered of one chat to count its happenings."""

    def __init__(self, collectors: ChatCollectors) -> None:
        self._collectors = collectors
        self._began_s = collectors.clock.now_s()
        self._num_tokens = 0
        self._is_over = False
        collectors.chats.inc()

    def observe(self, happening: Happening) -> None:
        """Take the next happening of the chat. After its end nothing counts."""
        if self._is_over:
            return
        match happening:
            case SessionOpened(num_prompt_tokens=num_tokens):
                self._collectors.prompt_tokens.inc(num_tokens)
            case AnswerGrew(num_tokens=num_tokens):
                if not self._num_tokens and num_tokens:
                    self._collectors.first_token_s.observe(self._collectors.clock.now_s() - self._began_s)
                self._collectors.answer_tokens.inc(num_tokens - self._num_tokens)
                self._num_tokens = num_tokens
            case SpeechQueued(num_samples=num_samples):
                self._collectors.spoken_s.inc(num_samples / OUTPUT_RATE_HZ)
            case SessionEnded(code=code):
                self.end(code)

    def end(self, code: str) -> None:
        """The chat is over, also if its last happening will not come."""
        if self._is_over:
            return
        self._is_over = True
        self._collectors.chats.dec()
        self._collectors.ended.labels(code).inc()
