"""The rules of units and turns (REFERENCE 4.3, 4.6), branch by branch and against plain folds."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from antiphon.core.duplex import DuplexConfig, DuplexTokens, UnitDecisions, Utterance
from antiphon.errors import ConfigError

TOKENS = DuplexTokens(unit_start=1, unit_end=2, listen=3, tts_bos=4, turn_eos=5, chunk_eos=6, chunk_tts_eos=7)
LISTEN, BOS, END, STOP, TTS_STOP = 3, 4, 5, 6, 7
SPEAK, A, B, C = 8, 20, 21, 22


@dataclass(frozen=True, slots=True)
class Said:
    """An utterance without its rows. ends: whether its turn does."""

    ids: tuple[int, ...]
    ends: bool


def decided(*sampled: int, is_turn_open: bool = False, max_tokens: int = 20) -> UnitDecisions:
    """A unit after the model sampled these ids; all of them must be needed."""
    unit = UnitDecisions(
        TOKENS, DuplexConfig(max_decided_tokens=max_tokens), is_turn_open=is_turn_open, is_forced_listen=False
    )
    for token in sampled:
        unit.take(token)
    return unit


def said(unit: UnitDecisions) -> list[Said]:
    return [Said(utterance.token_ids, utterance.ends_turn) for utterance in unit.utterances()]


def test_a_unit_that_listens_says_nothing_and_feeds_only_its_close() -> None:
    unit = decided(LISTEN)
    assert (unit.is_done, unit.is_listen, unit.is_turn_open, unit.fed) == (True, True, False, [])
    assert unit.closing_ids == (LISTEN, TOKENS.unit_end)
    assert said(unit) == []


def test_a_forced_listen_is_done_before_anything_is_sampled() -> None:
    unit = UnitDecisions(TOKENS, DuplexConfig(), is_turn_open=False, is_forced_listen=True)
    assert (unit.is_done, unit.is_listen, unit.closing_ids) == (True, True, (LISTEN, TOKENS.unit_end))
    assert unit.utterances() == ()
    with pytest.raises(AssertionError, match="comes too late"):
        unit.take(A)


def test_a_forced_listen_closes_an_open_turn_and_hands_nothing_on() -> None:
    unit = UnitDecisions(TOKENS, DuplexConfig(), is_turn_open=True, is_forced_listen=True)
    assert unit.fed == [TOKENS.turn_eos]
    assert unit.closing_ids == (LISTEN, TOKENS.unit_end)
    assert not unit.is_turn_open
    assert unit.utterances() == ()
    assert unit.previous_ids() == ()


def test_the_first_decision_opens_the_turn_but_is_never_spoken() -> None:
    unit = decided(SPEAK, A, B, STOP)
    assert unit.fed == [SPEAK, A, B]
    assert unit.closing_ids == (STOP, TOKENS.unit_end)
    assert unit.is_turn_open
    assert unit.utterances() == (Utterance((A, B), (1, 2), ends_turn=False),)


def test_listening_in_an_open_turn_becomes_tts_bos() -> None:
    unit = decided(is_turn_open=True)
    assert unit.take(LISTEN) == BOS
    assert unit.take(LISTEN) == BOS
    assert unit.take(STOP) is None
    assert unit.fed == [BOS, BOS]
    assert not unit.is_listen
    assert said(unit) == [Said((BOS,), ends=False)]


def test_listening_right_after_the_end_of_a_turn_ends_the_unit() -> None:
    unit = decided(A, B, END, LISTEN, is_turn_open=True)
    assert unit.is_listen
    assert not unit.is_turn_open
    assert said(unit) == [Said((B, END), ends=True)]


@pytest.mark.parametrize("terminator", [STOP, TTS_STOP])
def test_both_chunk_terminators_end_the_unit_and_leave_the_turn_as_it_is(terminator: int) -> None:
    unit = decided(A, B, terminator, is_turn_open=True)
    assert unit.closing_ids == (terminator, TOKENS.unit_end)
    assert unit.is_turn_open
    assert not unit.is_listen


def test_a_unit_of_nothing_but_its_terminator_reaches_the_talker_in_a_turn_and_outside() -> None:
    for is_turn_open in (False, True):
        unit = decided(STOP, is_turn_open=is_turn_open)
        assert said(unit) == [Said((), ends=False)]
        assert unit.is_turn_open is is_turn_open


def test_words_after_the_end_of_a_turn_begin_the_next_one() -> None:
    unit = decided(SPEAK, A, END, B, C, STOP)
    assert unit.is_turn_open
    assert unit.utterances() == (
        Utterance((A, END), (1, 2), ends_turn=True),
        Utterance((B, C), (3, 4), ends_turn=False),
    )


def test_several_turns_in_one_unit_are_all_said() -> None:
    unit = decided(SPEAK, A, END, B, END, STOP)
    assert said(unit) == [Said((A, END), ends=True), Said((B, END), ends=True)]
    assert not unit.is_turn_open


def test_several_ends_in_a_row_end_one_turn() -> None:
    unit = decided(SPEAK, A, END, END, END, B, STOP)
    assert said(unit) == [Said((A, END, END, END), ends=True), Said((B,), ends=False)]


def test_an_end_as_first_decision_ends_the_open_turn_before_the_words_that_follow() -> None:
    unit = decided(END, A, B, STOP, is_turn_open=True)
    assert said(unit) == [Said((), ends=True), Said((A, B), ends=False)]
    assert unit.is_turn_open


def test_an_end_as_first_decision_ends_the_open_turn_when_the_unit_then_listens() -> None:
    unit = decided(END, LISTEN, is_turn_open=True)
    assert unit.is_listen
    assert said(unit) == [Said((), ends=True)]


def test_an_end_as_first_decision_is_the_end_of_the_unit_too_when_a_terminator_follows() -> None:
    for is_turn_open in (False, True):
        unit = decided(END, STOP, is_turn_open=is_turn_open)
        assert said(unit) == [Said((), ends=True)]
        assert not unit.is_turn_open


def test_an_end_without_a_turn_says_nothing_when_the_unit_then_listens() -> None:
    for sampled in ((END, LISTEN), (END, END, LISTEN), (SPEAK, END, LISTEN)):
        assert said(decided(*sampled)) == []


def test_words_said_before_a_unit_listens_are_said() -> None:
    assert said(decided(SPEAK, A, END, LISTEN)) == [Said((A, END), ends=True)]


def test_the_token_limit_closes_the_unit_with_chunk_eos() -> None:
    unit = decided(SPEAK, A, max_tokens=4)
    assert not unit.is_done
    assert unit.take(B) == B
    assert unit.is_done
    assert unit.fed == [SPEAK, A, B]
    assert unit.closing_ids == (STOP, TOKENS.unit_end)
    assert said(unit) == [Said((A, B), ends=False)]


def test_the_token_limit_may_fall_on_the_end_of_a_turn() -> None:
    unit = decided(SPEAK, A, END, max_tokens=4)
    assert unit.is_done
    assert not unit.is_turn_open
    assert said(unit) == [Said((A, END), ends=True)]


def test_the_last_turn_of_a_unit_that_begins_no_other_ends_the_unit_too() -> None:
    unit = UnitDecisions(TOKENS, DuplexConfig(), is_turn_open=True, is_forced_listen=False, is_last_turn=True)
    for token in (A, B, END):
        assert not unit.is_done
        assert unit.take(token) == token
    assert unit.is_done
    assert (unit.is_listen, unit.is_turn_open, unit.closing_ids) == (False, False, (STOP, TOKENS.unit_end))
    assert said(unit) == [Said((B, END), ends=True)]


def test_previous_takes_the_words_of_a_speaking_unit_and_none_of_a_listening_one() -> None:
    assert decided(SPEAK, A, END, B, STOP).previous_ids() == (A, END, B)
    assert decided(SPEAK, A, END, LISTEN).previous_ids() == ()


def test_an_interruption_closes_an_open_turn_and_keeps_the_words_for_previous() -> None:
    unit = decided(SPEAK, A, B)
    unit.interrupt()
    assert unit.fed == [SPEAK, A, B, END]
    assert unit.closing_ids == (STOP, TOKENS.unit_end)
    assert not unit.is_turn_open
    assert unit.previous_ids() == (A, B, END)


def test_an_interruption_before_any_word_listens() -> None:
    for sampled, is_turn_open, fed in (((), False, []), ((), True, [END]), ((END,), True, [END])):
        unit = decided(*sampled, is_turn_open=is_turn_open)
        unit.interrupt()
        assert (unit.fed, unit.is_listen, unit.is_turn_open) == (fed, True, False)
        assert unit.previous_ids() == ()


def test_a_unit_that_has_ended_is_not_interrupted() -> None:
    with pytest.raises(AssertionError, match="has ended"):
        decided(LISTEN).interrupt()


@given(
    sampled=st.lists(st.sampled_from([LISTEN, BOS, END, SPEAK, A]), max_size=20),
    is_turn_open=st.booleans(),
    max_tokens=st.integers(2, 20),
)
def test_an_interruption_at_any_token_keeps_what_was_fed_and_the_limit(
    *, sampled: list[int], is_turn_open: bool, max_tokens: int
) -> None:
    unit = decided(is_turn_open=is_turn_open, max_tokens=max_tokens)
    for token in sampled:
        if unit.is_done or (token == LISTEN and not unit.is_turn_open):
            break
        unit.take(token)
    if unit.is_done:
        return
    fed, is_open = list(unit.fed), unit.is_turn_open
    unit.interrupt()
    assert unit.fed == [*fed, *([END] if is_open else [])]
    assert len(unit.fed) < max_tokens
    assert unit.is_listen is (set(unit.fed) <= {END})


def test_a_unit_that_is_still_being_decided_has_no_close() -> None:
    with pytest.raises(AssertionError, match="still being decided"):
        assert decided(SPEAK).closing_ids


@pytest.mark.parametrize(("max_decided_tokens", "num_forced_listens"), [(1, 0), (0, 0), (2, -1)])
def test_limits_that_leave_no_decision_are_refused(max_decided_tokens: int, num_forced_listens: int) -> None:
    with pytest.raises(ConfigError):
        DuplexConfig(max_decided_tokens, num_forced_listens)


@settings(max_examples=300)
@given(
    sampled=st.lists(st.sampled_from([LISTEN, BOS, END, END, END, STOP, TTS_STOP, SPEAK, A, B]), max_size=20),
    is_turn_open=st.booleans(),
    max_tokens=st.integers(2, 20),
)
def test_any_decisions_are_plain_folds_over_what_was_fed(
    *, sampled: list[int], is_turn_open: bool, max_tokens: int
) -> None:
    unit = decided(is_turn_open=is_turn_open, max_tokens=max_tokens)
    for token in [*sampled, *[END, LISTEN] * 20]:
        if unit.is_done:
            break
        unit.take(token)
    fed, is_open = unit.fed, is_turn_open
    num_ended = 0
    for row, token in enumerate(fed):
        # What precedes the first decision is not spoken, so only an open turn can end there.
        ends_turn = token == END and (row + 1 == len(fed) or fed[row + 1] != END)
        num_ended += int(ends_turn and (row > 0 or is_turn_open))
        is_open = token != END

    assert unit.is_done
    assert len(fed) < max_tokens
    assert unit.is_turn_open is is_open
    utterances = unit.utterances()
    if not utterances:
        assert unit.is_listen
        assert not is_turn_open
        assert set(fed[1:]) <= {END}
        return
    rows = [row for utterance in utterances for row in utterance.rows]
    assert rows == list(range(1, max(1, len(fed)))), "utterances are not what was fed, in order, after the first"
    assert [fed[row] for row in rows] == [token for utterance in utterances for token in utterance.token_ids]
    assert all(utterance.ends_turn for utterance in utterances[:-1]), "a turn that goes on is followed by another"
    assert utterances[-1].ends_turn is (bool(fed) and not is_open)
    if num_ended:
        assert sum(utterance.ends_turn for utterance in utterances) == num_ended
    for utterance in utterances:
        assert not utterance.ends_turn or utterance.token_ids[-1:] in ((), (END,))
