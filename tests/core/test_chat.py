"""What drawn tokens mean in an answer, and where its text stops."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from antiphon.core.chat import PIECE_TOKENS, AnswerConfig, AnswerEnd, ChatTokens, PieceDecisions, StopText
from antiphon.errors import ConfigError

END, OTHER_END, PIECE_END = 100, 101, 102
TOKENS = ChatTokens(ends=(END, OTHER_END), piece_end=PIECE_END, decisions=(103,))


def taken(drawn: list[int], max_answer_tokens: int = 1000, num_answer_tokens: int = 0) -> tuple[list[int], int, object]:
    """What of a piece is said, how many tokens it has and how it ends."""
    piece = PieceDecisions(TOKENS, max_answer_tokens, num_answer_tokens)
    said = []
    for token in drawn:
        if piece.is_done:
            break
        if piece.take(token):
            said.append(token)
    assert piece.is_done
    return said, piece.num_taken, piece.end


def test_a_piece_has_so_many_tokens_and_the_answer_goes_on() -> None:
    assert taken([*range(50)]) == ([*range(PIECE_TOKENS)], PIECE_TOKENS, None)


def test_the_end_of_a_piece_is_a_token_of_the_answer_that_is_not_said() -> None:
    assert taken([1, 2, PIECE_END, 3]) == ([1, 2], 3, None)


@pytest.mark.parametrize("end", [END, OTHER_END])
def test_each_end_ends_the_answer_and_counts_for_nothing(end: int) -> None:
    assert taken([1, end]) == ([1], 1, AnswerEnd.STOP)
    assert taken([end]) == ([], 0, AnswerEnd.STOP)


def test_an_answer_ends_with_its_last_token_wherever_in_a_piece_that_is() -> None:
    assert taken([1, 2, 3], max_answer_tokens=12, num_answer_tokens=10) == ([1, 2], 2, AnswerEnd.LENGTH)
    assert taken([1, PIECE_END], max_answer_tokens=2) == ([1], 2, AnswerEnd.LENGTH)
    assert taken([END], max_answer_tokens=1) == ([], 0, AnswerEnd.STOP)


def test_the_last_token_is_known_to_be_the_last_before_it_is_taken() -> None:
    """So that nothing is drawn after it."""
    piece = PieceDecisions(TOKENS, 3, 0)
    known = []
    while not piece.is_done:
        known.append(piece.is_last_of_answer)
        piece.take(1)
    assert known == [False, False, True]


def test_a_stop_sequence_ends_the_answer() -> None:
    piece = PieceDecisions(TOKENS, 100, 0)
    piece.take(1)
    piece.stop()
    assert (piece.is_done, piece.end) == (True, AnswerEnd.STOP)


@pytest.mark.parametrize(("max_tokens", "max_context_tokens", "stop"), [(0, 2, ()), (1, 1, ()), (1, 2, ("a", ""))])
def test_an_answer_that_cannot_be_is_refused(max_tokens: int, max_context_tokens: int, stop: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        AnswerConfig(max_tokens, max_context_tokens, stop=stop)


def shown(pieces: list[str], sequences: tuple[str, ...]) -> str:
    stop = StopText(sequences)
    text = ""
    for piece in pieces:
        text += stop.push(piece)
        if stop.is_stopped:
            return text
    return text + stop.finish()


def plain(text: str, sequences: tuple[str, ...]) -> str:
    """Up to where a sequence is complete first; of those that are complete there, up to the one that begins first."""
    for end in range(len(text) + 1):
        starts = [text[:end].find(sequence) for sequence in sequences if sequence in text[:end]]
        if starts:
            return text[: min(starts)]
    return text


LETTERS = st.text("ab", max_size=12)


@example(["a", "a", "b"], ("ab", "b"))
@example(["aab"], ("aab", "ab"))
@example(["abab"], ("abab", "b"))
@given(st.lists(LETTERS, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple))
def test_however_the_text_comes_it_is_shown_up_to_its_first_stop_sequence(
    pieces: list[str], sequences: tuple[str, ...]
) -> None:
    text = "".join(pieces)
    assert shown(pieces, sequences) == shown([*text], sequences) == plain(text, sequences)


@given(LETTERS, st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple))
def test_no_more_is_held_than_may_begin_a_stop_sequence(text: str, sequences: tuple[str, ...]) -> None:
    stop = StopText(sequences)
    shown = ""
    for end in range(1, len(text) + 1):
        shown += stop.push(text[end - 1])
        if stop.is_stopped:
            return
        held = text[len(shown) : end]
        assert stop.is_holding == bool(held)
        assert not held or any(sequence.startswith(held) for sequence in sequences)
