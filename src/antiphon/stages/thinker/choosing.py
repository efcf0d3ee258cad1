"""The thinker's draws: from the states of many sessions to a token for each, by each one's own rules.

The rules themselves are in kernels/sampling; this lines up their operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.core.sampling import Draws, TextSampling
from antiphon.kernels.sampling.contract import TextRules
from antiphon.kernels.sampling.op import sample_text
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.models.minicpmo.tokens import SpecialTokens


@dataclass(frozen=True, slots=True)
class TextDraw:
    """How one session chooses its next token.

    history: ids that the repetition penalty sees, at most the sampling's window.
    seed, counter: of the random numbers.
    """

    sampling: TextSampling
    draws: Draws
    history: tuple[int, ...]
    seed: int
    counter: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """is_recorded: whether the repetition penalty will see the token."""

    token: int
    is_recorded: bool


class TextChooser:
    """Owns the output head's use and the constant operands of the rules."""

    def __init__(self, network: ThinkerNetwork, special: SpecialTokens) -> None:
        self._network = network
        self._special = special
        self._device = network.lm_head.weight.device
        forbidden = torch.zeros(network.config.vocab_size, dtype=torch.bool)
        forbidden[list(special.forbidden)] = True
        self._forbidden = forbidden.to(self._device)

    def __call__(self, states: Tensor, draws: Sequence[TextDraw]) -> list[Chosen]:
        """states: [M, hidden], one row per draw."""
        choice = sample_text(self._network.logits(states), self._rules(draws))
        pairs = zip(choice.ids.tolist(), choice.is_recorded.tolist(), strict=True)
        return [Chosen(token, is_recorded) for token, is_recorded in pairs]

    def _rules(self, draws: Sequence[TextDraw]) -> TextRules:
        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        def whole(values: Sequence[int]) -> Tensor:
            return column(values, torch.int64)

        sampling = [draw.sampling for draw in draws]
        width = max(one.repetition_window_tokens for one in sampling)
        history = [[*draw.history, *[-1] * (width - len(draw.history))] for draw in draws]
        return TextRules(
            forbidden=self._forbidden,
            chunk_eos=self._special.duplex.chunk_eos,
            turn_eos=self._special.duplex.turn_eos,
            listen=self._special.duplex.listen,
            history=torch.tensor(history, dtype=torch.int64, device=self._device),
            repetition_penalty=column([one.repetition_penalty for one in sampling]),
            length_penalty=column([one.length_penalty for one in sampling]),
            listen_scale=column([one.listen_scale for one in sampling]),
            listen_top_k=whole([one.listen_top_k for one in sampling]),
            is_greedy=column([draw.draws is Draws.MOST_LIKELY for draw in draws], torch.bool),
            temperature=column([one.temperature for one in sampling]),
            top_k=whole([one.top_k for one in sampling]),
            top_p=column([one.top_p for one in sampling]),
            seeds=whole([draw.seed for draw in draws]),
            counters=whole([draw.counter for draw in draws]),
        )
