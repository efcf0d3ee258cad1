"""What leaves when, for a listener who plays in real time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.server.pacing import Pacer, PacingConfig, Piece, Samples

RATE = 24_000


def speech(seconds: float) -> Samples:
    return np.arange(round(seconds * RATE), dtype=np.float32)


def length_s(pieces: list[Piece]) -> float:
    return sum(len(piece.samples) for piece in pieces) / RATE


def test_speech_leaves_in_small_pieces_until_the_listener_is_so_far_behind() -> None:
    pacer = Pacer(PacingConfig(max_lead_s=1.0, delta_s=0.2))
    pacer.queue("a", speech(3))
    first = pacer.due(10.0)
    assert [len(piece.samples) for piece in first] == [4800] * 5
    assert pacer.lead_s(10.0) == pytest.approx(1.0)
    assert pacer.due(10.0) == []
    assert pacer.next_due_s(10.0) == pytest.approx(10.0)
    assert length_s(pacer.due(10.5)) == pytest.approx(0.6)


def test_the_end_is_told_once_behind_the_last_piece() -> None:
    pacer = Pacer(PacingConfig())
    pacer.queue("a", speech(0.3))
    pacer.end("a")
    pacer.queue("b", speech(0.1))
    pacer.end("b")
    pieces = pacer.due(0.0)
    pacer.end("c")
    pieces += pacer.due(0.0)
    assert [(piece.owner, len(piece.samples), piece.is_last) for piece in pieces] == [
        ("a", 3600, False),
        ("a", 3600, True),
        ("b", 2400, True),
        ("c", 0, True),
    ]
    assert math.isinf(pacer.next_due_s(0.0))


def test_a_cut_drops_what_waits_and_tells_what_may_still_be_heard() -> None:
    pacer = Pacer(PacingConfig(max_lead_s=1.0))
    pacer.queue("a", speech(5))
    pacer.due(0.0)
    assert pacer.cut(0.25) == round(0.75 * RATE)
    assert pacer.is_empty
    assert pacer.lead_s(0.25) == 0.0
    pacer.queue("b", speech(0.2))
    assert length_s(pacer.due(0.25)) == pytest.approx(0.2)


@given(st.integers(RATE // 25, 3 * RATE))
def test_a_piece_is_of_40_to_200_ms_if_so_much_waits(num_samples: int) -> None:
    pacer = Pacer(PacingConfig(max_lead_s=10.0))
    pacer.queue("a", speech(num_samples / RATE))
    pieces = pacer.due(0.0)
    assert sum(len(piece.samples) for piece in pieces) == num_samples
    assert all(RATE // 25 <= len(piece.samples) <= RATE // 5 for piece in pieces)


@given(
    lengths=st.lists(st.integers(0, 40_000), min_size=1, max_size=6),
    steps=st.lists(st.floats(0.0, 1.5), min_size=1, max_size=30),
)
def test_nothing_is_lost_repeated_or_too_early(lengths: list[int], steps: list[float]) -> None:
    pacer, now_s, heard = Pacer(PacingConfig(max_lead_s=0.7, delta_s=0.1)), 0.0, []
    whole = np.arange(sum(lengths), dtype=np.float32)
    for part in np.split(whole, np.cumsum(lengths)[:-1]):
        pacer.queue("a", part)
    for step in [*steps, 100.0, 100.0, 100.0]:
        now_s += step
        pieces = pacer.due(now_s)
        assert pacer.lead_s(now_s) <= 0.7 + 0.1 + 1e-9
        assert all(len(piece.samples) <= 2400 for piece in pieces)
        heard += [piece.samples for piece in pieces]
    while not pacer.is_empty:
        now_s += 1
        heard += [piece.samples for piece in pacer.due(now_s)]
    assert np.array_equal(np.concatenate(heard), whole)
