"""`antiphon bench cache`: what it costs in precision to keep keys and values in float8, and whether slides add to it.

One context is computed twice from the same inputs, with keys and values as the model computes them and in float8. Its
window slides by rotate_query again and again, and the states of each unit are compared, by how many slides came before
it. Shown by tests/bench/test_cache_error.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from antiphon.bench.contexts import PROMPT_TOKENS
from antiphon.bench.results import BenchResult, Figure, Quantity, Unit
from antiphon.bench.target import Target
from antiphon.core.cache_dtype import CacheDtype
from antiphon.core.window import BasicWindow, SlideMode
from antiphon.models.minicpmo.model import Section
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.models.minicpmo.tokens import TextTokenizer
from antiphon.stages.paged import CacheConfig
from antiphon.stages.stepping import Steps
from antiphon.stages.thinker.choosing import TextDraw
from antiphon.stages.thinker.decider import Decider
from antiphon.stages.thinker.memory import ThinkerMemory
from antiphon.stages.thinker.state import PromptDone


@dataclass(frozen=True, slots=True)
class CachePlan:
    """context_tokens: above which the window slides, to three quarters of them. unit_tokens: fed at once."""

    context_tokens: int
    unit_tokens: int
    num_slides: int


@dataclass(frozen=True, slots=True)
class CacheError:
    """Of a unit's tokens, in float8 against the model's own numbers.

    num_slides: that came before it.
    relative_error: of the final states, root of the squares' sum over that of the states themselves.
    same_tokens: the part of the tokens after which the head has the same most likely one.
    divergence_nats: Kullback-Leibler, of what the head's softmax is from what it should be; mean over the tokens.
    """

    num_slides: int
    relative_error: float
    same_tokens: float
    divergence_nats: float


def run_cache(target: Target, plan: CachePlan) -> BenchResult:
    network = target.source.load(Section.THINKER, target.device, target.torch_dtype).thinker
    errors: defaultdict[int, list[CacheError]] = defaultdict(list)
    with torch.inference_mode():
        for error in cache_errors(network, target.source.tokenizer(), plan):
            errors[error.num_slides].append(error)
    case = f"over {plan.context_tokens} tokens, units of {plan.unit_tokens}"
    return BenchResult(
        name="cache",
        environment=target.environment(),
        figures=tuple(figure for number, units in errors.items() for figure in _figures(case, number, units)),
        notes=(
            "One context of tokens drawn at random, computed twice: with keys and values in the model's dtype, and in "
            "float8_e4m3. Each value is one unit; sizes are numbers of slides before it.",
        ),
    )


def cache_errors(network: ThinkerNetwork, tokenizer: TextTokenizer, plan: CachePlan) -> Iterator[CacheError]:
    """Of each unit in turn, up to the one that would slide once more than the plan says."""
    plain, float8 = (_Context.of(network, tokenizer, plan, kept_in) for kept_in in CacheDtype)
    generator = torch.Generator().manual_seed(0)

    def inputs(num_tokens: int) -> Tensor:
        ids = torch.randint(network.config.vocab_size, (num_tokens,), generator=generator)
        return network.embed_ids(tuple(ids.tolist()))

    prompt = inputs(min(PROMPT_TOKENS, plan.context_tokens // 4))
    for context in (plain, float8):
        context.begin(prompt)
    num_slides = 0
    while True:
        unit = inputs(plan.unit_tokens)
        want, got = (context.live(unit) for context in (plain, float8))
        yield _compared(network, want.states, got.states, num_slides)
        assert want.has_slid is got.has_slid, "one context slides without the other"
        num_slides += want.has_slid
        if num_slides > plan.num_slides:
            return


@dataclass(frozen=True, slots=True, eq=False)
class _Lived:
    """states: [T, hidden], final ones of a unit."""

    states: Tensor
    has_slid: bool


@dataclass(slots=True, eq=False)
class _Context:
    """One of the two."""

    decider: Decider
    memory: ThinkerMemory
    num_units: int = 0

    @staticmethod
    def of(network: ThinkerNetwork, tokenizer: TextTokenizer, plan: CachePlan, kept_in: CacheDtype) -> _Context:
        max_tokens = plan.context_tokens + plan.unit_tokens
        blocks = replace(CacheConfig.for_tokens(max_tokens, num_segments=2), dtype=kept_in)
        decider = Decider(network, tokenizer, blocks)
        window = BasicWindow(plan.context_tokens, plan.context_tokens * 3 // 4)
        return _Context(decider, ThinkerMemory(network, decider.decoder, window, SlideMode.ROTATE_QUERY, max_tokens))

    def begin(self, prompt: Tensor) -> None:
        """prompt: [n, hidden]."""

        def work() -> Steps[TextDraw, PromptDone]:
            yield from self.memory.feed_prompt(prompt)
            return PromptDone(self.memory.context.num_tokens)

        self.decider.loop.run("cache", work(), deadline_s=0.0)

    def live(self, unit: Tensor) -> _Lived:
        """unit: [T, hidden]."""
        seen: list[_Lived] = []

        def work() -> Steps[TextDraw, PromptDone]:
            states = yield from self.memory.feed(unit)
            slide = yield from self.memory.close_unit(self.num_units, ())
            seen.append(_Lived(states, slide is not None))
            return PromptDone(self.memory.context.num_tokens)

        self.decider.loop.run("cache", work(), deadline_s=0.0)
        self.num_units += 1
        return seen[0]


def _compared(network: ThinkerNetwork, want: Tensor, got: Tensor, num_slides: int) -> CacheError:
    """want, got: [T, hidden], states of the same tokens."""
    wide = want.double()
    relative_error = (got.double() - wide).norm() / wide.norm()
    likely, likelihood = (network.logits(states).float().log_softmax(dim=-1) for states in (want, got))
    divergence = (likely.exp() * (likely - likelihood)).sum(dim=-1).mean()
    same_tokens = (likely.argmax(dim=-1) == likelihood.argmax(dim=-1)).float().mean()
    return CacheError(num_slides, relative_error.item(), same_tokens.item(), divergence.item())


def _figures(case: str, num_slides: int, units: list[CacheError]) -> Iterator[Figure]:
    size = ("slides", num_slides)
    errors = [unit.relative_error for unit in units]
    yield Figure.of(Quantity.STATE_ERROR, case, size, Unit.PERCENT, [[100 * error for error in errors]])
    if all(errors):
        yield Figure.of(Quantity.STATE_TO_ERROR, case, size, Unit.DB, [[-20 * math.log10(error) for error in errors]])
    yield Figure.of(Quantity.SAME_TOKENS, case, size, Unit.PERCENT, [[100 * unit.same_tokens for unit in units]])
    yield Figure.of(Quantity.DIVERGENCE, case, size, Unit.NATS, [[unit.divergence_nats for unit in units]])
