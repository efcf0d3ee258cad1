"""The arena: seats and places; what is free is free once, and what is seated always finds its room."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import build_voice
from antiphon.models.minicpmo.flow_cache import FlowShape, Parts, SpeechState, Voice
from antiphon.models.minicpmo.flow_membership import Retention
from antiphon.models.minicpmo.flow_rules import flow_rules
from antiphon.models.minicpmo.hift_config import Generation
from antiphon.models.minicpmo.speech_arena import WINDOW_TOKENS, ArenaSize, SpeechArena
from build_voice import CPU

SHAPE = FlowShape(build_voice.FLOW, num_steps=2)
VOICE_FRAMES = (6, 60, 160)


def voice(num_frames: int) -> Voice:
    numbers = Parts(num_frames // 2, num_frames, num_frames)
    entries = SHAPE.entries.zip(numbers, lambda entry, number: entry.new(number, torch.float32, CPU))
    return Voice(torch.zeros(1, 4), entries, SHAPE.tails(1, CPU))


VOICES = [voice(num_frames) for num_frames in VOICE_FRAMES]


def test_a_turn_with_a_longer_voice_takes_more_of_the_room_and_one_too_many_takes_none() -> None:
    size = ArenaSize.for_turns(Retention.REFERENCE, 150, max_speaking=4, largest_batch=1)
    arena = SpeechArena(SHAPE, Retention.REFERENCE, size, torch.float32, CPU)
    assert arena.num_fitting([150] * 9) == 4
    assert arena.num_fitting([300] * 9) == 2
    assert arena.num_fitting([20] * 9) == 4, "as many as may speak at all"
    taken = arena.seat(450)
    assert arena.num_fitting([150, 150]) == 1
    assert arena.num_fitting([151]) == 0
    arena.unseat(taken)
    assert arena.num_fitting([150] * 9) == 4


def test_with_voice_first_a_turn_takes_two_seconds_whatever_the_voice() -> None:
    size = ArenaSize.for_turns(Retention.VOICE_FIRST, 300, max_speaking=4, largest_batch=1)
    assert size.max_frames == 400
    arena = SpeechArena(SHAPE, Retention.VOICE_FIRST, size, torch.float32, CPU)
    assert arena.num_fitting([20, 300, 3000, 300]) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_takes_the_bytes_that_its_size_says(dtype: torch.dtype) -> None:
    size = ArenaSize(max_speaking=3, max_frames=170, max_windows=2)
    arena = SpeechArena(SHAPE, Retention.REFERENCE, size, dtype, CPU)
    assert arena.num_bytes == size.num_bytes(SHAPE, dtype)
    assert arena.entries.steps.keys.dtype == dtype
    assert arena.tails.convs.dtype == torch.float32


turns = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 5, 17, WINDOW_TOKENS, WINDOW_TOKENS])), max_size=60)


@settings(max_examples=40, deadline=None)
@given(turns, st.sampled_from(Retention), st.sampled_from(Generation))
def test_who_is_seated_always_finds_places_and_no_place_is_in_two_hands(
    script: list[tuple[int, int]], retention: Retention, generation: Generation
) -> None:
    """Four sessions and one voice too many for all; a move is a window, or the turn's end where it finds no seat."""
    frames = [VOICE_FRAMES[who % 3] for who in range(4)]
    size = ArenaSize(max_speaking=3, max_frames=320, max_windows=1)
    arena = SpeechArena(SHAPE, retention, size, torch.float32, CPU)
    kept_tokens = flow_rules(generation, retention).kept_tokens
    states = [SpeechState.at_turn_start(VOICES[who % 3]) for who in range(4)]
    seats: dict[int, int] = {}
    for who, num_tokens in script:
        if who not in seats and not arena.num_fitting([frames[who]]):
            for other, seat in seats.items():
                arena.keep_only(SpeechState.at_turn_start(VOICES[other % 3]), [states[other]])
                states[other] = SpeechState.at_turn_start(VOICES[other % 3])
                arena.unseat(seat)
            seats.clear()
        if who not in seats:
            seats[who] = arena.seat(frames[who])
        before = states[who]
        writing = arena.take(num_tokens)
        after = before.followed_by(writing, VOICES[who % 3], retention, kept_tokens)
        arena.forget_unread(writing, after)
        held = after.held
        # Until the chunk is accepted, the state before it holds its places too.
        for new, old in zip(writing.places.all, before.held.all, strict=True):
            assert not {*new} & {*old}
        arena.keep_only(after, [before])
        states[who] = after
        everyone = [state.held for state in states]
        for kind in range(3):
            places = [place for one in everyone for place in one.all[kind]]
            assert len(places) == len({*places}) == arena.num_held.all[kind]
        assert len(held.steps) <= seats[who]
