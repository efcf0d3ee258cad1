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
from antiphon.kernels.sampling.contract import ChatRules, TextRules
from antiphon.kernels.sampling.op import sample_chat, sample_text
from antiphon.kernels.transfer import Download, upload
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.models.minicpmo.tokens import SpecialTokens
from antiphon.stages.draw_table import DrawPlace, DrawSlot, DrawTable, Past


class Turn(Enum):
    """Whether an answer goes on where a token is drawn."""

    OPEN = "open"
    CLOSED = "closed"
    BY_LAST = "by_last"
    """Open unless the slot's newest draw, which the host may not know yet, ended it."""


@dataclass(frozen=True, slots=True)
class UnitDraw:
    """How a call chooses its next token. must_speak: a word. seed, counter: of the random numbers.

    script: what draw after draw comes to instead, over and over, whatever was chosen; nothing if it is empty. Random
    weights do not know when to speak: a script lets them, at the price of the same work.
    """

    sampling: TextSampling
    draws: Draws
    place: DrawPlace
    turn: Turn
    must_speak: bool
    seed: int
    counter: int
    script: tuple[int, ...] = ()

    @property
    def scripted_id(self) -> int:
        """-1 if the model decides."""
        return self.script[self.counter % len(self.script)] if self.script else -1


@dataclass(frozen=True, slots=True)
class ChatDraw:
    """How a chat chooses its next token. is_spoken: only what can be said. seed, counter: of the random numbers."""

    sampling: TextSampling
    draws: Draws
    place: DrawPlace
    is_spoken: bool
    seed: int
    counter: int


TextDraw = UnitDraw | ChatDraw


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Per row: the id that was drawn, whether the history remembers it, what the network is given for it."""

    ids: Tensor
    is_recorded: Tensor
    fed: Tensor


class TextChooser:
    """Owns the output head's use, the constant operands of the rules, and what was drawn."""

    def __init__(self, network: ThinkerNetwork, special: SpecialTokens) -> None:
        self._network = network
        self._special = special
        self._device = network.lm_head.weight.device
        self.table = DrawTable(self._device)
        written, spoken = (*special.chat.decisions,), (*special.chat.decisions, *special.unspeakable)
        self._forbidden = self._mask(special.forbidden)
        self._forbidden_in_chats = torch.stack([self._mask(written), self._mask(spoken)])

    def choose(self, states: Tensor, draws: Sequence[TextDraw]) -> Download:
        """One id per draw, [M] int64. states: [M, hidden]. A failed call leaves nothing behind."""
        past = self.table.past([draw.place for draw in draws])
        logits = self._network.logits(states)
        units = [draw for draw in draws if isinstance(draw, UnitDraw)]
        chats = [draw for draw in draws if isinstance(draw, ChatDraw)]
        if not chats:
            chosen = self._choose_in_units(logits, units, past.history, past.last)
        elif not units:
            chosen = self._choose_in_chats(logits, chats, past.history)
        else:
            chosen = self._choose_in_both(logits, draws, past)
        ids = Download(chosen.ids)
        self.table.record(past, chosen.ids, chosen.is_recorded, chosen.fed)
        return ids

    def embed_drawn(self, slots: Sequence[DrawSlot]) -> Tensor:
        """[len(slots), hidden], the inputs for each slot's newest draw."""
        return self._network.embed(self.table.fed(slots))

    def _mask(self, ids: Sequence[int]) -> Tensor:
        """[V] bool, where these ids are."""
        mask = torch.zeros(self._network.config.vocab_size, dtype=torch.bool)
        mask[list(ids)] = True
        return mask.to(self._device)

    def _choose_in_both(self, logits: Tensor, draws: Sequence[TextDraw], past: Past) -> _Chosen:
        """Rows of calls and of chats in one step, each by its own rules."""
        units = [(row, draw) for row, draw in enumerate(draws) if isinstance(draw, UnitDraw)]
        chats = [(row, draw) for row, draw in enumerate(draws) if isinstance(draw, ChatDraw)]
        rows = [row for row, _ in (*units, *chats)]
        order = upload(torch.tensor(rows, dtype=torch.int64), self._device)
        u, c = torch.split(order, [len(units), len(chats)])
        in_units = self._choose_in_units(logits[u], [draw for _, draw in units], past.history[u], past.last[u])
        in_chats = self._choose_in_chats(logits[c], [draw for _, draw in chats], past.history[c])
        back = order.argsort()
        return _Chosen(
            torch.cat([in_units.ids, in_chats.ids])[back],
            torch.cat([in_units.is_recorded, in_chats.is_recorded])[back],
            torch.cat([in_units.fed, in_chats.fed])[back],
        )

    def _choose_in_units(self, logits: Tensor, draws: Sequence[UnitDraw], history: Tensor, last: Tensor) -> _Chosen:
        """logits: [M, V]. history: [M, W] int64. last: [M] int64, each slot's newest draw."""
        rules, is_open, follows_last = self._operands(draws, history)
        choice = sample_text(logits, rules)
        ids = self._as_scripted(choice.ids, draws)
        duplex = self._special.duplex
        is_open = is_open | (follows_last & (last != duplex.turn_eos))
        # An open turn cannot be listened away: UnitDecisions.take says the same on the host.
        fed = ids.masked_fill((ids == duplex.listen) & is_open, duplex.tts_bos)
        return _Chosen(ids, choice.is_recorded, fed)

    def _as_scripted(self, ids: Tensor, draws: Sequence[UnitDraw]) -> Tensor:
        """ids: [M] int64, as they were chosen. The same tensor if no draw has a script, as in every server."""
        if not any(draw.script for draw in draws):
            return ids
        scripted = upload(torch.tensor([draw.scripted_id for draw in draws], dtype=torch.int64), self._device)
        return torch.where(scripted < 0, ids, scripted)

    def _choose_in_chats(self, logits: Tensor, draws: Sequence[ChatDraw], history: Tensor) -> _Chosen:
        """logits: [M, V]. history: [M, W] int64."""
        fractions = torch.tensor(
            [
                [draw.sampling.repetition_penalty for draw in draws],
                [draw.sampling.temperature for draw in draws],
                [draw.sampling.top_p for draw in draws],
            ],
            dtype=torch.float32,
        )
        numbers = torch.tensor(
            [
                [draw.sampling.top_k for draw in draws],
                [draw.seed for draw in draws],
                [draw.counter for draw in draws],
                [draw.draws is Draws.MOST_LIKELY for draw in draws],
                [draw.is_spoken for draw in draws],
            ],
            dtype=torch.int64,
        )
        repetition_penalty, temperature, top_p = upload(fractions, self._device)
        top_k, seeds, counters, is_greedy, is_spoken = upload(numbers, self._device)
        rules = ChatRules(
            forbidden=self._forbidden_in_chats[is_spoken],
            history=history,
            repetition_penalty=repetition_penalty,
            is_greedy=is_greedy.bool(),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seeds=seeds,
            counters=counters,
        )
        ids = sample_chat(logits, rules)
        return _Chosen(ids, torch.ones_like(ids, dtype=torch.bool), ids)

    def _operands(self, draws: Sequence[UnitDraw], history: Tensor) -> tuple[TextRules, Tensor, Tensor]:
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
