"""Sound on its way from a client that may be quick to a call that takes its time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.duplex import Wish
from antiphon.server.realtime.conversation import RequestError
from antiphon.server.realtime.feeding import MAX_AHEAD_SAMPLES, Feeder
from antiphon.units import UNIT_SAMPLES


@given(lengths=st.lists(st.integers(0, 50_000), max_size=8))
def test_all_of_it_is_heard_in_order_and_never_far_ahead_of_what_is_decided(lengths: list[int]) -> None:
    feeder, heard, num_decided = Feeder(1_000_000), [np.empty(0, np.float32)], 0
    whole = np.arange(sum(lengths), dtype=np.float32)
    for part in np.split(whole, np.cumsum(lengths)[:-1]) if lengths else []:
        feeder.put(part, Wish.FREE)
    assert feeder.num_missing_samples == UNIT_SAMPLES - len(whole) % UNIT_SAMPLES
    while not feeder.is_empty:
        heard += [piece for piece in feeder.ready() if isinstance(piece, np.ndarray)]
        num_heard = sum(map(len, heard))
        assert num_heard - num_decided * UNIT_SAMPLES <= MAX_AHEAD_SAMPLES
        if num_heard // UNIT_SAMPLES > num_decided:
            num_decided += 1
            feeder.decided()
    assert np.array_equal(np.concatenate(heard), whole)


def test_a_wish_reaches_the_second_in_which_the_next_sound_ends_up() -> None:
    feeder = Feeder(5 * UNIT_SAMPLES)
    feeder.put(np.zeros(UNIT_SAMPLES + 10, np.float32), Wish.FREE)
    feeder.put_wish(Wish.SPEAK)
    feeder.put(np.zeros(feeder.num_missing_samples, np.float32), Wish.FREE)
    got = [piece if isinstance(piece, Wish) else len(piece) for piece in feeder.ready()]
    assert got == [UNIT_SAMPLES, 10, Wish.SPEAK, UNIT_SAMPLES - 10]


def test_a_wish_for_sound_is_one_for_every_second_that_it_ends_up_in() -> None:
    feeder = Feeder(5 * UNIT_SAMPLES)
    feeder.put(np.zeros(UNIT_SAMPLES + 10, np.float32), Wish.HOLD)
    feeder.put(np.zeros(5, np.float32), Wish.FREE)
    got = [piece if isinstance(piece, Wish) else len(piece) for piece in feeder.ready()]
    assert got == [Wish.HOLD, UNIT_SAMPLES, Wish.HOLD, 10, 5]


def test_what_is_cleared_is_not_heard_and_wishes_are_kept() -> None:
    feeder = Feeder(5 * UNIT_SAMPLES)
    feeder.put(np.zeros(4 * UNIT_SAMPLES + 10, np.float32), Wish.FREE)
    num_heard = sum(len(piece) for piece in feeder.ready() if isinstance(piece, np.ndarray))
    feeder.put_wish(Wish.SPEAK)
    feeder.clear()
    assert num_heard == MAX_AHEAD_SAMPLES
    assert feeder.num_missing_samples == UNIT_SAMPLES
    for _ in range(2):
        feeder.decided()
    assert list(feeder.ready()) == [Wish.SPEAK]


def test_too_much_is_refused_and_what_was_there_stays() -> None:
    feeder = Feeder(5 * UNIT_SAMPLES)
    feeder.put(np.zeros(5 * UNIT_SAMPLES, np.float32), Wish.FREE)
    with pytest.raises(RequestError, match="5 s of audio wait") as refused:
        feeder.put(np.zeros(1, np.float32), Wish.FREE)
    assert refused.value.code == "input_backpressure"
    assert sum(len(piece) for piece in feeder.ready() if isinstance(piece, np.ndarray)) == MAX_AHEAD_SAMPLES
