"""What was heard of an answer: the words by a time, and which answer a client means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.server.realtime.conversation import MAX_ITEMS, RequestError
from antiphon.server.realtime.playback import Ledger, Playback
from antiphon.units import OUTPUT_RATE_HZ


def spoken(*seconds: tuple[str, float]) -> Playback:
    """seconds: the words that came, and how much sound was made of them."""
    playback = Playback("resp_1", "item_1")
    for words, sound_s in seconds:
        playback.words += words
        playback.make(round(sound_s * OUTPUT_RATE_HZ))
    return playback


def test_words_are_spread_evenly_over_their_seconds() -> None:
    playback = spoken(("abcdefghij", 1.0), ("klmno", 0.5))
    assert [playback.words_by(ms) for ms in (0, 100, 500, 1000, 1200, 1500)] == [
        "",
        "a",
        "abcde",
        "abcdefghij",
        "abcdefghijkl",
        "abcdefghijklmno",
    ]


def test_words_without_sound_are_heard_with_the_rest_if_the_answer_came_whole() -> None:
    playback = spoken(("abcd", 1.0))
    playback.words += "!"
    assert playback.words_by(1000) == "abcd"
    assert playback.words_by(5000) == "abcd"
    playback.is_over = True
    assert playback.words_by(5000) == "abcd"
    playback.is_whole = True
    assert playback.words_by(1000) == "abcd!"
    assert playback.words_by(500) == "ab"


def test_an_answer_without_sound_has_nothing_that_was_heard() -> None:
    playback = Playback("resp_1", "item_1", words="abcd")
    playback.is_over = True
    assert playback.words_by(0) == ""


@given(
    seconds=st.lists(st.tuples(st.text(max_size=20), st.floats(0, 1.2)), max_size=6),
    times_ms=st.lists(st.integers(0, 8000), min_size=2, max_size=6),
)
def test_more_time_never_has_fewer_words(seconds: list[tuple[str, float]], times_ms: list[int]) -> None:
    playback = spoken(*seconds)
    heard = [playback.words_by(ms) for ms in sorted(times_ms)]
    for one, later in zip(heard, heard[1:], strict=False):
        assert later.startswith(one)
    assert playback.words.startswith(heard[-1])
    assert playback.words_by(playback.made_ms) == playback.words


def test_more_than_was_sent_cannot_have_been_played() -> None:
    playback = spoken(("abcd", 2.0))
    playback.num_sent = OUTPUT_RATE_HZ
    assert (playback.made_ms, playback.sent_ms) == (2000, 1000)
    playback.check_sent(1000, "played_ms")
    with pytest.raises(RequestError) as refused:
        playback.check_sent(1001, "played_ms")
    assert (refused.value.code, refused.value.param) == ("audio_end_ms_too_large", "played_ms")


def test_an_answer_is_found_by_its_item_its_response_or_as_the_newest() -> None:
    ledger = Ledger()
    one, two = ledger.begin("resp_1", "item_1"), ledger.begin("resp_2", "item_2")
    assert ledger.find("item_1", None) is ledger.find("item_1", "resp_1") is ledger.find(None, "resp_1") is one
    assert ledger.find(None, None) is ledger.of_item("item_2") is two


@pytest.mark.parametrize(
    ("item_id", "response_id", "code"),
    [
        ("item_no", None, "playback_item_not_found"),
        (None, "resp_no", "playback_item_not_found"),
        ("item_1", "resp_2", "playback_item_mismatch"),
    ],
)
def test_no_answer_is_found_by_a_wrong_name(item_id: str | None, response_id: str | None, code: str) -> None:
    ledger = Ledger()
    ledger.begin("resp_1", "item_1")
    ledger.begin("resp_2", "item_2")
    with pytest.raises(RequestError) as refused:
        ledger.find(item_id, response_id)
    assert refused.value.code == code


def test_of_very_many_answers_the_oldest_are_forgotten() -> None:
    ledger = Ledger()
    for number in range(MAX_ITEMS + 1):
        ledger.begin(f"resp_{number}", f"item_{number}")
    assert ledger.of_item("item_1").response_id == "resp_1"
    with pytest.raises(RequestError):
        ledger.of_item("item_0")
