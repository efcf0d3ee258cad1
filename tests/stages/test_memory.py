"""A session's context and cache together, on a small random thinker: what a slide may touch, and what it means."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from antiphon.core.window import BasicWindow, OffWindow, SlideMode, WindowPolicy
from antiphon.errors import ContextLengthExceeded, ResourceExhausted
from antiphon.kernels.rotation import rotate, rotation
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.stages.step_packing import Row
from antiphon.stages.stepping import MAX_STEP_TOKENS
from antiphon.stages.thinker.memory import ThinkerMemory
from stages.memories import (
    BASIC,
    CONFIG,
    CONTEXT,
    EPS,
    GAIN,
    SUFFIX,
    UNITS,
    Session,
    embeds,
    paged,
    played,
    random_network,
)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def network() -> ThinkerNetwork:
    return random_network()


@pytest.mark.parametrize("mode", SlideMode)
@pytest.mark.parametrize("window", [BASIC, CONTEXT], ids=["basic", "context"])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_slide_leaves_the_prompt_and_all_values_as_written_and_by_default_all_keys(
    network: ThinkerNetwork, mode: SlideMode, window: WindowPolicy, block_size: int
) -> None:
    first_slots = set()
    for prompt_tokens in range(5, 5 + block_size):
        session = Session(network, paged(network, num_blocks=120, block_size=block_size), window, mode, prompt_tokens)
        anchor, previous = session.anchor, session.memory.context.previous
        before, num_unchanged = session.ring, 0
        for unit in range(len(UNITS)):
            session.live(unit)
            # `previous` and suffix are written anew with every new word, and only then.
            num_kept = 1 if session.memory.context.previous != previous else len(anchor)
            for here, there in zip(session.anchor[:num_kept], anchor[:num_kept], strict=True):
                assert all(torch.equal(*one) for one in zip(here, there, strict=True))
            num_unchanged += num_kept == len(session.anchor)
            anchor, previous = session.anchor, session.memory.context.previous
            after = session.ring
            num_survivors = max(0, after[0].shape[1] - UNITS[unit])
            num_dropped = before[0].shape[1] - num_survivors
            for (now, then), stays in zip(zip(after, before, strict=True), as_written(mode), strict=True):
                assert not stays or torch.equal(now[:, :num_survivors], then[:, num_dropped:])
            before = after
            first_slots.add(session.memory.context.segments()[-1].first_slot)
        assert session.num_slides > 2
        assert num_unchanged > 2
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
        short.feed(torch.cat([long.inputs(unit) for unit in retained]))
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
    rows = [Row(session.memory.context, session.memory.context.append(5)) for session in sessions]
    inputs = [embeds(5, seed) for seed in range(len(rows))]
    singly = torch.cat([decoder.run([row], its) for row, its in zip(rows, inputs, strict=True)])
    together = decoder.run(rows, torch.cat(inputs))
    # A matrix product of another height may sum its terms in another order.
    torch.testing.assert_close(together, singly, rtol=0, atol=GAIN * CONFIG.decoder.hidden_size * EPS)


def test_a_long_prompt_in_pieces_is_the_prompt_at_once(network: ThinkerNetwork) -> None:
    num_tokens = 2 * MAX_STEP_TOKENS + 37
    prompt = embeds(num_tokens, seed=5)
    at_once, in_pieces = (paged(network, num_blocks=300, block_size=4) for _ in range(2))
    whole = ThinkerMemory(network, at_once, OffWindow(5000), SlideMode.ROTATE_QUERY, max_tokens=5000)
    at_once.run([Row(whole.context, whole.context.append_prompt(num_tokens))], prompt)
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


def test_inputs_of_dropped_units_go_a_few_with_each_unit_and_no_more_are_held_than_before_the_slide(
    network: ThinkerNetwork,
) -> None:
    window = BasicWindow(high_tokens=70, low_tokens=40)
    decoder, lengths = paged(network), (3,)
    session = Session(network, decoder, window, SlideMode.ROTATE_QUERY, lengths=lengths, keeps_inputs=True)
    made: list[weakref.ref[torch.Tensor]] = []
    num_held: list[int] = []
    for unit in range(60):
        num_slides = session.num_slides
        session.live(unit)
        if session.num_slides == num_slides:  # it is still there to be seen
            made.append(weakref.ref(session.memory.retained()[-1].inputs))
        num_held.append(sum(inputs() is not None for inputs in made))
    assert session.num_slides > 3
    assert max(num_held) <= window.high_tokens // lengths[0]
    falls = [before - after for before, after in zip(num_held, num_held[1:], strict=False)]
    assert 0 < max(falls) < (window.high_tokens - window.low_tokens) // lengths[0]
    session.memory.free()
    assert not any(inputs() is not None for inputs in made)


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


@pytest.mark.parametrize("window", [BASIC, CONTEXT], ids=["basic", "context"])
@pytest.mark.parametrize("mode", SlideMode)
def test_what_is_fed_later_is_seen_as_if_it_had_been_fed_at_once(
    network: ThinkerNetwork, mode: SlideMode, window: WindowPolicy
) -> None:
    at_once, later = (Session(network, paged(network), window, mode, lengths=(9, 6, 12)) for _ in range(2))
    tolerance = GAIN * CONFIG.decoder.hidden_size * EPS
    num_steps = 0
    for unit in range(30):
        inputs = at_once.inputs(unit)
        states = [session.feed(inputs[:-2]) for session in (at_once, later)]
        torch.testing.assert_close(states[1], states[0], rtol=0, atol=tolerance)
        at_once.feed(inputs[-2:])
        later.memory.feed_later(inputs[-2:])
        with pytest.raises(ContextLengthExceeded):
            later.feed(embeds(5001, seed=0))
        num_before = later.decoder.num_runs.num_launched
        slides = [played(one.decoder, one.memory.close_unit(unit, one.words(unit))) for one in (at_once, later)]
        assert (slides[0] is None) == (slides[1] is None)
        num_steps += later.decoder.num_runs.num_launched > num_before
        at_once.num_slides += slides[0] is not None
        later.memory.context.check()
    assert num_steps == at_once.num_slides > 2, "only a slide does not wait for what comes next"


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
