"""When codec tokens become windows. The reference's recorded calls: tests/golden/code2wav."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.codec_buffer import CHUNK_TOKENS, MIN_FLUSHED_TOKENS, CodecBuffer, Window

SILENCE = 7
LOOKAHEAD = 3
FULL = CHUNK_TOKENS + LOOKAHEAD


@dataclass(frozen=True, slots=True)
class Push:
    num_tokens: int
    is_flush: bool


pushes = st.lists(st.builds(Push, st.integers(0, 70), st.booleans()), max_size=12)


def rendered(window: Window) -> tuple[int, ...]:
    return window.tokens if window.is_last else window.tokens[:-LOOKAHEAD]


@given(pushes, st.integers(0, 70))
def test_a_turn_is_rendered_whole_and_in_order_however_its_tokens_arrive(units: list[Push], num_last: int) -> None:
    buffer = CodecBuffer(SILENCE, LOOKAHEAD)
    said: list[int] = []
    windows: list[Window] = []
    for unit in units:
        new = range(100 + len(said), 100 + len(said) + unit.num_tokens)
        said += new
        windows += buffer.push(new, is_flush=unit.is_flush, is_last=False)
    last = range(num_last)
    windows += buffer.push(last, is_flush=False, is_last=True)

    assert [token for window in windows for token in rendered(window)] == [SILENCE] * LOOKAHEAD + said + [*last]
    assert [window.is_last for window in windows] == [False] * (len(windows) - 1) + [True]
    assert buffer.tokens == ()


@given(pushes)
def test_a_window_is_full_or_flushed_with_enough_to_render_and_nothing_ready_is_held(units: list[Push]) -> None:
    buffer = CodecBuffer(SILENCE, LOOKAHEAD)
    for unit in units:
        windows = buffer.push(range(unit.num_tokens), is_flush=unit.is_flush, is_last=False)
        least = MIN_FLUSHED_TOKENS + LOOKAHEAD if unit.is_flush else FULL
        assert all(least <= len(window.tokens) <= FULL for window in windows)
        assert LOOKAHEAD <= len(buffer.tokens) < least


def test_a_window_starts_with_what_the_one_before_only_looked_at() -> None:
    buffer = CodecBuffer(SILENCE, LOOKAHEAD)
    first, second = buffer.push(range(2 * CHUNK_TOKENS), is_flush=False, is_last=False)
    assert second.tokens[:LOOKAHEAD] == first.tokens[-LOOKAHEAD:]
    assert buffer.tokens == second.tokens[-LOOKAHEAD:]


def test_too_few_tokens_to_flush_are_held_and_join_the_next_window() -> None:
    buffer = CodecBuffer(SILENCE, LOOKAHEAD)
    few = range(MIN_FLUSHED_TOKENS - 1)
    assert buffer.push(few, is_flush=True, is_last=False) == []
    (window,) = buffer.push([99], is_flush=True, is_last=False)
    assert window == Window((SILENCE,) * LOOKAHEAD + (*few, 99), is_last=False)


def test_a_turn_without_a_token_ends_with_its_silence() -> None:
    buffer = CodecBuffer(SILENCE, LOOKAHEAD)
    assert buffer.push([], is_flush=True, is_last=True) == [Window((SILENCE,) * LOOKAHEAD, is_last=True)]


def test_an_interrupted_turn_leaves_nothing_to_the_next() -> None:
    buffer = CodecBuffer(SILENCE, LOOKAHEAD)
    buffer.push(range(10), is_flush=False, is_last=False)
    buffer.reset()
    assert buffer.tokens == (SILENCE,) * LOOKAHEAD
