"""What the engine knows of a call while its sound comes in pieces."""

from __future__ import annotations

import pytest
import torch

from antiphon.call import CallRecord, Second
from antiphon.config import SessionConfig
from antiphon.core.messages import Address, CodecChunk, Spoken
from antiphon.happenings import Happening, Speech

ADDRESS = Address("a", 0, 0, 0)


def piece(num_samples: int, *, ends_turn: bool) -> Spoken[torch.Tensor]:
    tokens = () if ends_turn else (1, 2, 3)
    chunk = CodecChunk(ADDRESS, 0.0, 0, tokens, is_first_of_turn=False, ends_turn=ends_turn)
    return Spoken(chunk, torch.zeros(num_samples), goes_on=not ends_turn)


def test_a_turns_end_plays_behind_its_last_second_and_is_waited_for_but_costs_no_time() -> None:
    told: list[Happening] = []
    record = CallRecord("a", "a (0)", told.append, 0.0, 3, session=SessionConfig())
    second = record.unspoken[ADDRESS.epoch, ADDRESS.seq] = Second(0.0, num_unspoken=1)
    record.speak(ADDRESS, piece(24_000, ends_turn=False), 0.1)
    assert record.is_answering
    assert second.num_unspoken == 1
    record.speak(ADDRESS, piece(5_000, ends_turn=True), 0.9)
    assert not record.is_answering
    assert second.num_unspoken == 0
    assert second.times.code2wav_ms == pytest.approx(100)
    speech = [one for one in told if isinstance(one, Speech)]
    assert [one.start_samples for one in speech] == [24_000, 48_000]
    assert [one.chunk.ends_turn for one in speech] == [False, True]


def test_a_turn_stopped_before_its_end_was_spoken_is_over() -> None:
    told: list[Happening] = []
    record = CallRecord("a", "a (0)", told.append, 0.0, 3, session=SessionConfig())
    second = record.unspoken[ADDRESS.epoch, ADDRESS.seq] = Second(0.0, num_unspoken=1)
    record.speak(ADDRESS, piece(24_000, ends_turn=False), 0.1)
    record.enter_next_epoch()
    assert second.num_unspoken == 0
    num_told = len(told)
    record.speak(ADDRESS, piece(5_000, ends_turn=True), 0.2)
    assert len(told) == num_told
