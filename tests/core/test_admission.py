from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.admission import Admission
from antiphon.errors import ResourceExhausted


def test_a_session_that_may_not_fit_is_refused_and_can_come_when_another_left() -> None:
    admission = Admission(num_blocks=10)
    admission.admit({"a": 6})
    with pytest.raises(ResourceExhausted, match="full"):
        admission.admit({"b": 5})
    admission.admit({"c": 4})
    admission.leave("a")
    admission.admit({"b": 5})
    assert admission.num_free_blocks == 1


def test_what_belongs_together_is_admitted_together_or_not_at_all() -> None:
    admission = Admission(num_blocks=10)
    with pytest.raises(ResourceExhausted):
        admission.admit({"session": 6, "prompt": 5})
    assert not admission.is_admitted("session")
    admission.admit({"session": 6, "prompt": 4})
    assert admission.is_admitted("prompt")
    assert admission.num_free_blocks == 0


def test_being_full_can_pass_so_the_error_says_try_again() -> None:
    assert ResourceExhausted.is_retryable


def test_leaving_twice_gives_back_once() -> None:
    admission = Admission(num_blocks=10)
    admission.admit({"a": 6})
    admission.leave("a")
    admission.leave("a")
    assert admission.num_free_blocks == 10


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.booleans())))
def test_reservations_never_exceed_the_cache(actions: list[tuple[int, int, bool]]) -> None:
    admission, inside = Admission(num_blocks=20), dict[int, int]()
    for session, num_blocks, is_leaving in actions:
        if is_leaving:
            admission.leave(str(session))
            inside.pop(session, None)
        elif session not in inside:
            fits = sum(inside.values()) + num_blocks <= 20
            try:
                admission.admit({str(session): num_blocks})
            except ResourceExhausted:
                assert not fits
            else:
                assert fits
                inside[session] = num_blocks
        assert admission.num_free_blocks == 20 - sum(inside.values())
