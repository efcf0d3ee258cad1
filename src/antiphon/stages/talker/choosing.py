"""The talker's draws: from the states of many sessions to a codec token for each, by each one's own rules.

The rules themselves are in kernels/sampling; this lines up their operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.core.sampling import CodecSampling, Draws
from antiphon.kernels.sampling.contract import CodecRules
from antiphon.kernels.sampling.op import sample_codec
from antiphon.models.minicpmo.talker import TalkerNetwork


@dataclass(frozen=True, slots=True)
class CodecDraw:
    """How one session chooses its next codec token.

    history: tokens that the repetition penalty sees, at most the sampling's window.
    is_eos_masked: the segment may not end here.
    seed, counter: of the random numbers.
    """

    sampling: CodecSampling
    draws: Draws
    history: tuple[int, ...]
    is_eos_masked: bool
    seed: int
    counter: int


class CodecChooser:
    """Owns the codec head's use."""

    def __init__(self, network: TalkerNetwork) -> None:
        self._network = network

    def __call__(self, states: Tensor, draws: Sequence[CodecDraw]) -> list[int]:
        """states: [M, hidden], one row per draw."""
        tokens: list[int] = sample_codec(self._network.logits(states), _rules(draws, states.device)).tolist()
        return tokens


def _rules(draws: Sequence[CodecDraw], device: torch.device) -> CodecRules:
    width = max(len(draw.history) for draw in draws)
    history = [[*draw.history, *[-1] * (width - len(draw.history))] for draw in draws]

    def whole(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return CodecRules(
        history=torch.tensor(history, dtype=torch.int64, device=device),
        repetition_penalty=torch.tensor([draw.sampling.repetition_penalty for draw in draws], device=device),
        temperature=torch.tensor([draw.sampling.temperature for draw in draws], device=device),
        is_eos_masked=torch.tensor([draw.is_eos_masked for draw in draws], device=device),
        is_greedy=torch.tensor([draw.draws is Draws.MOST_LIKELY for draw in draws], device=device),
        seeds=whole([draw.seed for draw in draws]),
        counters=whole([draw.counter for draw in draws]),
    )
