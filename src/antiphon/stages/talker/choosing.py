"""The talker's draws: from the states of many sessions to a codec token for each, by each one's own rules.

The rules themselves are in kernels/sampling; this lines up their operands and remembers what was drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from antiphon.core.sampling import CodecSampling, Draws
from antiphon.kernels.sampling.contract import CodecCut, CodecRules
from antiphon.kernels.sampling.op import sample_codec
from antiphon.kernels.transfer import Download
from antiphon.models.minicpmo.captured import NumRuns, Recorder
from antiphon.models.minicpmo.talker import TalkerNetwork
from antiphon.stages.draw_graphs import DrawColumns, DrawGraphs, on_device
from antiphon.stages.draw_table import NOBODY, DrawPlace, DrawSlot, DrawTable, Newest, place_columns


class CodecDraw(NamedTuple):
    """How one session chooses its next codec token. A tuple, as its place is.

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
    """Owns the codec head's use, and what was drawn. padding: a draw that is nobody's."""

    def __init__(self, network: TalkerNetwork) -> None:
        self._network = network
        self.table = DrawTable(network.emb_text.weight.device)
        # Draws of steps with chats, which are not recorded.
        self._num_apart = NumRuns()
        nobody = DrawPlace(DrawSlot(NOBODY), Newest.FORGOTTEN, 1)
        padding = CodecDraw(CodecSampling(), Draws.MOST_LIKELY, nobody, is_eos_masked=False, seed=0, counter=0)
        self.padding = _columns([padding], place_columns([nobody]))
        self._graphs = DrawGraphs(self.draw_of_all, self.table, self.padding, network.emb_text.weight.dtype)

    def capture(self, max_draws: int, recorder: Recorder) -> Iterator[int]:
        """As `DrawGraphs.capture`: of calls; chats, which are few, draw launch by launch."""
        window_tokens = CodecSampling().repetition_window_tokens
        return self._graphs.capture(max_draws, window_tokens, self._network.emb_text.weight.shape[1], recorder)

    @property
    def num_runs(self) -> NumRuns:
        return self._graphs.num_runs + self._num_apart

    def choose(self, states: Tensor, draws: Sequence[CodecDraw]) -> Download:
        """One token per draw, [M] int64. states: [M, hidden]. A failed call leaves nothing behind."""
        columns = self.columns(draws)
        if any(draw.sampling.is_cut for draw in draws):
            self._num_apart = self._num_apart.one_more(is_replayed=False)
            return Download(self._draw_of_some(states, *on_device(columns, self.table.device)))
        return Download(self._graphs.run(states, columns))

    def columns(self, draws: Sequence[CodecDraw]) -> DrawColumns:
        """What draws are made by; of sessions that hold a slot, each once."""
        return _columns(draws, self.table.columns([draw.place for draw in draws]))

    def embed_drawn(self, slots: Sequence[DrawSlot]) -> Tensor:
        """[len(slots), hidden], the inputs for each slot's newest draw."""
        return self._network.embed_codes(self.table.fed(slots))

    def draw_of_all(self, states: Tensor, whole: Tensor, fractions: Tensor) -> Tensor:
        """Where no row's choice is cut; as `Draw`."""
        return self._draw(states, whole, fractions, None)

    def _draw_of_some(self, states: Tensor, whole: Tensor, fractions: Tensor) -> Tensor:
        """Where some row's choice is; as `Draw`."""
        *_, is_cut, top_k = whole
        return self._draw(states, whole, fractions, CodecCut(is_cut.bool(), fractions[2], top_k))

    def _draw(self, states: Tensor, whole: Tensor, fractions: Tensor, cut: CodecCut | None) -> Tensor:
        past = self.table.past(whole[:4])
        is_eos_masked, is_greedy, seeds, counters, _, _ = whole[4:]
        rules = CodecRules(
            history=past.history,
            repetition_penalty=fractions[0],
            temperature=fractions[1],
            is_eos_masked=is_eos_masked.bool(),
            is_greedy=is_greedy.bool(),
            seeds=seeds,
            counters=counters,
            cut=cut,
        )
        tokens = sample_codec(self._network.logits(states), rules)
        # The end of what is said is no token of it: a chat goes on after it in the same history.
        self.table.record(past, tokens, tokens != self._network.config.num_codec_tokens - 1, tokens)
        return tokens


def _columns(draws: Sequence[CodecDraw], places: list[list[int]]) -> DrawColumns:
    """places: `DrawTable.columns` of the draws."""
    most_likely = Draws.MOST_LIKELY  # looked up once, as in `place_columns`
    sampling = [draw.sampling for draw in draws]
    return DrawColumns(
        whole=[
            *places,
            [draw.is_eos_masked for draw in draws],
            [draw.draws is most_likely for draw in draws],
            [draw.seed for draw in draws],
            [draw.counter for draw in draws],
            [one.is_cut for one in sampling],
            [one.top_k for one in sampling],
        ],
        fractions=[
            [one.repetition_penalty for one in sampling],
            [one.temperature for one in sampling],
            [one.top_p for one in sampling],
        ],
    )
