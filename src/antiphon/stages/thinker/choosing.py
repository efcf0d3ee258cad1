"""The thinker's draws: from the states of many sessions to a token for each, by each one's own rules.

The rules themselves are in kernels/sampling; this lines up their operands and remembers what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from antiphon.core.sampling import Draws, TextSampling
from antiphon.kernels.sampling.contract import TextRules
from antiphon.kernels.sampling.op import sample_text
from antiphon.kernels.transfer import Download, upload
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.models.minicpmo.tokens import SpecialTokens
from antiphon.stages.draw_table import DrawPlace, DrawSlot, DrawTable


class Turn(Enum):
    """Whether an answer goes on where a token is drawn."""

    OPEN = "open"
    CLOSED = "closed"
    BY_LAST = "by_last"
    """Open unless the slot's newest draw, which the host may not know yet, ended it."""


@dataclass(frozen=True, slots=True)
class TextDraw:
    """How one session chooses its next token. must_speak: not listen. seed, counter: of the random numbers."""

    sampling: TextSampling
    draws: Draws
    place: DrawPlace
    turn: Turn
    must_speak: bool
    seed: int
    counter: int


class TextChooser:
    """Owns the output head's use, the constant operands of the rules, and what was drawn."""

    def __init__(self, network: ThinkerNetwork, special: SpecialTokens) -> None:
        self._network = network
        self._special = special
        self._device = network.lm_head.weight.device
        self.table = DrawTable(self._device)
        forbidden = torch.zeros(network.config.vocab_size, dtype=torch.bool)
        forbidden[list(special.forbidden)] = True
        self._forbidden = forbidden.to(self._device)

    def choose(self, states: Tensor, draws: Sequence[TextDraw]) -> Download:
        """One id per draw, [M] int64. states: [M, hidden]. A failed call leaves nothing behind."""
        past = self.table.past([draw.place for draw in draws])
        rules, is_open, follows_last = self._operands(draws, past.history)
        choice = sample_text(self._network.logits(states), rules)
        duplex = self._special.duplex
        is_open = is_open | (follows_last & (past.last != duplex.turn_eos))
        # An open turn cannot be listened away: UnitDecisions.take says the same on the host.
        fed = choice.ids.masked_fill((choice.ids == duplex.listen) & is_open, duplex.tts_bos)
        ids = Download(choice.ids)
        self.table.record(past, choice.ids, choice.is_recorded, fed)
        return ids

    def embed_drawn(self, slots: Sequence[DrawSlot]) -> Tensor:
        """[len(slots), hidden], the inputs for each slot's newest draw."""
        return self._network.embed(self.table.fed(slots))

    def _operands(self, draws: Sequence[TextDraw], history: Tensor) -> tuple[TextRules, Tensor, Tensor]:
        """The rules, and two columns [M] bool: the turn is known to be open; it is open unless the last draw ended it.

        history: [M, W] int64, ids that the repetition penalty sees.
        """
        sampling = [draw.sampling for draw in draws]
        fractions = torch.tensor(
            [
                [one.repetition_penalty for one in sampling],
                [one.length_penalty for one in sampling],
                [one.listen_scale for one in sampling],
                [one.temperature for one in sampling],
                [one.top_p for one in sampling],
            ],
            dtype=torch.float32,
        )
        numbers = torch.tensor(
            [
                [one.listen_top_k for one in sampling],
                [one.top_k for one in sampling],
                [draw.seed for draw in draws],
                [draw.counter for draw in draws],
                [draw.draws is Draws.MOST_LIKELY for draw in draws],
                [draw.turn is Turn.OPEN for draw in draws],
                [draw.turn is Turn.BY_LAST for draw in draws],
                [draw.must_speak for draw in draws],
            ],
            dtype=torch.int64,
        )
        repetition, length, listen_scale, temperature, top_p = upload(fractions, self._device)
        *columns, is_open, follows_last, must_speak = upload(numbers, self._device)
        listen_top_k, top_k, seeds, counters, is_greedy = columns
        rules = TextRules(
            forbidden=self._forbidden,
            chunk_eos=self._special.duplex.chunk_eos,
            turn_eos=self._special.duplex.turn_eos,
            listen=self._special.duplex.listen,
            history=history,
            repetition_penalty=repetition,
            length_penalty=length,
            listen_scale=listen_scale,
            listen_top_k=listen_top_k,
            must_speak=must_speak.bool(),
            is_greedy=is_greedy.bool(),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seeds=seeds,
            counters=counters,
        )
        return rules, is_open.bool(), follows_last.bool()
