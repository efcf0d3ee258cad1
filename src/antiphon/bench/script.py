"""What simulated callers make the model decide: so many units of speech, so many of listening, over and over.

The decisions only, never when they are made (`UnitDraw`). Pure. Shown by tests/bench/test_script.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.core.duplex import DuplexConfig
from antiphon.errors import ConfigError
from antiphon.models.minicpmo.tokens import TextTokenizer

WORDS = "the rain in spain "


@dataclass(frozen=True, slots=True)
class Talk:
    """speaking_share: part of the units that speak. turn_units: of a turn. unit_words: spoken tokens of a unit."""

    speaking_share: float
    turn_units: int
    unit_words: int

    def __post_init__(self) -> None:
        if not 0 <= self.speaking_share <= 1:
            raise ConfigError(f"the share of speaking must be from 0 to 1, got {self.speaking_share}")
        # Besides its words a unit decides to speak, at a turn's end that it ends, and its own end, which is drawn only
        # if it does not fill the unit: a script that stayed ahead of the draws would not be followed any more.
        max_words = DuplexConfig().max_decided_tokens - 4
        if self.turn_units < 1 or not 1 <= self.unit_words <= max_words:
            raise ConfigError(
                f"a turn has at least 1 unit and a unit 1 to {max_words} spoken tokens; got {self.turn_units} and "
                f"{self.unit_words}"
            )

    @property
    def num_listening(self) -> int:
        """Units that listen between two turns."""
        if not self.speaking_share:
            return 1
        return round(self.turn_units * (1 - self.speaking_share) / self.speaking_share)

    @property
    def cycle(self) -> tuple[bool, ...]:
        """Which units of a cycle speak, from a turn's first on."""
        num_speaking = self.turn_units if self.speaking_share else 0
        return (*[True] * num_speaking, *[False] * self.num_listening)


def script_of(talk: Talk, session: int, num_sessions: int, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The ids that the draws of a session come to. At any time as large a part of the sessions speaks as can be."""
    special = tokenizer.special
    _, speak, turn_eos = special.chat.decisions
    words = _words(tokenizer, talk.unit_words)
    units: list[tuple[int, ...]] = []
    for number, is_speaking in enumerate(talk.cycle):
        if not is_speaking:
            units.append((special.duplex.listen,))
            continue
        ending = (turn_eos,) if number == talk.turn_units - 1 else ()
        units.append((speak, *words, *ending, special.duplex.chunk_eos))
    start = session * len(units) // num_sessions % len(units)
    return tuple(token for unit in (*units[start:], *units[:start]) for token in unit)


def _words(tokenizer: TextTokenizer, number: int) -> tuple[int, ...]:
    ids = tokenizer.encode_plain(WORDS)
    return tuple(ids[index % len(ids)] for index in range(number))
