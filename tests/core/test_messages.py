"""What an address may be. How messages travel: tests/stages/test_loop.py, tests/runner."""

from __future__ import annotations

import pickle

import pytest

from antiphon.core.messages import Address, Close, CodecChunk, Interrupt
from antiphon.errors import InputError


@pytest.mark.parametrize("field", ["epoch", "turn", "seq"])
@pytest.mark.parametrize("bad", [-1, True, False, None, 0.0, "0"])
def test_an_address_that_is_no_count_is_refused(field: str, bad: object) -> None:
    counts = {"epoch": 0, "turn": 0, "seq": 0} | {field: bad}
    with pytest.raises(InputError, match=f"{field} must be an integer from 0 on"):
        Address("a", **counts)  # type: ignore[arg-type]  # that is what is tested


def test_zero_is_a_count_like_any_other() -> None:
    assert Address("a", 0, 0, 0).seq == 0


@pytest.mark.parametrize("bad", [-1, True, None])
def test_an_interruption_names_its_epoch(bad: object) -> None:
    with pytest.raises(InputError, match="epoch"):
        Interrupt("a", bad)  # type: ignore[arg-type]  # that is what is tested


def test_messages_are_the_same_after_a_journey() -> None:
    chunk = CodecChunk(Address("a", 1, 2, 3), 0.5, 4, (5, 6), is_first_of_turn=True, ends_turn=False)
    for message in (chunk, Interrupt("a", 2), Close("a")):
        assert pickle.loads(pickle.dumps(message)) == message
