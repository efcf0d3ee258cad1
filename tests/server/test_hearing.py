"""Sound between a client and its call: turns are detected in parts, so that nobody waits for a long piece."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from antiphon.server.audio import FORMATS
from antiphon.server.events.session import ServerVad
from antiphon.server.realtime.hearing import WATCHED_SAMPLES, Hearing
from antiphon.server.vad.choice import speech_models
from antiphon.server.vad.detector import Started, Stopped, TurnEvent
from antiphon.units import INPUT_RATE_HZ


def hearing() -> Hearing:
    one = Hearing(FORMATS["audio/pcm"], 100 * INPUT_RATE_HZ, speech_models(None), now_s=0.0)
    one.watch(ServerVad())
    return one


def talk() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Three sentences of two seconds, three seconds apart."""
    rng = np.random.default_rng(0)
    sentence, pause = 0.3 * rng.standard_normal(2 * INPUT_RATE_HZ), np.zeros(3 * INPUT_RATE_HZ)
    return np.concatenate([pause, sentence] * 3 + [pause]).astype(np.float32)


def caught_up(one: Hearing) -> list[list[TurnEvent]]:
    parts = []
    while one.is_behind:
        parts.append(one.detect())
    return parts


def test_turns_in_a_long_piece_are_detected_part_by_part() -> None:
    one, sound = hearing(), talk()
    one.hear(sound, 0.0)
    parts = caught_up(one)
    assert len(parts) == -(-len(sound) // WATCHED_SAMPLES)
    found = [event for part in parts for event in part]
    assert [type(event) for event in found] == [Started, Stopped] * 3
    starts_ms = [event.audio_start_ms for event in found if isinstance(event, Started)]
    assert all(abs(later - earlier - 5_000) < 100 for earlier, later in pairwise(starts_ms))


def test_what_is_detected_does_not_depend_on_the_pieces_that_came() -> None:
    whole, pieces, sound = hearing(), hearing(), talk()
    whole.hear(sound, 0.0)
    found = []
    for piece in np.split(sound, range(701, len(sound), 701)):
        pieces.hear(piece, 0.0)
        found += caught_up(pieces)
    assert sum(found, []) == sum(caught_up(whole), [])


def test_nothing_is_detected_where_nobody_asked_for_it() -> None:
    one = hearing()
    one.watch(None)
    one.hear(talk(), 0.0)
    assert not one.is_behind
    assert one.detect() == []
