"""An engine's counts as metrics. They are the engine's own totals, so nothing is added up here.

Shown by tests/server/test_metrics.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from antiphon.counts import EngineCounts


class EngineCollector(Collector):
    """Gives out the counts that it was given last; without any it only says that the engine does not answer."""

    def __init__(self) -> None:
        self.counts: EngineCounts | None = None

    def collect(self) -> Iterable[Metric]:
        yield _gauge(
            "antiphon_engine_up", "1 if the engine answered when it was asked.", float(self.counts is not None)
        )
        if self.counts is not None:
            yield from _stages(self.counts)
            yield from _thinker(self.counts)
            yield from _voice(self.counts)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known when they are collected."""
        return ()


def _stages(counts: EngineCounts) -> Iterable[Metric]:
    sessions = GaugeMetricFamily("antiphon_stage_sessions", "Sessions that a stage holds state of.", labels=["stage"])
    faults = CounterMetricFamily(
        "antiphon_stage_faults", "Messages that a stage did not obey.", labels=["stage", "fault"]
    )
    surveys = {"thinker": counts.thinker, "talker": counts.talker, "code2wav": counts.code2wav}
    for stage, survey in surveys.items():
        sessions.add_metric([stage], survey.num_sessions)
        for fault, number in survey.faults:
            faults.add_metric([stage, fault.value], number)
    yield from (sessions, faults)
    replays = CounterMetricFamily(
        "antiphon_stage_replays", "Runs of a stage's networks that were recorded at start.", labels=["stage"]
    )
    launches = CounterMetricFamily(
        "antiphon_stage_launches", "Those that fitted no recording; all, without a GPU.", labels=["stage"]
    )
    for stage, runs in (
        ("thinker", counts.thinker.counts.num_runs),
        ("talker", counts.talker.counts.num_runs),
        ("code2wav", counts.code2wav.counts.num_runs),
    ):
        replays.add_metric([stage], runs.num_replayed)
        launches.add_metric([stage], runs.num_launched)
    yield from (replays, launches)


def _thinker(counts: EngineCounts) -> Iterable[Metric]:
    thinker = counts.thinker.counts
    blocks = GaugeMetricFamily("antiphon_kv_blocks", "Blocks of the thinker's KV cache.", labels=["state"])
    blocks.add_metric(["all"], thinker.num_blocks)
    blocks.add_metric(["free"], thinker.num_free_blocks)
    blocks.add_metric(["unreserved"], thinker.num_unreserved_blocks)
    yield blocks
    yield _gauge("antiphon_kv_block_bytes", "Size of such a block.", thinker.block_bytes)
    prompts = thinker.prompts
    yield _counter("antiphon_prompt_cache_hits", "Prompts that were there already.", prompts.num_hits)
    yield _counter("antiphon_prompt_cache_misses", "Prompts that were not.", prompts.num_misses)
    yield _counter("antiphon_prompt_cache_evictions", "Prompts that had to go.", prompts.num_evictions)
    num_bytes = prompts.num_blocks * thinker.block_bytes
    yield _gauge("antiphon_prompt_cache_bytes", "Keys and values of stored prompts.", num_bytes)


def _voice(counts: EngineCounts) -> Iterable[Metric]:
    talker, code2wav = counts.talker.counts, counts.code2wav.counts
    yield _gauge("antiphon_turn_rooms", "Turns for which the talker still has room.", talker.num_rooms)
    yield _gauge("antiphon_turns_waiting", "Turns that wait for such room.", talker.num_waiting)
    yield _gauge("antiphon_chunks_waiting", "Codec chunks that wait for the vocoder.", code2wav.num_due)
    yield _gauge("antiphon_chunks_without_seat", "Those of them whose turn waits for room.", code2wav.num_waiting)
    yield _gauge("antiphon_seats_taken", "Turns that hold room in the vocoder.", code2wav.num_speaking)
    voices = code2wav.voices
    yield _counter("antiphon_voice_cache_hits", "Voices that were there already, or on their way.", voices.num_hits)
    yield _counter("antiphon_voice_cache_misses", "Voices that were not.", voices.num_misses)
    yield _counter("antiphon_voice_cache_evictions", "Voices that had to go.", voices.num_evictions)
    yield _counter("antiphon_voice_failures", "Voices that could not be built.", voices.num_failures)
    yield _gauge("antiphon_voices_building", "Voices on their way.", voices.num_building)
    yield _gauge("antiphon_voice_cache_voices", "Voices that are kept.", voices.num_voices)
    yield _gauge("antiphon_voice_cache_bytes", "Caches of kept voices.", voices.num_bytes)


def _gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, what, value)


def _counter(name: str, what: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, what, value)
