"""The rules of one unit and of turns: what a sampled token means. No logits, no tensors.

Source: REFERENCE 4.3 and 4.6, with quirk 5 corrected: a turn that ends inside a unit is handed on as ended, whatever
follows it. Shown by tests/core/test_duplex.py and the golden kinds thinker and endtoend.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from antiphon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DuplexTokens:
    """Ids of the tokens that steer a call (REFERENCE 3)."""

    unit_start: int
    unit_end: int
    listen: int
    tts_bos: int
    turn_eos: int
    chunk_eos: int
    chunk_tts_eos: int


class Wish(Enum):
    """What the caller's side wants of one unit. An interruption comes before it."""

    FREE = "free"
    """The model decides."""
    SPEAK = "speak"
    """Its first decision may not be to listen."""
    LISTEN = "listen"
    """It listens; an open turn ends with it."""
    HOLD = "hold"
    """No turn begins; an open one goes on."""


@dataclass(frozen=True, slots=True)
class DuplexConfig:
    """Limits of the loop.

    max_decided_tokens: decided tokens in a unit, its terminator included; `</unit>` comes after them.
    num_forced_listens: so many first units listen whatever the model says.
    """

    max_decided_tokens: int = 20
    num_forced_listens: int = 3

    def __post_init__(self) -> None:
        if self.max_decided_tokens < 2:
            raise ConfigError(f"a unit needs at least 2 decided tokens, got {self.max_decided_tokens}")
        if self.num_forced_listens < 0:
            raise ConfigError(f"num_forced_listens must not be negative, got {self.num_forced_listens}")

    @property
    def max_output_tokens(self) -> int:
        """The most tokens of a unit after its input."""
        return self.max_decided_tokens + 1


@dataclass(frozen=True, slots=True)
class Utterance:
    """Consecutive spoken tokens of one unit that belong to one turn.

    token_ids: ids for the talker, `turn_eos` included.
    rows: for each, its number among the unit's fed tokens, so that its hidden state can be found.
    """

    token_ids: tuple[int, ...]
    rows: tuple[int, ...]
    ends_turn: bool


class UnitDecisions:
    """One unit's decisions in order: `take` says what to feed for a sampled id, until `is_done`.

    The terminator is not fed by itself: `closing_ids` are the unit's last tokens, fed in one forward.
    A unit that is forced to listen decides nothing; an open turn is closed in it, so that the context shows where the
    model was interrupted (REFERENCE 4.5, quirk 7).
    is_last_turn: the unit ends with the turn that ends in it.
    """

    def __init__(
        self,
        tokens: DuplexTokens,
        config: DuplexConfig,
        *,
        is_turn_open: bool,
        is_forced_listen: bool,
        is_last_turn: bool = False,
    ) -> None:
        self._tokens = tokens
        self._max_tokens = config.max_decided_tokens
        self._was_turn_open = is_turn_open
        self.is_turn_open = is_turn_open
        self.fed: list[int] = []
        """Tokens fed so far, without the terminator."""
        self._is_forced = is_forced_listen
        self._is_last_turn = is_last_turn
        self._terminator: int | None = tokens.listen if is_forced_listen else None
        if is_forced_listen and is_turn_open:
            self.fed.append(tokens.turn_eos)
            self.is_turn_open = False

    @property
    def is_done(self) -> bool:
        return self._terminator is not None

    @property
    def is_listen(self) -> bool:
        return self._terminator == self._tokens.listen

    @property
    def num_left(self) -> int:
        """Tokens that may still be fed before the unit is full."""
        return self._max_tokens - 1 - len(self.fed)

    @property
    def closing_ids(self) -> tuple[int, int]:
        assert self._terminator is not None, "the unit is still being decided"
        return self._terminator, self._tokens.unit_end

    def take(self, sampled: int) -> int | None:
        """The id to feed for a sampled one, or None when it ends the unit (then `is_done`)."""
        assert not self.is_done, f"the unit ended with {self._terminator}; {sampled} comes too late"
        tokens = self._tokens
        if sampled == tokens.listen and self.is_turn_open:
            sampled = tokens.tts_bos
        if sampled in (tokens.listen, tokens.chunk_eos, tokens.chunk_tts_eos):
            self._terminator = sampled
            return None
        self.is_turn_open = sampled != tokens.turn_eos
        self.fed.append(sampled)
        if not self.num_left or (self._is_last_turn and sampled == tokens.turn_eos):
            self._terminator = tokens.chunk_eos
        return sampled

    def interrupt(self) -> None:
        """End the unit here, and its turn if one is open; words that were fed stay there for `previous_ids`."""
        assert not self.is_done, f"the unit has ended with {self._terminator}"
        tokens = self._tokens
        if self.is_turn_open:
            self.fed.append(tokens.turn_eos)
            self.is_turn_open = False
        has_more = any(token != tokens.turn_eos for token in self.fed)
        self._terminator = tokens.chunk_eos if has_more else tokens.listen

    def utterances(self) -> tuple[Utterance, ...]:
        """What the talker gets: one entry per turn that spoke, the last one open unless its turn ended.

        The first decision is never spoken (REFERENCE quirk 4). A speaking unit always reaches the talker, also with no
        token (8.2); a listening one only if it ended a turn or spoke before it listened.
        """
        if self._is_forced:
            return ()  # nobody spoke; whoever interrupts a turn also stops its speech
        fed, turn_eos = self.fed, self._tokens.turn_eos
        utterances: list[Utterance] = []
        start = 1
        for row in range(0 if self._was_turn_open else 1, len(fed)):
            # Several turn_eos in a row end one turn.
            if fed[row] == turn_eos and fed[row + 1 : row + 2] != [turn_eos]:
                utterances.append(self._utterance(start, row + 1, ends_turn=True))
                start = max(start, row + 1)
        if start < len(fed) or not utterances:
            utterances.append(self._utterance(start, len(fed), ends_turn=bool(fed) and not self.is_turn_open))
        if self.is_listen and not self._was_turn_open and not any(map(self._has_words, utterances)):
            return ()
        return tuple(utterances)

    def previous_ids(self) -> tuple[int, ...]:
        """Ids that `previous` may take over: none of a listening unit, as the reference keeps them (4.6)."""
        return () if self.is_listen else tuple(self.fed[1:])

    def _utterance(self, start: int, end: int, *, ends_turn: bool) -> Utterance:
        return Utterance(tuple(self.fed[start:end]), tuple(range(start, end)), ends_turn)

    def _has_words(self, utterance: Utterance) -> bool:
        return any(token != self._tokens.turn_eos for token in utterance.token_ids)
