"""Which messages of a stream count: the next number of the present epoch, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.inlet import Inlet
from antiphon.core.messages import Address, Fault


def at(epoch: int, seq: int) -> Address:
    return Address("a", epoch, turn=0, seq=seq)


def test_messages_in_order_count_once() -> None:
    inlet = Inlet()
    assert [inlet.judge(at(0, seq)) for seq in range(3)] == [None, None, None]
    assert inlet.judge(at(0, 1)) is Fault.REPEATED
    assert inlet.judge(at(0, 3)) is None


def test_after_a_gap_nothing_counts_until_the_next_epoch() -> None:
    inlet = Inlet()
    assert inlet.judge(at(0, 1)) is Fault.GAP
    assert inlet.judge(at(0, 0)) is Fault.REPEATED, "it comes after a later one"
    assert inlet.judge(at(0, 2)) is Fault.VOID
    assert inlet.enter(1)
    assert inlet.judge(at(1, 0)) is None


def test_an_epoch_that_is_over_stays_over() -> None:
    inlet = Inlet()
    assert inlet.enter(3)
    assert not inlet.enter(3)
    assert not inlet.enter(2)
    assert inlet.judge(at(2, 0)) is Fault.STALE
    assert inlet.judge(at(3, 0)) is None


def test_a_stream_can_be_broken_off_from_outside() -> None:
    inlet = Inlet()
    assert inlet.judge(at(0, 0)) is None
    inlet.break_off()
    assert inlet.judge(at(0, 1)) is Fault.VOID


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40))
def test_what_counts_is_a_gapless_start_of_every_epoch(sent: list[tuple[int, int]]) -> None:
    inlet = Inlet()
    counted: dict[int, list[int]] = {}
    epoch = 0
    for message_epoch, seq in sent:
        if message_epoch > epoch:
            epoch = message_epoch
            assert inlet.enter(epoch)
        if inlet.judge(at(message_epoch, seq)) is None:
            assert message_epoch == epoch
            counted.setdefault(epoch, []).append(seq)
    for seqs in counted.values():
        assert seqs == list(range(len(seqs)))


@given(st.lists(st.integers(0, 4), max_size=12))
def test_a_stream_that_comes_whole_and_repeated_counts_as_if_it_had_come_once(repeats: list[int]) -> None:
    inlet = Inlet()
    counted = [seq for seq, times in enumerate(repeats) for _ in range(1 + times) if inlet.judge(at(0, seq)) is None]
    assert counted == list(range(len(repeats)))
