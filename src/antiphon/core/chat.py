"""A chat: a whole conversation in, one answer out. What is said to it, and what a drawn token means in its answer.

An answer is decided in pieces, as a call is in units, so that it is one row more in the steps of the calls beside it.
Source: REFERENCE 14. No logits, no tensors. Shown by tests/core/test_chat.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from antiphon.errors import ConfigError

SamplesT = TypeVar("SamplesT")

PIECE_TOKENS = 10
"""Tokens of an answer that are decided, and handed to the talker, together (REFERENCE 14.4)."""


class Role(Enum):
    """Who says a message, as the model knows it by name."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class PictureFile:
    """max_slices: items that the picture may be cut into besides the view; 1 for none."""

    content: bytes
    max_slices: int


@dataclass(frozen=True, slots=True, eq=False)
class Sound(Generic[SamplesT]):
    """samples: [n] float32, 16 kHz."""

    samples: SamplesT


@dataclass(frozen=True, slots=True, eq=False)
class ChatMessage(Generic[SamplesT]):
    """parts: in the order in which they are read; text is words, whatever it spells."""

    role: Role
    parts: tuple[str | PictureFile | Sound[SamplesT], ...]


@dataclass(frozen=True, slots=True)
class ConversationSize:
    """num_tokens: of all, with those of what is heard and of what is seen."""

    num_tokens: int
    num_sound_tokens: int
    num_picture_tokens: int


class AnswerEnd(Enum):
    """Why an answer is over; the value is its name on the wire."""

    STOP = "stop"
    """The model ended it, or it said a stop sequence."""
    LENGTH = "length"
    """It has all the tokens that it may have."""


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """Ids that mean something in an answer.

    ends: each of them ends it. piece_end: ends a piece, as it ends a unit in a call.
    decisions: what a call decides with. A chat never draws them: nobody asks it whether it wants to speak.
    """

    ends: tuple[int, ...]
    piece_end: int
    decisions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AnswerConfig:
    """What an answer may be.

    max_tokens: of the answer. max_context_tokens: of conversation and answer together.
    is_spoken: it is said as well as written. stop: texts that end it and are not part of it.
    """

    max_tokens: int
    max_context_tokens: int
    is_spoken: bool = False
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.max_context_tokens < 2:
            raise ConfigError(
                f"an answer has at least 1 token and a conversation another one, got {self.max_tokens} of "
                f"{self.max_context_tokens}"
            )
        if not all(self.stop):
            raise ConfigError("an empty stop sequence would end every answer before it begins")


class PieceDecisions:
    """One piece of an answer, in order: `take` every drawn token until `is_done`.

    num_answer_tokens: of the pieces before it.
    """

    def __init__(self, tokens: ChatTokens, max_answer_tokens: int, num_answer_tokens: int) -> None:
        assert num_answer_tokens < max_answer_tokens, f"the answer has its {max_answer_tokens} tokens"
        self._tokens = tokens
        self._num_answer_left = max_answer_tokens - num_answer_tokens
        self._is_over = False
        self.num_taken = 0
        """Tokens of the answer in this piece."""
        self.end: AnswerEnd | None = None

    @property
    def is_done(self) -> bool:
        return self._is_over or self.end is not None

    @property
    def is_last_of_answer(self) -> bool:
        """The answer is full after the next token."""
        return self.num_taken + 1 == self._num_answer_left

    def take(self, drawn: int) -> bool:
        """Whether a drawn token is part of what is said; if not, it only steers."""
        assert not self.is_done, f"the piece is over; {drawn} comes too late"
        if drawn in self._tokens.ends:
            self.end = AnswerEnd.STOP
            return False
        self.num_taken += 1
        self._is_over = drawn == self._tokens.piece_end or self.num_taken == PIECE_TOKENS
        if self.num_taken == self._num_answer_left:
            self.end = AnswerEnd.LENGTH
        return drawn != self._tokens.piece_end

    def stop(self) -> None:
        """The token that was taken last completes a stop sequence."""
        self.end = AnswerEnd.STOP


class StopText:
    """An answer's text up to its first stop sequence. What may be the beginning of one is held until that is known."""

    def __init__(self, sequences: tuple[str, ...]) -> None:
        self._sequences = sequences
        self._held = ""
        self.is_stopped = False

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def push(self, text: str) -> str:
        """What can be shown after more text came."""
        assert not self.is_stopped, "text after a stop sequence"
        self._held += text
        found = [(at + len(one), at) for one in self._sequences if (at := self._held.find(one)) >= 0]
        if found:
            self.is_stopped = True
            # The first that is complete, so that it does not matter in which pieces the text came.
            _, at = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        num_shown = next(at for at in range(len(self._held) + 1) if self._may_begin(self._held[at:]))
        shown, self._held = self._held[:num_shown], self._held[num_shown:]
        return shown

    def finish(self) -> str:
        """The rest: no stop sequence comes any more."""
        shown, self._held = self._held, ""
        return shown

    def _may_begin(self, text: str) -> bool:
        """Whether a stop sequence may begin with this; with nothing, any may."""
        return not text or any(sequence.startswith(text) for sequence in self._sequences)
