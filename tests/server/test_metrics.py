"""What a call and an engine come to in numbers."""

from __future__ import annotations

import pytest
import torch

import build
from antiphon.core.events import SpeechQueued, TurnEnded, TurnStarted, UnitDecided, UnitFinished
from antiphon.loading import Running
from antiphon.server.metrics import Direction, Metrics
from fakes.clock import HandClock
from server.calls import CALL, CHAT, ENDED, OPENED, counts, queued


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def metrics(clock: HandClock) -> Metrics:
    return Metrics(clock)


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, labels)
    assert found is not None, f"there is no {name} with {labels}"
    return found


def states(metrics: Metrics) -> tuple[float, ...]:
    return tuple(value(metrics, "antiphon_calls", state=state) for state in ("opening", "listening", "speaking"))


def test_a_whole_chat_comes_to_these_numbers(metrics: Metrics, clock: HandClock) -> None:
    watch = metrics.watch_chat()
    assert value(metrics, "antiphon_chats") == 1
    clock.time_s = 1.5
    for happening in (*CHAT, *CHAT):  # whatever comes after the end counts for nothing
        watch.observe(happening)
    wanted = {
        "antiphon_chats": 0,
        "antiphon_chat_prompt_tokens_total": 40,
        "antiphon_chat_answer_tokens_total": 13,
        "antiphon_chat_first_token_seconds_count": 1,
        "antiphon_chat_first_token_seconds_sum": 1.5,
        "antiphon_speech_seconds_total": 0.5,
        "antiphon_turns_total": 0,
    }
    assert {name: value(metrics, name) for name in wanted} == pytest.approx(wanted)
    assert value(metrics, "antiphon_chats_ended_total", code="completed") == 1
    watch.end("disconnected")
    metrics.watch_chat().end("disconnected")
    assert value(metrics, "antiphon_chats_ended_total", code="disconnected") == 1


def test_a_whole_call_comes_to_these_numbers(metrics: Metrics) -> None:
    watch = metrics.watch()
    for happening in CALL:
        watch.observe(happening)
    wanted = {
        "antiphon_opening_seconds_sum": 0.25,
        "antiphon_first_audio_seconds_count": 2,
        # The first answer began in unit 1 and was silent in it; the second one was heard in its first unit.
        "antiphon_first_audio_seconds_sum": (1 + 0.5) + 0.5,
        "antiphon_turns_total": 3,
        "antiphon_interruptions_total": 1,
        "antiphon_void_speech_seconds_total": 0.5,
        "antiphon_speech_seconds_total": 2,
        "antiphon_slides_total": 1,
        "antiphon_dropped_units_total": 2,
        "antiphon_dropped_tokens_total": 40,
        "antiphon_lost_input_seconds_total": 1,
        "antiphon_deadline_misses_total": 0,
    }
    assert {name: value(metrics, name) for name in wanted} == pytest.approx(wanted)
    assert value(metrics, "antiphon_units_total", decision="listen") == 1
    assert value(metrics, "antiphon_units_total", decision="speak") == 3
    assert value(metrics, "antiphon_unit_seconds_count", stage="thinker") == 4
    assert value(metrics, "antiphon_unit_seconds_count", stage="talker") == 3
    assert value(metrics, "antiphon_unit_seconds_sum", stage="code2wav") == pytest.approx(0.1)
    assert value(metrics, "antiphon_errors_total", code="invalid_audio") == 1
    assert value(metrics, "antiphon_errors_total", code="speech_lost") == 1
    assert value(metrics, "antiphon_calls_ended_total", code="completed") == 1
    assert states(metrics) == (0, 0, 0)


def test_a_call_is_in_one_state_at_a_time(metrics: Metrics) -> None:
    seen = []
    watch = metrics.watch()
    for happening in (None, OPENED, TurnStarted(1, 1, 2.0), TurnEnded(1, 1, 2.0), ENDED, OPENED):
        if happening is not None:
            watch.observe(happening)
        seen.append(states(metrics))
    assert seen == [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 0), (0, 0, 0), (0, 0, 0)]


def test_a_call_whose_end_is_not_told_can_be_ended(metrics: Metrics) -> None:
    watch = metrics.watch()
    watch.end("client_gone")
    watch.end("client_gone")
    watch.observe(ENDED)
    assert states(metrics) == (0, 0, 0)
    assert value(metrics, "antiphon_calls_ended_total", code="client_gone") == 1


def test_speech_is_late_when_a_listener_who_plays_it_at_once_runs_dry(metrics: Metrics, clock: HandClock) -> None:
    watch = metrics.watch()
    watch.observe(OPENED)
    watch.observe(TurnStarted(1, 0, 1.0))
    # A second each: heard until 11, until 12, then nothing for 0.25 s, heard until 13.25.
    for clock.time_s, unit in ((10.0, 0), (10.9, 1), (12.25, 2), (13.25, 3)):
        watch.observe(queued(1, unit))
    assert value(metrics, "antiphon_deadline_misses_total") == 1
    assert value(metrics, "antiphon_underrun_milliseconds_total") == pytest.approx(250)
    assert value(metrics, "antiphon_speech_lateness_seconds_count") == 3
    # Between two answers nobody waits.
    clock.time_s = 100.0
    watch.observe(TurnStarted(2, 9, 10.0))
    watch.observe(SpeechQueued(2, 9, 10.0, 10.0, 25, 24_000))
    assert value(metrics, "antiphon_deadline_misses_total") == 1


def test_an_engines_counts_are_given_out_as_they_are(metrics: Metrics) -> None:
    text = metrics.render(counts(num_calls=3)).decode()
    for line in (
        "antiphon_engine_up 1.0",
        'antiphon_stage_sessions{stage="thinker"} 3.0',
        'antiphon_stage_faults_total{fault="gap",stage="thinker"} 2.0',
        'antiphon_kv_blocks{state="unreserved"} 40.0',
        "antiphon_prompt_cache_hits_total 5.0",
        "antiphon_prompt_cache_bytes 3000.0",
        "antiphon_turn_rooms 2.0",
        "antiphon_chunks_waiting 4.0",
        "antiphon_chunks_without_seat 2.0",
        "antiphon_seats_taken 3.0",
        'antiphon_stage_replays_total{stage="thinker"} 30.0',
        'antiphon_stage_launches_total{stage="talker"} 0.0',
        'antiphon_stage_replays_total{stage="code2wav"} 8.0',
        'antiphon_stage_launches_total{stage="code2wav"} 2.0',
        "antiphon_voice_cache_hits_total 7.0",
        "antiphon_voice_cache_bytes 66.0",
    ):
        assert f"\n{line}\n" in f"\n{text}", line


def test_an_engine_that_does_not_answer_has_no_counts_but_the_server_still_has(metrics: Metrics) -> None:
    metrics.render(counts(num_calls=3))
    metrics.count_bytes(Direction.IN, 7)
    metrics.count_error("bad_event")
    text = metrics.render(None).decode()
    assert "antiphon_engine_up 0.0" in text
    assert "antiphon_kv_blocks" not in text
    assert 'antiphon_websocket_bytes_total{direction="in"} 7.0' in text
    assert 'antiphon_errors_total{code="bad_event"} 1.0' in text


def test_two_servers_count_for_themselves(clock: HandClock) -> None:
    first, second = Metrics(clock), Metrics(clock)
    first.count_refusal("draining")
    assert second.registry.get_sample_value("antiphon_refusals_total", {"code": "draining"}) is None


def test_a_live_call_is_counted_as_it_happens(metrics: Metrics, tiny_engine: Running) -> None:
    num_units = 9
    live = tiny_engine.live
    session = live.open("counted", tiny_engine.session, torch.empty(0), build.voice(live.engine))
    for unit in range(num_units):
        session.send_audio(build.second(unit).samples)
    watch = metrics.watch()
    num_decided = num_finished = 0
    for happening in session.happenings():
        watch.observe(happening)
        num_decided += isinstance(happening, UnitDecided)
        num_finished += isinstance(happening, UnitFinished)
        if num_finished == num_units:
            session.close()
    decisions = [value(metrics, "antiphon_units_total", decision=decision) for decision in ("listen", "speak")]
    assert sum(decisions) == num_decided == num_units
    assert min(decisions) > 0, "it both listens and speaks"
    assert value(metrics, "antiphon_unit_seconds_count", stage="thinker") == num_units
    assert value(metrics, "antiphon_first_audio_seconds_count") == value(metrics, "antiphon_turns_total") > 0
    assert value(metrics, "antiphon_speech_seconds_total") > 0
    assert value(metrics, "antiphon_calls_ended_total", code="completed") == 1
    assert states(metrics) == (0, 0, 0)
