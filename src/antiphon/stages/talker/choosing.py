"""The talker's draws: from the states of many sessions to a codec token for each, by each one's own rules.

The rules themselves are in kernels/sampling; this lines up their operands and remembers what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.core.sampling import CodecSampling, Draws
from antiphon.kernels.sampling.contract import CodecCut, CodecRules
from antiphon.kernels.sampling.op import sample_codec
from antiphon.kernels.transfer import Download, upload
from antiphon.models.minicpmo.talker import TalkerNetwork
from antiphon.stages.draw_table import DrawPlace, DrawSlot, DrawTable


@dataclass(frozen=True, slots=True)
class CodecDraw:
    """How one session chooses its next codec token.

    is_eos_masked: the segment may not end here.
    seed, counter: of the random numbers.
    """

    sampling: CodecSampling
    draws: Draws
    place: DrawPlace
    is_eos_masked: bool
    seed: int
    counter: int


class CodecChooser:
    """Owns the codec head's use, and what was drawn."""

    def __init__(self, network: TalkerNetwork) -> None:
        self._network = network
        self.table = DrawTable(network.emb_text.weight.device)

    def choose(self, states: Tensor, draws: Sequence[CodecDraw]) -> Download:
        """One token per draw, [M] int64. states: [M, hidden]. A failed call leaves nothing behind."""
        past = self.table.past([draw.place for draw in draws])
        tokens = sample_codec(self._network.logits(states), _rules(draws, past.history))
        ids = Download(tokens)
        # The end of what is said is no token of it: a chat goes on after it in the same history.
        self.table.record(past, tokens, tokens != self._network.config.num_codec_tokens - 1, tokens)
        return ids

    def embed_drawn(self, slots: Sequence[DrawSlot]) -> Tensor:
        """[len(slots), hidden], the inputs for each slot's newest draw."""
        return self._network.embed_codes(self.table.fed(slots))


def _rules(draws: Sequence[CodecDraw], history: Tensor) -> CodecRules:
    """history: [M, W] int64, tokens that the repetition penalty sees."""
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
            [draw.is_eos_masked for draw in draws],
            [draw.draws is Draws.MOST_LIKELY for draw in draws],
            [draw.seed for draw in draws],
            [draw.counter for draw in draws],
            [draw.sampling.is_cut for draw in draws],
            [draw.sampling.top_k for draw in draws],
        ],
        dtype=torch.int64,
    )
    repetition_penalty, temperature, top_p = upload(fractions, history.device)
    is_eos_masked, is_greedy, seeds, counters, is_cut, top_k = upload(numbers, history.device)
    has_cuts = any(draw.sampling.is_cut for draw in draws)
    return CodecRules(
        history=history,
        repetition_penalty=repetition_penalty,
        temperature=temperature,
        is_eos_masked=is_eos_masked.bool(),
        is_greedy=is_greedy.bool(),
        seeds=seeds,
        counters=counters,
        cut=CodecCut(is_cut.bool(), top_p, top_k) if has_cuts else None,
    )
