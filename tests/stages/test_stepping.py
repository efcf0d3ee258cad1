"""Sessions that share steps on one small random decoder: each as if alone, whatever happens to its neighbours."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import build
from antiphon.core.context import Context
from antiphon.core.window import SlideMode
from antiphon.errors import InputError
from antiphon.models.minicpmo.checkpoint import Part, WeightFile
from antiphon.models.minicpmo.config import DecoderConfig
from antiphon.models.minicpmo.decoder import Decoder
from antiphon.models.minicpmo.tiny.weights import random_weights
from antiphon.stages.paged import CacheConfig, PagedDecoder, Row
from antiphon.stages.stepping import MAX_STEP_TOKENS, Finished, Reply, Request, StepLoop, Steps

CONFIG = DecoderConfig(
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    has_qk_norm=False,
)
CACHE = CacheConfig(num_blocks=400, block_size=4)

Work = Steps[int, int, list[int]]
Loop = StepLoop[int, int, list[int]]


@dataclass(frozen=True, slots=True)
class Script:
    """A session that feeds rows of these sizes, drawing after each. fails_after: rows after which it gives up."""

    seed: int
    rows: tuple[int, ...]
    fails_after: int = 999

    def work(self, context: Context) -> Work:
        generator = torch.Generator().manual_seed(self.seed)
        drawn: list[int] = []
        for number, num_tokens in enumerate(self.rows):
            if number == self.fails_after:
                raise InputError(f"script {self.seed} gives up")
            embeds = torch.randn(num_tokens, CONFIG.hidden_size, generator=generator)
            reply = yield Request(Row(context, context.append(num_tokens), embeds), draw=self.seed)
            assert reply.states.shape == embeds.shape
            assert reply.choice is not None
            drawn.append(reply.choice)
        return drawn


def choose(states: Tensor, draws: Sequence[int]) -> list[int]:
    """Depends on the session's state and on its own draw only; coarse, so that rounding does not matter."""
    return [round(1000 * float(state.sum())) // 50 + draw for state, draw in zip(states, draws, strict=True)]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def network() -> Decoder:
    with torch.device("meta"):
        network = Decoder(CONFIG)
    network.load_state_dict(random_weights(Part("decoder", network, WeightFile.MAIN, "")), assign=True)
    return network


def new_decoder(network: Decoder) -> PagedDecoder:
    return PagedDecoder(network, CONFIG, CACHE, torch.device("cpu"), torch.float32)


def new_context(decoder: PagedDecoder) -> Context:
    return Context(decoder.pool, SlideMode.ROTATE_QUERY, max_tokens=10_000)


def alone(network: Decoder, script: Script) -> list[int]:
    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, choose)
    return build.run_alone(loop, script.work(new_context(decoder)))


def drain(loop: Loop) -> Iterator[Finished[list[int]]]:
    while not loop.is_idle:
        yield from loop.step()


scripts = st.lists(
    st.builds(Script, seed=st.integers(0, 99), rows=st.lists(st.integers(1, 30), min_size=1, max_size=6).map(tuple)),
    min_size=1,
    max_size=6,
)


@given(crowd=scripts)
def test_a_session_in_a_crowd_draws_what_it_draws_alone(network: Decoder, crowd: list[Script]) -> None:
    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, choose)
    contexts = [new_context(decoder) for _ in crowd]
    together = build.run_together(loop, ((str(i), script.work(contexts[i])) for i, script in enumerate(crowd)))
    for number, script in enumerate(crowd):
        assert together[str(number)] == pytest.approx(alone(network, script), abs=1)
    for context in contexts:
        context.free()
    decoder.pool.check([])


def test_one_that_fails_ends_with_its_error_and_the_others_go_on(network: Decoder) -> None:
    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, choose)
    good, bad = Script(1, (5, 1, 1, 1)), Script(2, (3, 1, 1, 1), fails_after=2)
    works = ((name, s.work(new_context(decoder))) for name, s in (("good", good), ("bad", bad)))
    ends = build.run_together(loop, works)
    assert isinstance(ends["bad"], InputError)
    assert ends["good"] == alone(network, good)


def test_one_that_fails_before_its_first_row_never_enters_a_step(network: Decoder) -> None:
    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, choose)
    context = new_context(decoder)
    loop.add("bad", Script(1, (3,), fails_after=0).work(context), deadline_s=0.0)
    (finished,) = loop.step()
    assert isinstance(finished.result, InputError)
    assert loop.is_idle
    assert context.num_tokens == 0


@pytest.mark.parametrize("num_steps_before", range(5))
def test_one_that_is_cancelled_at_any_step_is_gone_and_the_others_do_not_notice(
    network: Decoder, num_steps_before: int
) -> None:
    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, choose)
    stays, goes = Script(1, (5, 1, 7, 1, 1)), Script(2, (3, 9, 1, 1, 1))
    contexts = {name: new_context(decoder) for name in ("stays", "goes")}
    loop.add("stays", stays.work(contexts["stays"]), 0.0)
    loop.add("goes", goes.work(contexts["goes"]), 0.0)
    for _ in range(num_steps_before):
        loop.step()
    loop.cancel("goes")
    loop.cancel("goes")
    contexts["goes"].free()
    (end,) = drain(loop)
    assert end.session_id == "stays"
    assert end.result == alone(network, stays)
    contexts["stays"].free()
    decoder.pool.check([])


def test_cancelling_lets_the_session_clean_up(network: Decoder) -> None:
    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, choose)
    context = new_context(decoder)
    cleaned: list[str] = []

    def work() -> Work:
        try:
            return (yield from Script(1, (3, 1, 1)).work(context))
        finally:
            cleaned.append("yes")

    loop.add("a", work(), 0.0)
    loop.step()
    loop.cancel("a")
    assert cleaned == ["yes"]


def test_a_step_takes_no_more_tokens_than_its_budget(network: Decoder) -> None:
    decoder = new_decoder(network)
    sizes: list[int] = []

    def watched(states: Tensor, draws: Sequence[int]) -> list[int]:
        sizes.append(len(draws))
        return choose(states, draws)

    loop: Loop = StepLoop(decoder, watched)
    large = MAX_STEP_TOKENS // 2 - 1
    for number in range(5):
        loop.add(str(number), Script(number, (large,)).work(new_context(decoder)), deadline_s=float(number))
    assert {end.session_id for end in loop.step()} == {"0", "1"}
    assert {end.session_id for end in loop.step()} == {"2", "3"}
    assert {end.session_id for end in loop.step()} == {"4"}
    assert sizes == [2, 2, 1]


def test_a_failure_of_work_run_alone_is_raised(network: Decoder) -> None:
    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, choose)
    with pytest.raises(InputError, match="gives up"):
        build.run_alone(loop, Script(3, (2, 2), fails_after=1).work(new_context(decoder)))


def test_work_that_needs_no_step_ends_at_once(network: Decoder) -> None:
    loop: Loop = StepLoop(new_decoder(network), choose)

    def nothing() -> Generator[Request[int], Reply[int], list[int]]:
        return []
        yield

    loop.add("a", nothing(), 0.0)
    assert loop.step() == (Finished("a", []),)
    loop.add("a", nothing(), 0.0)
    loop.cancel("a")
    assert loop.step() == ()


def test_work_that_is_driven_to_its_end_takes_others_along_and_keeps_their_ends(network: Decoder) -> None:
    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, choose)
    short, long = Script(1, (3, 1)), Script(2, (4, 1, 1, 1, 1))
    loop.add("short", short.work(new_context(decoder)), 0.0)
    assert loop.run("long", long.work(new_context(decoder)), 0.0) == alone(network, long)
    assert not loop.is_idle
    assert loop.step() == (Finished("short", alone(network, short)),)
    assert loop.is_idle
