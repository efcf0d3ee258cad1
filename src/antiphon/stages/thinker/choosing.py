"""The thinker's draws: from the states of many sessions to a token for each, by each one's own rules.

The rules themselves are in kernels/sampling; this lines up their operands and remembers what was drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from antiphon.core.sampling import Draws, TextSampling
from antiphon.kernels.sampling.contract import ChatRules, TextChoice, TextRules
from antiphon.kernels.sampling.op import sample_chat, sample_text
from antiphon.kernels.transfer import Download
from antiphon.models.minicpmo.captured import NumRuns, Recorder
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.models.minicpmo.tokens import SpecialTokens
from antiphon.stages.draw_graphs import DrawColumns, DrawGraphs, on_device
from antiphon.stages.draw_table import NOBODY, DrawPlace, DrawSlot, DrawTable, Newest, Past, place_columns


class Turn(Enum):
    """Whether an answer goes on where a token is drawn."""

    OPEN = "open"
    CLOSED = "closed"
    BY_LAST = "by_last"
    """Open unless the slot's newest draw, which the host may not know yet, ended it."""


class UnitDraw(NamedTuple):
    """How a call chooses its next token. A tuple, as its place is.

    must_speak: a word. seed, counter: of the random numbers.
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


class ChatDraw(NamedTuple):
    """How a chat chooses its next token. is_spoken: only what can be said. seed, counter: of the random numbers."""

    sampling: TextSampling
    draws: Draws
    place: DrawPlace
    is_spoken: bool
    seed: int
    counter: int


TextDraw = UnitDraw | ChatDraw


@dataclass(frozen=True, slots=True)
class _Operands:
    """The columns of a step's draws on the device, by name: [M] each, but place [4, M]; `DrawTable.past`.

    is_chat: which rules a row follows. follows_last: its turn is open unless the last draw ended it.
    scripted: -1 where the model decides.
    """

    place: Tensor
    seeds: Tensor
    counters: Tensor
    is_greedy: Tensor
    top_k: Tensor
    listen_top_k: Tensor
    is_open: Tensor
    follows_last: Tensor
    must_speak: Tensor
    scripted: Tensor
    is_chat: Tensor
    is_spoken: Tensor
    repetition_penalty: Tensor
    length_penalty: Tensor
    listen_scale: Tensor
    temperature: Tensor
    top_p: Tensor

    @staticmethod
    def of(whole: Tensor, fractions: Tensor) -> _Operands:
        """As `_columns` made them."""
        return _Operands(whole[:4], *whole[4:], *fractions)


def _columns(draws: Sequence[TextDraw], places: list[list[int]]) -> DrawColumns:
    """places: `DrawTable.columns` of the draws."""
    most_likely, is_open, by_last = Draws.MOST_LIKELY, Turn.OPEN, Turn.BY_LAST  # looked up once, as in `place_columns`
    sampling = [draw.sampling for draw in draws]
    units = [draw if isinstance(draw, UnitDraw) else _NOBODYS_DRAW for draw in draws]
    turns = [unit.turn for unit in units]
    return DrawColumns(
        whole=[
            *places,
            [draw.seed for draw in draws],
            [draw.counter for draw in draws],
            [draw.draws is most_likely for draw in draws],
            [one.top_k for one in sampling],
            [one.listen_top_k for one in sampling],
            [turn is is_open for turn in turns],
            [turn is by_last for turn in turns],
            [unit.must_speak for unit in units],
            [unit.scripted_id for unit in units],
            [isinstance(draw, ChatDraw) for draw in draws],
            [isinstance(draw, ChatDraw) and draw.is_spoken for draw in draws],
        ],
        fractions=[
            [one.repetition_penalty for one in sampling],
            [one.length_penalty for one in sampling],
            [one.listen_scale for one in sampling],
            [one.temperature for one in sampling],
            [one.top_p for one in sampling],
        ],
    )


_NO_SCRIPT = -1
_NOBODYS_DRAW = UnitDraw(
    TextSampling(),
    Draws.MOST_LIKELY,
    DrawPlace(DrawSlot(NOBODY), Newest.FORGOTTEN, window_tokens=1),
    Turn.CLOSED,
    must_speak=False,
    seed=0,
    counter=0,
)


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
        # Draws of steps with chats, which are not recorded.
        self._num_apart = NumRuns()
        padding = _columns([_NOBODYS_DRAW], place_columns([_NOBODYS_DRAW.place]))
        self._graphs = DrawGraphs(self._draw_in_units, self.table, padding, network.lm_head.weight.dtype)

    def capture(self, max_draws: int, recorder: Recorder) -> Iterator[int]:
        """As `DrawGraphs.capture`: of calls; chats, which are few, draw launch by launch."""
        window_tokens = TextSampling().repetition_window_tokens
        return self._graphs.capture(max_draws, window_tokens, self._network.lm_head.weight.shape[1], recorder)

    @property
    def num_runs(self) -> NumRuns:
        return self._graphs.num_runs + self._num_apart

    def choose(self, states: Tensor, draws: Sequence[TextDraw]) -> Download:
        """One id per draw, [M] int64. states: [M, hidden]. A failed call leaves nothing behind."""
        columns = _columns(draws, self.table.columns([draw.place for draw in draws]))
        if all(isinstance(draw, UnitDraw) for draw in draws):
            return Download(self._graphs.run(states, columns))
        self._num_apart = self._num_apart.one_more(is_replayed=False)
        return Download(self._draw_in_both(states, *on_device(columns, self._device)))

    def embed_drawn(self, slots: Sequence[DrawSlot]) -> Tensor:
        """[len(slots), hidden], the inputs for each slot's newest draw."""
        return self._network.embed(self.table.fed(slots))

    def _mask(self, ids: Sequence[int]) -> Tensor:
        """[V] bool, where these ids are."""
        mask = torch.zeros(self._network.config.vocab_size, dtype=torch.bool)
        mask[list(ids)] = True
        return mask.to(self._device)

    def _draw_in_units(self, states: Tensor, whole: Tensor, fractions: Tensor) -> Tensor:
        """Of calls only; as `Draw`."""
        operands = _Operands.of(whole, fractions)
        past = self.table.past(operands.place)
        choice, fed = self._choose_in_units(self._network.logits(states), operands, past)
        self.table.record(past, choice.ids, choice.is_recorded, fed)
        return choice.ids

    def _draw_in_both(self, states: Tensor, whole: Tensor, fractions: Tensor) -> Tensor:
        """Of calls and chats, each by its own rules; as `Draw`."""
        operands = _Operands.of(whole, fractions)
        past, is_chat = self.table.past(operands.place), operands.is_chat.bool()
        logits = self._network.logits(states)
        choice, fed = self._choose_in_units(logits, operands, past)
        in_chats = self._choose_in_chats(logits, operands, past)
        ids = torch.where(is_chat, in_chats, choice.ids)
        self.table.record(past, ids, choice.is_recorded | is_chat, torch.where(is_chat, in_chats, fed))
        return ids

    def _choose_in_units(self, logits: Tensor, operands: _Operands, past: Past) -> tuple[TextChoice, Tensor]:
        """logits: [M, V]. Returns the choice and what the network is given for it, [M] int64."""
        duplex = self._special.duplex
        rules = TextRules(
            forbidden=self._forbidden,
            chunk_eos=duplex.chunk_eos,
            turn_eos=duplex.turn_eos,
            listen=duplex.listen,
            history=past.history,
            repetition_penalty=operands.repetition_penalty,
            length_penalty=operands.length_penalty,
            listen_scale=operands.listen_scale,
            listen_top_k=operands.listen_top_k,
            must_speak=operands.must_speak.bool(),
            is_greedy=operands.is_greedy.bool(),
            temperature=operands.temperature,
            top_k=operands.top_k,
            top_p=operands.top_p,
            seeds=operands.seeds,
            counters=operands.counters,
        )
        choice = sample_text(logits, rules)
        ids = torch.where(operands.scripted == _NO_SCRIPT, choice.ids, operands.scripted)
        is_open = operands.is_open.bool() | (operands.follows_last.bool() & (past.last != duplex.turn_eos))
        # An open turn cannot be listened away: UnitDecisions.take says the same on the host.
        fed = ids.masked_fill((ids == duplex.listen) & is_open, duplex.tts_bos)
        return TextChoice(ids, choice.is_recorded), fed

    def _choose_in_chats(self, logits: Tensor, operands: _Operands, past: Past) -> Tensor:
        """logits: [M, V]. Returns ids [M] int64."""
        rules = ChatRules(
            forbidden=self._forbidden_in_chats[operands.is_spoken],
            history=past.history,
            repetition_penalty=operands.repetition_penalty,
            is_greedy=operands.is_greedy.bool(),
            temperature=operands.temperature,
            top_k=operands.top_k,
            top_p=operands.top_p,
            seeds=operands.seeds,
            counters=operands.counters,
        )
        return sample_chat(logits, rules)
