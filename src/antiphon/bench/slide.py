"""`antiphon bench slide`: what it costs to remove the oldest units, in each of the three ways.

`rotate_query` is bookkeeping: host time, by the length of the context. `rotate_keys` is that and one operator, beside a
copy of as many bytes. `reprefill` computes the ring again. Shown by tests/bench/test_slide.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from antiphon.bench.contexts import PROMPT_TOKENS, UNIT_TOKENS
from antiphon.bench.results import BenchResult, Figure, Limit, Quantity, Summary, Unit
from antiphon.bench.target import Target
from antiphon.bench.timing import StepTime, operator_times_us, timed
from antiphon.core.window import BasicWindow, SlideMode
from antiphon.kernels.rotate_keys.op import rotate_keys
from antiphon.models.minicpmo.model import Section
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.stages.paged import CacheConfig
from antiphon.stages.stepping import Steps
from antiphon.stages.thinker.choosing import TextDraw
from antiphon.stages.thinker.decider import Decider
from antiphon.stages.thinker.memory import ThinkerMemory
from antiphon.stages.thinker.state import PromptDone

ResultSteps = Steps[TextDraw, PromptDone]


@dataclass(frozen=True, slots=True)
class SlidePlans:
    """context_tokens: lengths at which a window slides, to three quarters of them. num_slides: of each repetition.

    num_reprefills: in all, since each computes thousands of tokens.
    """

    context_tokens: tuple[int, ...]
    num_slides: int
    num_repetitions: int
    num_reprefills: int


def run_slide(target: Target, plans: SlidePlans) -> BenchResult:
    network = target.source.load(Section.THINKER, target.device, target.torch_dtype).thinker
    blocks = CacheConfig.for_tokens(max(plans.context_tokens) + UNIT_TOKENS, num_segments=2)
    decider = Decider(network, target.source.tokenizer(), blocks)
    with torch.inference_mode():
        figures = tuple(_figures(_Bench(target, network, decider, plans)))
    return BenchResult(
        name="slide",
        environment=target.environment(),
        figures=figures,
        notes=(
            "A slide is what follows the end of a unit that takes the context over its limit: the window's plan, its "
            "transaction, and what the cache needs then. Each value is one slide, of a quarter of the context. The "
            "operator of rotate_keys by itself, on the surviving keys of all layers, is beside a copy of them.",
        ),
    )


def _figures(bench: _Bench) -> Iterator[Figure]:
    plans = bench.plans
    for num_tokens in plans.context_tokens:
        size = ("tokens", num_tokens)
        query = [bench.slides(num_tokens, SlideMode.ROTATE_QUERY) for _ in range(plans.num_repetitions)]
        yield Figure.of(Quantity.SLIDE_HOST_TIME, "rotate_query", size, Unit.US, _of(query, lambda one: one.host_ms))
        keys = [bench.slides(num_tokens, SlideMode.ROTATE_KEYS) for _ in range(plans.num_repetitions)]
        yield Figure.of(Quantity.SLIDE_HOST_TIME, "rotate_keys", size, Unit.US, _of(keys, lambda one: one.host_ms))
        yield Figure.of(Quantity.SLIDE_TIME, "rotate_keys", size, Unit.US, _of(keys, lambda one: one.whole_ms))
        yield from bench.rotations(num_tokens)
        if plans.num_reprefills:
            anew = [[1000 * one.whole_ms] for one in bench.reprefills(num_tokens)]
            yield Figure.of(Quantity.SLIDE_TIME, "reprefill", size, Unit.US, anew)


def _of(repetitions: list[list[StepTime]], part: Callable[[StepTime], float]) -> list[list[float]]:
    """Microseconds."""
    return [[1000 * part(one) for one in times] for times in repetitions]


@dataclass(frozen=True, slots=True)
class _Bench:
    target: Target
    network: ThinkerNetwork
    decider: Decider
    plans: SlidePlans

    def slides(self, num_tokens: int, mode: SlideMode) -> list[StepTime]:
        """Of one context that grows, slides, grows again; nothing is computed but what the slide needs."""
        memory = self._memory(num_tokens, mode)
        memory.context.append_prompt(min(PROMPT_TOKENS, num_tokens // 2))
        times: list[StepTime] = []
        unit = 0
        while len(times) <= self.plans.num_slides:
            memory.context.append(UNIT_TOKENS)
            close = partial(self._close, memory, unit)
            if memory.context.num_tokens > num_tokens:
                times.append(timed(close, self.target.device))
            else:
                close()
            unit += 1
        memory.free()
        return times[1:]  # the first one warms up

    def reprefills(self, num_tokens: int) -> list[StepTime]:
        """Of contexts whose inputs are kept."""
        times = []
        for _ in range(self.plans.num_reprefills):
            memory = self._memory(num_tokens, SlideMode.REPREFILL)
            self._run(self._filled(memory, num_tokens))
            times.append(timed(partial(self._run, self._closed(memory)), self.target.device))
            memory.free()
        return times

    def rotations(self, num_tokens: int) -> Iterator[Figure]:
        """The operator alone, and a copy of as many bytes, one after the other in the same run."""
        cache, device = self.decider.decoder.cache, self.target.device
        num_units = (num_tokens * 3 // 4 - min(PROMPT_TOKENS, num_tokens // 2)) // UNIT_TOKENS
        slots = torch.arange(num_units * UNIT_TOKENS, device=device)
        num_slots = cache.keys.shape[1] * cache.block_size
        source = torch.zeros(len(slots) * cache.keys.nbytes // num_slots, dtype=torch.uint8, device=device)
        to, theta = torch.empty_like(source), self.decider.decoder.rope_theta
        num_repetitions, size = self.plans.num_slides, ("tokens", num_tokens)
        copied = operator_times_us([lambda: to.copy_(source)], device, num_repetitions)
        copy = Limit("copy", Summary.of(copied).p50)
        rotated = operator_times_us([lambda: rotate_keys(cache.keys, slots, -7, theta)], device, num_repetitions)
        for case, times, limits in (("copy", copied, []), ("rotate_keys", rotated, [copy])):
            yield Figure.of(Quantity.KERNEL_TIME, case, size, Unit.US, [times], limits)

    def _memory(self, num_tokens: int, mode: SlideMode) -> ThinkerMemory:
        window = BasicWindow(num_tokens, num_tokens * 3 // 4)
        return ThinkerMemory(self.network, self.decider.decoder, window, mode, num_tokens + UNIT_TOKENS)

    def _close(self, memory: ThinkerMemory, unit: int) -> None:
        for request in memory.close_unit(unit, ()):
            raise AssertionError(f"a slide without new tokens asks for {request}")

    def _filled(self, memory: ThinkerMemory, num_tokens: int) -> ResultSteps:
        """A prompt and units, computed; the last unit is open and takes the context over its limit.

        Units are long where the context is, so that filling it does not take longer than what is measured.
        """
        prompt_tokens, unit_tokens = min(PROMPT_TOKENS, num_tokens // 2), max(UNIT_TOKENS, num_tokens // 32)
        yield from memory.feed_prompt(self._embeds(prompt_tokens))
        unit = 0
        while memory.context.num_tokens + unit_tokens <= num_tokens:
            yield from memory.feed(self._embeds(unit_tokens))
            yield from memory.close_unit(unit, ())
            unit += 1
        yield from memory.feed(self._embeds(num_tokens + 1 - memory.context.num_tokens))
        return PromptDone(memory.context.num_tokens)

    def _closed(self, memory: ThinkerMemory) -> ResultSteps:
        yield from memory.close_unit(len(memory.context.units), ())
        return PromptDone(memory.context.num_tokens)

    def _embeds(self, num_tokens: int) -> torch.Tensor:
        return self.decider.embed(tuple(index % UNIT_TOKENS for index in range(num_tokens)))

    def _run(self, steps: ResultSteps) -> None:
        self.decider.loop.run("slide", steps, deadline_s=0.0)
