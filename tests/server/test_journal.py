"""What a client that comes back is told again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.server.journal import Journal, JournalConfig, ResumeToken


def filled(journal: Journal, number: int) -> Journal:
    for index in range(number):
        journal.tell(f"event {index + 1}", now_s=float(index))
    return journal


def test_what_was_told_after_a_number_is_told_again_in_order() -> None:
    journal = filled(Journal(JournalConfig()), 5)
    assert [told.text for told in journal.after(3) or ()] == ["event 4", "event 5"]
    assert journal.after(5) == ()
    assert len(journal.after(0) or ()) == 5


def test_what_is_gone_or_was_never_told_is_no_answer() -> None:
    small = filled(Journal(JournalConfig(max_bytes=16)), 5)
    assert small.after(1) is None
    assert [told.seq for told in small.after(3) or ()] == [4, 5]
    assert small.after(6) is None
    assert small.after(-1) is None
    brief = filled(Journal(JournalConfig(max_age_s=1.5)), 5)
    assert brief.after(2) is None
    assert [told.seq for told in brief.after(3) or ()] == [4, 5]


def test_what_the_client_has_is_forgotten() -> None:
    journal = filled(Journal(JournalConfig()), 5)
    journal.forget(4)
    assert journal.after(3) is None
    assert [told.seq for told in journal.after(4) or ()] == [5]


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(0, 45))
def test_it_never_holds_more_than_it_may(lengths: list[int], seq: int) -> None:
    journal = Journal(JournalConfig(max_bytes=60, max_age_s=1000))
    for number, length in enumerate(lengths):
        journal.tell("x" * length, now_s=float(number))
    kept = journal.after(seq)
    if kept is not None:
        assert sum(len(told.text) for told in kept) <= 60
        assert [told.seq for told in kept] == list(range(seq + 1, len(lengths) + 1))


def test_a_token_is_good_until_the_next_one() -> None:
    token = ResumeToken()
    assert not token.fits("")
    first = token.rotate()
    assert token.fits(first)
    second = token.rotate()
    assert not token.fits(first)
    assert token.fits(second)
