"""A session's context and cache together, on a small random thinker: what a slide may touch, and what it means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import build
from antiphon.core.context import Segment
from antiphon.core.window import BasicWindow, ContextWindow, OffWindow, SlideMode, WindowPolicy
from antiphon.errors import ContextLengthExceeded, ResourceExhausted
from antiphon.kernels.rotation import rotate, rotation
from antiphon.models.minicpmo.checkpoint import Part, WeightFile
from antiphon.models.minicpmo.config import DecoderConfig, ThinkerConfig
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.models.minicpmo.tiny.weights import random_weights
from antiphon.stages.paged import CacheConfig, PagedDecoder, Row
from antiphon.stages.stepping import MAX_STEP_TOKENS, StepLoop
from antiphon.stages.thinker.choosing import Chosen, TextDraw
from antiphon.stages.thinker.memory import MemorySteps, ThinkerMemory
from core.brute_force import slots_of

CONFIG = ThinkerConfig(
    DecoderConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        has_qk_norm=True,
    ),
    vocab_size=50,
    max_position_tokens=10_000,
)
ResultT = TypeVar("ResultT")

SUFFIX, MARKER = (1, 2, 3), (4, 5)
EPS = torch.finfo(torch.float32).eps
BASIC = BasicWindow(high_tokens=40, low_tokens=25)
CONTEXT = ContextWindow(max_units=3, previous_max_tokens=6, marker=MARKER)
UNITS = (5, 9, 1, 7, 6, 11, 3, 8, 5, 10, 2, 7, 9, 4, 6, 8)
"""Tokens of each unit: every remainder by the block sizes used here."""

GAIN = 4
"""How much more a state may move than what moves it: two layers with their residuals, and a norm."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def network() -> ThinkerNetwork:
    with torch.device("meta"):
        network = ThinkerNetwork(CONFIG)
    network.load_state_dict(random_weights(Part("thinker", network, WeightFile.MAIN, "")), assign=True)
    return network


def paged(network: ThinkerNetwork, *, num_blocks: int = 64, block_size: int = 4) -> PagedDecoder:
    """Its cache is full of NaN: whoever reads a slot that was not written shows it."""
    decoder = PagedDecoder(
        network, CONFIG.decoder, CacheConfig(num_blocks, block_size), torch.device("cpu"), torch.float32
    )
    decoder.cache.keys.fill_(torch.nan)
    decoder.cache.values.fill_(torch.nan)
    return decoder


def embeds(num_tokens: int, seed: int) -> Tensor:
    return torch.randn(num_tokens, CONFIG.decoder.hidden_size, generator=torch.Generator().manual_seed(seed))


def played(decoder: PagedDecoder, steps: MemorySteps[ResultT]) -> ResultT:
    """Run a memory's work on its decoder, alone; memories draw nothing by themselves."""

    def nothing(states: Tensor, draws: Sequence[TextDraw]) -> list[Chosen]:
        raise AssertionError(f"{len(draws)} draws from {tuple(states.shape)}")

    loop: StepLoop[TextDraw, Chosen, ResultT] = StepLoop(decoder, nothing)
    return build.run_alone(loop, steps)


@dataclass(slots=True)
class Session:
    """A session and everything it was told. states: of every token fed into the ring so far."""

    network: ThinkerNetwork
    decoder: PagedDecoder
    window: WindowPolicy
    mode: SlideMode
    prompt_tokens: int = 6
    suffix: tuple[int, ...] = SUFFIX
    states: list[Tensor] = field(default_factory=list)
    num_slides: int = 0
    memory: ThinkerMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = ThinkerMemory(self.network, self.decoder, self.window, self.mode, max_tokens=5000)
        played(self.decoder, self.memory.feed_prompt(embeds(self.prompt_tokens, seed=1)))
        played(self.decoder, self.memory.feed_suffix(self.suffix))

    def feed(self, inputs: Tensor) -> Tensor:
        return played(self.decoder, self.memory.feed(inputs))

    def live(self, unit: int) -> None:
        """One unit in two pieces; every third one listens, the others say a word or more."""
        inputs = embeds(UNITS[unit], seed=100 + unit)
        for piece in (inputs[:1], inputs[1:]):
            if piece.shape[0]:
                self.states.append(self.feed(piece))
        words = tuple(range(10 + unit, 10 + unit + min(3, UNITS[unit]))) if unit % 3 else ()
        self.num_slides += played(self.decoder, self.memory.close_unit(unit, words)) is not None
        self.memory.context.check()

    def stored(self, segment: Segment) -> tuple[Tensor, Tensor]:
        """Keys and values [L, T, Hkv, D] of a segment, copied."""
        slots = list(slots_of(segment, self.decoder.pool.block_size))
        cache = self.decoder.cache
        return cache.keys.flatten(1, 2)[:, slots], cache.values.flatten(1, 2)[:, slots]

    @property
    def prompt(self) -> tuple[Tensor, Tensor]:
        return self.stored(self.memory.context.segments()[0])

    @property
    def ring(self) -> tuple[Tensor, Tensor]:
        return self.stored(self.memory.context.segments()[-1])


@pytest.mark.parametrize("mode", SlideMode)
@pytest.mark.parametrize("window", [BASIC, CONTEXT], ids=["basic", "context"])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_slide_leaves_the_prompt_and_all_values_as_written_and_by_default_all_keys(
    network: ThinkerNetwork, mode: SlideMode, window: WindowPolicy, block_size: int
) -> None:
    first_slots = set()
    for prompt_tokens in range(5, 5 + block_size):
        session = Session(network, paged(network, num_blocks=120, block_size=block_size), window, mode, prompt_tokens)
        prompt = session.prompt
        before = session.ring
        for unit in range(len(UNITS)):
            session.live(unit)
            assert all(torch.equal(now, then) for now, then in zip(session.prompt, prompt, strict=True))
            after = session.ring
            num_survivors = max(0, after[0].shape[1] - UNITS[unit])
            num_dropped = before[0].shape[1] - num_survivors
            for (now, then), stays in zip(zip(after, before, strict=True), as_written(mode), strict=True):
                assert not stays or torch.equal(now[:, :num_survivors], then[:, num_dropped:])
            before = after
            first_slots.add(session.memory.context.segments()[-1].first_slot)
        assert session.num_slides > 2
        assert not torch.cat(session.states).isnan().any()
    # Cuts fell on every place in a block; only a ring that is computed anew begins with a block.
    assert first_slots == ({0} if mode is SlideMode.REPREFILL else set(range(block_size)))


def as_written(mode: SlideMode) -> tuple[bool, bool]:
    """Whether surviving keys, and values, are those that were first written."""
    match mode:
        case SlideMode.ROTATE_QUERY:
            return True, True
        case SlideMode.ROTATE_KEYS:
            return False, True
        case SlideMode.REPREFILL:
            return False, False


@pytest.mark.parametrize("window", [BASIC, CONTEXT], ids=["basic", "context"])
def test_rotating_queries_and_rotating_keys_mean_the_same(network: ThinkerNetwork, window: WindowPolicy) -> None:
    by_query, by_keys = (
        Session(network, paged(network), window, mode) for mode in (SlideMode.ROTATE_QUERY, SlideMode.ROTATE_KEYS)
    )
    for unit in range(len(UNITS)):
        by_query.live(unit)
        by_keys.live(unit)
    assert by_query.num_slides == by_keys.num_slides > 2
    assert by_keys.memory.context.shift == 0
    shift = by_query.memory.context.shift
    assert shift > 0
    keys, rotated = by_query.ring[0][0], by_keys.ring[0][0]
    back = rotate(
        keys, rotation(torch.full(keys.shape[:1], -shift), CONFIG.decoder.head_dim, CONFIG.decoder.rope_theta)
    )
    # The first layer's keys depend on their inputs only: five roundings per rotation of a pair.
    tolerance = 5 * EPS * (by_keys.num_slides + 2) * keys.norm(dim=-1).max().item()
    torch.testing.assert_close(rotated, back, rtol=0, atol=tolerance)
    states, others = torch.cat(by_query.states), torch.cat(by_keys.states)
    torch.testing.assert_close(others, states, rtol=0, atol=GAIN * tolerance)


@pytest.mark.parametrize("window", [BASIC, CONTEXT], ids=["basic", "context"])
def test_reprefill_is_a_session_that_never_heard_what_was_dropped(
    network: ThinkerNetwork, window: WindowPolicy
) -> None:
    long = Session(network, paged(network), window, SlideMode.REPREFILL)
    context = long.memory.context
    for unit in range(len(UNITS)):
        num_slides = long.num_slides
        long.live(unit)
        if long.num_slides == num_slides:
            continue
        retained = [record.unit for record in context.units]
        short = Session(network, paged(network), window, SlideMode.REPREFILL, suffix=(*context.previous, *SUFFIX))
        short.feed(torch.cat([embeds(UNITS[unit], seed=100 + unit) for unit in retained]))
        # The same tokens in steps of the same size: nothing is rounded differently, wherever the blocks lie.
        assert all(torch.equal(a, b) for a, b in zip(long.ring, short.ring, strict=True))
        if num_slides > 2:
            break
    assert 0 < len(retained) < unit
    following = embeds(8, seed=7)
    assert torch.equal(long.feed(following), short.feed(following))


def test_rotation_keeps_what_dropped_units_have_said_about_the_retained_ones(network: ThinkerNetwork) -> None:
    """The two meanings differ, so the tests of either are not about nothing."""
    kept, forgot = (
        Session(network, paged(network), BASIC, mode) for mode in (SlideMode.ROTATE_QUERY, SlideMode.REPREFILL)
    )
    for unit in range(len(UNITS)):
        kept.live(unit)
        forgot.live(unit)
    assert not torch.allclose(kept.states[-1], forgot.states[-1], rtol=0, atol=0.01)


@pytest.mark.parametrize("mode", SlideMode)
@pytest.mark.parametrize("window", [BASIC, CONTEXT], ids=["basic", "context"])
def test_sessions_in_one_pool_do_not_see_each_other(
    network: ThinkerNetwork, mode: SlideMode, window: WindowPolicy
) -> None:
    alone = Session(network, paged(network), window, mode)
    for unit in range(len(UNITS)):
        alone.live(unit)
    decoder = paged(network)
    first = Session(network, decoder, BASIC, SlideMode.ROTATE_KEYS, prompt_tokens=9)
    watched = Session(network, decoder, window, mode)
    for unit in range(len(UNITS)):
        if unit == 7:
            first.memory.free()
            first = Session(network, decoder, CONTEXT, SlideMode.REPREFILL, prompt_tokens=2)
        first.live(unit)
        watched.live(unit)
    assert alone.num_slides > 2
    assert torch.equal(torch.cat(watched.states), torch.cat(alone.states))
    first.memory.free()
    watched.memory.free()
    decoder.pool.check([])


def test_sessions_in_one_step_do_not_see_each_other(network: ThinkerNetwork) -> None:
    decoder = paged(network)
    sessions = [Session(network, decoder, BASIC, SlideMode.ROTATE_QUERY, prompt_tokens=tokens) for tokens in (3, 10)]
    for unit in range(len(UNITS)):
        for session in sessions[: 2 - unit % 2]:
            session.live(unit)
    rows = []
    for seed, session in enumerate(sessions):
        inputs = embeds(5, seed)
        rows.append(Row(session.memory.context, session.memory.context.append(5), inputs))
    singly = torch.cat([decoder.run([row]) for row in rows])
    together = decoder.run(rows)
    # A matrix product of another height may sum its terms in another order.
    torch.testing.assert_close(together, singly, rtol=0, atol=GAIN * CONFIG.decoder.hidden_size * EPS)


def test_a_long_prompt_in_pieces_is_the_prompt_at_once(network: ThinkerNetwork) -> None:
    num_tokens = 2 * MAX_STEP_TOKENS + 37
    prompt = embeds(num_tokens, seed=5)
    at_once, in_pieces = (paged(network, num_blocks=300, block_size=4) for _ in range(2))
    whole = ThinkerMemory(network, at_once, OffWindow(5000), SlideMode.ROTATE_QUERY, max_tokens=5000)
    at_once.run([Row(whole.context, whole.context.append_prompt(num_tokens), prompt)])
    pieces = ThinkerMemory(network, in_pieces, OffWindow(5000), SlideMode.ROTATE_QUERY, max_tokens=5000)
    for piece in (prompt[:1], prompt[1:1], prompt[1:]):
        played(in_pieces, pieces.feed_prompt(piece))
    # A value attends to up to num_tokens keys, whose sum may be ordered in another way.
    tolerance = GAIN * num_tokens * EPS
    last = embeds(4, seed=6)
    fed = played(in_pieces, pieces.feed(last)), played(at_once, whole.feed(last))
    torch.testing.assert_close(*fed, rtol=0, atol=tolerance)
    caches = zip(
        (at_once.cache.keys, at_once.cache.values), (in_pieces.cache.keys, in_pieces.cache.values), strict=True
    )
    for one, other in caches:
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance, equal_nan=True)


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, 30), max_size=5))
def test_any_pieces_of_a_unit_give_the_states_of_the_whole(network: ThinkerNetwork, cuts: list[int]) -> None:
    inputs = embeds(30, seed=3)
    with torch.inference_mode():
        whole, pieces = (Session(network, paged(network), BASIC, SlideMode.ROTATE_QUERY) for _ in range(2))
        ends = [*sorted(cuts), 30]
        states = [pieces.feed(inputs[start:end]) for start, end in zip([0, *ends], ends, strict=False) if start < end]
        tolerance = GAIN * CONFIG.decoder.hidden_size * EPS
        torch.testing.assert_close(torch.cat(states), whole.feed(inputs), rtol=0, atol=tolerance)


@pytest.mark.parametrize("mode", SlideMode)
def test_a_feed_that_finds_no_block_or_no_room_leaves_the_session_as_it_was(
    network: ThinkerNetwork, mode: SlideMode
) -> None:
    alone = Session(network, paged(network), BASIC, mode)
    decoder = paged(network)
    session = Session(network, decoder, BASIC, mode)
    for unit in range(len(UNITS)):
        held = decoder.pool.allocate(decoder.pool.num_free_blocks)
        with pytest.raises(ResourceExhausted):
            session.feed(embeds(40, seed=0))
        decoder.pool.release(held)
        with pytest.raises(ContextLengthExceeded):
            session.feed(embeds(5001, seed=0))
        session.live(unit)
        alone.live(unit)
    assert alone.num_slides > 2
    assert torch.equal(torch.cat(session.states), torch.cat(alone.states))
