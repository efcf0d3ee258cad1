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
from antiphon.errors import AntiphonError, InputError, InternalError
from antiphon.kernels.transfer import Download
from antiphon.models.minicpmo.checkpoint import Part, WeightFile
from antiphon.models.minicpmo.config import DecoderConfig
from antiphon.models.minicpmo.decoder import Decoder
from antiphon.models.minicpmo.tiny.weights import random_weights
from antiphon.stages.draw_table import DrawSlot
from antiphon.stages.paged import CacheConfig, PagedDecoder
from antiphon.stages.step_packing import Row
from antiphon.stages.stepping import MAX_STEP_TOKENS, Drawn, Finished, Reply, Request, Settle, StepLoop, Steps

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


@dataclass(frozen=True, slots=True)
class Draw:
    """number: something that a session's choices depend on."""

    slot: DrawSlot
    number: int


Work = Steps[Draw, list[int]]
Loop = StepLoop[Draw, list[int]]


@dataclass(frozen=True, slots=True)
class Script:
    """A session that feeds rows of these sizes, drawing after each. fails_after: rows after which it gives up."""

    seed: int
    rows: tuple[int, ...]
    fails_after: int = 999

    def work(self, context: Context) -> Work:
        """Every draw is waited for."""
        generator = torch.Generator().manual_seed(self.seed)
        slot = DrawSlot(self.seed)
        drawn: list[int] = []
        for number, num_tokens in enumerate(self.rows):
            if number == self.fails_after:
                raise InputError(f"script {self.seed} gives up")
            embeds = torch.randn(num_tokens, CONFIG.hidden_size, generator=generator)
            reply = yield Request(Row(context, context.append(num_tokens)), embeds, Draw(slot, self.seed))
            assert reply.states.shape == embeds.shape
            assert torch.equal(reply.inputs, embeds)
            assert reply.drawn is not None
            yield Settle(reply.drawn)
            drawn.append(reply.drawn.read())
        return drawn

    def babble(self, context: Context, *, is_waiting: bool) -> Work:
        """Its first row, then one row for each other that is nothing but the last draw; read late unless it waits."""
        slot = DrawSlot(self.seed)
        inputs: Tensor | DrawSlot
        inputs = torch.randn(self.rows[0], CONFIG.hidden_size, generator=torch.Generator().manual_seed(self.seed))
        newest: list[Drawn] = []
        drawn: list[int] = []
        for number in range(len(self.rows)):
            row = Row(context, context.append(1 if number else self.rows[0]))
            reply = yield Request(row, inputs, Draw(slot, self.seed))
            if number:
                assert torch.equal(reply.arriving_state().read(), reply.states[0])
            drawn += (late.read() for late in newest)
            assert reply.drawn is not None
            newest, inputs = [reply.drawn], slot
            if is_waiting:
                yield Settle(reply.drawn)
                (number_drawn,) = (late.read() for late in newest)
                newest, inputs = [], embedding(number_drawn)
                drawn.append(number_drawn)
        for late in newest:
            yield Settle(late)
            drawn.append(late.read())
        return drawn


def embedding(drawn: int) -> Tensor:
    return torch.randn(1, CONFIG.hidden_size, generator=torch.Generator().manual_seed(drawn + 10_000))


class Dice:
    """Choices that depend on a session's state and on its own draw only; coarse, so that rounding does not matter."""

    def __init__(self) -> None:
        self.num_draws: list[int] = []
        self.newest: dict[DrawSlot, int] = {}

    def choose(self, states: Tensor, draws: Sequence[Draw]) -> Download:
        self.num_draws.append(len(draws))
        ids = [round(1000 * float(state.sum())) // 50 + draw.number for state, draw in zip(states, draws, strict=True)]
        self.newest |= {draw.slot: drawn for draw, drawn in zip(draws, ids, strict=True)}
        return self.sent(torch.tensor(ids))

    def sent(self, ids: Tensor) -> Download:
        return Download(ids)

    def embed_drawn(self, slots: Sequence[DrawSlot]) -> Tensor:
        return torch.cat([embedding(self.newest[slot]) for slot in slots])


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def network() -> Decoder:
    with torch.device("meta"):
        network = Decoder(CONFIG)
    network.load_state_dict(random_weights(Part("decoder", network, WeightFile.MAIN, "")), assign=True)
    network.merge_projections()
    return network


def new_decoder(network: Decoder) -> PagedDecoder:
    return PagedDecoder(network, CONFIG, CACHE, torch.device("cpu"), torch.float32)


def new_context(decoder: PagedDecoder) -> Context:
    return Context(decoder.pool, SlideMode.ROTATE_QUERY, max_tokens=10_000)


def alone(network: Decoder, script: Script) -> list[int]:
    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, Dice())
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
    loop: Loop = StepLoop(decoder, Dice())
    contexts = [new_context(decoder) for _ in crowd]
    together = build.run_together(loop, ((str(i), script.work(contexts[i])) for i, script in enumerate(crowd)))
    for number, script in enumerate(crowd):
        assert together[str(number)] == pytest.approx(alone(network, script), abs=1)
    for context in contexts:
        context.free()
    decoder.pool.check([])


def test_one_that_fails_ends_with_its_error_and_the_others_go_on(network: Decoder) -> None:
    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, Dice())
    good, bad = Script(1, (5, 1, 1, 1)), Script(2, (3, 1, 1, 1), fails_after=2)
    works = ((name, s.work(new_context(decoder))) for name, s in (("good", good), ("bad", bad)))
    ends = build.run_together(loop, works)
    assert isinstance(ends["bad"], InputError)
    assert ends["good"] == alone(network, good)


def test_one_that_fails_before_its_first_row_never_enters_a_step(network: Decoder) -> None:
    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, Dice())
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
    loop: Loop = StepLoop(decoder, Dice())
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
    loop: Loop = StepLoop(decoder, Dice())
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
    dice = Dice()
    loop: Loop = StepLoop(decoder, dice)
    large = MAX_STEP_TOKENS // 2 - 1
    for number in range(5):
        loop.add(str(number), Script(number, (large,)).work(new_context(decoder)), deadline_s=float(number))
    assert [end.session_id for end in drain(loop)] == ["0", "1", "2", "3", "4"]
    assert dice.num_draws == [2, 2, 1]


def test_a_failure_of_work_run_alone_is_raised(network: Decoder) -> None:
    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, Dice())
    with pytest.raises(InputError, match="gives up"):
        build.run_alone(loop, Script(3, (2, 2), fails_after=1).work(new_context(decoder)))


def test_work_that_needs_no_step_ends_at_once(network: Decoder) -> None:
    loop: Loop = StepLoop(new_decoder(network), Dice())

    def nothing() -> Generator[Request[Draw] | Settle, Reply, list[int]]:
        return []
        yield

    loop.add("a", nothing(), 0.0)
    assert loop.step() == (Finished("a", []),)
    loop.add("a", nothing(), 0.0)
    loop.cancel("a")
    assert loop.step() == ()


def test_work_that_is_driven_to_its_end_takes_others_along_and_keeps_their_ends(network: Decoder) -> None:
    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, Dice())
    short, long = Script(1, (3, 1)), Script(2, (4, 1, 1, 1, 1))
    loop.add("short", short.work(new_context(decoder)), 0.0)
    assert loop.run("long", long.work(new_context(decoder)), 0.0) == alone(network, long)
    assert not loop.is_idle
    assert loop.step() == (Finished("short", alone(network, short)),)
    assert loop.is_idle


@given(crowd=scripts)
def test_what_is_fed_before_it_is_read_is_what_was_drawn(network: Decoder, crowd: list[Script]) -> None:
    ends: dict[bool, dict[str, list[int] | AntiphonError]] = {}
    for is_waiting in (False, True):
        decoder = new_decoder(network)
        loop: Loop = StepLoop(decoder, Dice())
        works = ((str(i), script.babble(new_context(decoder), is_waiting=is_waiting)) for i, script in enumerate(crowd))
        ends[is_waiting] = build.run_together(loop, works)
    assert ends[False] == ends[True]


class Late(Download):
    """A copy that is never there before somebody waits for it."""

    num_waits = 0

    @property
    def is_there(self) -> bool:
        return False

    def read(self) -> Tensor:
        self.num_waits += 1
        return super().read()


class LateDice(Dice):
    """Its choices come down late."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Late] = []

    def sent(self, ids: Tensor) -> Download:
        self.copies.append(Late(ids))
        return self.copies[-1]


def test_a_draw_is_waited_for_only_when_nobody_has_a_row_to_run(network: Decoder) -> None:
    decoder = new_decoder(network)
    dice = LateDice()
    loop: Loop = StepLoop(decoder, dice)
    waits, goes_on = Script(1, (3, 1)), Script(2, (4, 1, 1, 1))
    loop.add("waits", waits.work(new_context(decoder)), 0.0)
    loop.add("goes on", goes_on.babble(new_context(decoder), is_waiting=False), 0.0)
    loop.step()
    assert dice.num_draws == [2]
    for num_steps in (2, 3, 4):
        loop.step()
        assert dice.num_draws == [2, *[1] * (num_steps - 1)], "who waits took part in a step"
        # Who goes on has read each draw of its own but the newest.
        assert [copy.num_waits for copy in dice.copies] == [*[1] * (num_steps - 1), 0]
    ends = {end.session_id: end.result for end in drain(loop)}
    assert ends["waits"] == alone(network, waits)


def test_a_bug_in_one_sessions_work_ends_it_alone(network: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, Dice())
    good = Script(1, (5, 1, 1, 1))

    def buggy() -> Work:
        yield from Script(2, (3,)).work(new_context(decoder))
        return [1 // 0]

    ends = build.run_together(loop, [("good", good.work(new_context(decoder))), ("buggy", buggy())])
    assert isinstance(ends["buggy"], InternalError)
    assert isinstance(ends["buggy"].__cause__, ZeroDivisionError)
    assert ends["good"] == alone(network, good)
    assert [record.exc_info is not None for record in caplog.records] == [True]


@pytest.mark.parametrize("bad", [torch.zeros(2, 5), torch.zeros(3, CONFIG.hidden_size)], ids=["width", "length"])
def test_a_row_that_fails_the_step_ends_its_own_session_and_the_others_have_their_step(
    network: Decoder, bad: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, Dice())
    crowd = [Script(1, (5, 1, 1, 1)), Script(3, (2, 7, 1))]
    cleaned: list[str] = []

    def poison() -> Work:
        context = new_context(decoder)
        try:
            yield Request(Row(context, context.append(2)), torch.zeros(2, CONFIG.hidden_size), None)
            yield Request(Row(context, context.append(2)), bad, None)
        finally:
            cleaned.append("yes")
        raise AssertionError("a row that cannot run was answered")

    works = [(str(script.seed), script.work(new_context(decoder))) for script in crowd]
    ends = build.run_together(loop, [works[0], ("poison", poison()), works[1]])
    assert isinstance(ends["poison"], InternalError)
    assert ends["poison"].__cause__ is not None
    assert cleaned == ["yes"]
    for script in crowd:
        assert ends[str(script.seed)] == pytest.approx(alone(network, script), abs=1)
    assert len(caplog.records) == 1


def test_a_step_whose_draws_fail_is_repeated_row_by_row(network: Decoder) -> None:
    class CrowdShy(Dice):
        def choose(self, states: Tensor, draws: Sequence[Draw]) -> Download:
            if len(draws) > 1:
                raise RuntimeError("too many")
            return super().choose(states, draws)

    decoder = new_decoder(network)
    loop: Loop = StepLoop(decoder, CrowdShy())
    crowd = [Script(1, (5, 1, 1, 1)), Script(2, (3, 1, 6))]
    ends = build.run_together(loop, ((str(one.seed), one.work(new_context(decoder))) for one in crowd))
    assert all(ends[str(one.seed)] == alone(network, one) for one in crowd)
