"""What the engine knows of a chat: how far its answer is in each stage, and what is to be sent next.

    GoOn → thinker → Handoff → talker → CodecChunk → code2wav → Speech, and GoOn again to thinker and talker

It sends nothing itself. Written by the engine's thread only. Shown by tests/test_chat.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from torch import Tensor

from antiphon.call import Record
from antiphon.config import ChatConfig
from antiphon.core.events import AnswerGrew, SpeechQueued
from antiphon.core.messages import Address, CodecChunk, GoOn, Handoff, Spoken
from antiphon.happenings import Speech
from antiphon.stages.thinker.state import PieceOutcome
from antiphon.units import OUTPUT_RATE_HZ

CHAT_SLACK_S = 3600.0
"""So much later than a call's are a chat's deadlines: everything of a call that waits goes first, chats in order."""


@dataclass(frozen=True, slots=True)
class Errands:
    """What shall be sent to each stage now."""

    thinker: tuple[GoOn, ...] = ()
    talker: tuple[Handoff[Tensor] | GoOn, ...] = ()
    code2wav: tuple[CodecChunk, ...] = ()


@dataclass(slots=True, eq=False)
class ChatRecord(Record):
    """One chat.

    num_asked: pieces of the answer that the thinker was asked for. is_answered: the last one is decided.
    unsaid: handoffs that the talker has not got yet. is_saying: it is at one. num_said: messages that it got.
    num_unvoiced: chunks that code2wav has not answered. num_samples: of the speech so far.
    """

    config: ChatConfig = field(kw_only=True)
    num_asked: int = 0
    is_answered: bool = False
    unsaid: deque[Handoff[Tensor]] = field(default_factory=deque)
    is_saying: bool = False
    num_said: int = 0
    num_unvoiced: int = 0
    num_samples: int = 0

    @property
    def deadline_s(self) -> float:
        return self.opened_s + CHAT_SLACK_S

    @property
    def now_s(self) -> float:
        """Speech that was made."""
        return self.num_samples / OUTPUT_RATE_HZ

    @property
    def is_over(self) -> bool:
        """The answer is complete, and all of it was told."""
        return self.is_answered and not (self.unsaid or self.is_saying or self.num_unvoiced)

    def ask(self) -> Errands:
        """For the next piece."""
        self.num_asked += 1
        return Errands(thinker=(GoOn(Address(self.key, 0, 0, self.num_asked - 1), self.deadline_s),))

    def take(self, result: PieceOutcome | CodecChunk | Spoken[Tensor]) -> Errands:
        """What a stage made; tells the listener what is to be told."""
        match result:
            case PieceOutcome():
                return self._decided(result)
            case CodecChunk():
                return self._said(result)
            case Spoken():
                self._voiced(result)
                return Errands()

    def _decided(self, piece: PieceOutcome) -> Errands:
        self.unsaid.extend(piece.handoffs)
        self.is_answered = piece.end is not None
        self.listener(AnswerGrew(piece.text, piece.num_tokens, "" if piece.end is None else piece.end.value))
        going_on = Errands() if self.is_answered else self.ask()
        return replace(going_on, talker=() if self.is_saying else self._next_handoff())

    def _said(self, chunk: CodecChunk) -> Errands:
        self.num_unvoiced += 1
        talker = (GoOn(self._next_address(), self.deadline_s),) if chunk.goes_on else self._next_handoff()
        return Errands(talker=talker, code2wav=(chunk,))

    def _voiced(self, spoken: Spoken[Tensor]) -> None:
        self.num_unvoiced -= not spoken.goes_on
        num_samples, start_samples = spoken.samples.numel(), self.num_samples
        self.num_samples += num_samples
        chunk, start_s = spoken.chunk, start_samples / OUTPUT_RATE_HZ
        if num_samples:
            num_codec_tokens = len(chunk.codec_tokens)
            self.listener(SpeechQueued(0, chunk.unit, start_s, start_s, num_codec_tokens, num_samples))
        self.listener(Speech(chunk, start_s, start_samples, spoken.samples))

    def _next_handoff(self) -> tuple[Handoff[Tensor] | GoOn, ...]:
        self.is_saying = bool(self.unsaid)
        if not self.unsaid:
            return ()
        return (replace(self.unsaid.popleft(), address=self._next_address()),)

    def _next_address(self) -> Address:
        """Of the next message to the talker; its answer goes on to code2wav under the same."""
        self.num_said += 1
        return Address(self.key, 0, 0, self.num_said - 1)
