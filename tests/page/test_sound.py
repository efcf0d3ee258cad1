"""Rates, the jitter buffer and samples as bytes: the page's own modules, in a browser, without a call."""

from __future__ import annotations

import math
from typing import TypeVar

import pytest

from page.tabs import Tab

T = TypeVar("T")

RATE_HZ = 48_000
BLOCK = 128

PLAYER = f"""
    const buffer = new JitterBuffer({RATE_HZ});
    const played = [];
    const happened = [];
    const sound = (ms, value = 0.5) => new Float32Array({RATE_HZ} * ms / 1000).fill(value);
    const play = (ms) => {{
        for (let left = {RATE_HZ} * ms / 1000; left > 0; left -= {BLOCK}) {{
            const block = new Float32Array({BLOCK});
            buffer.read(block);
            played.push(...block);
            happened.push(...buffer.takeHappened());
        }}
    }};
    const largestStep = () =>
        played.reduce((most, value, i) => Math.max(most, i ? Math.abs(value - played[i - 1]) : 0), 0);
"""


def player(kind: type[T], tab: Tab, body: str) -> T:
    return tab.run(kind, "audio/jitter.js", "JitterBuffer, FIRST_TARGET_MS, MAX_TARGET_MS", PLAYER + body)


RATES = [(48_000, 16_000), (44_100, 16_000), (24_000, 48_000), (24_000, 44_100)]


@pytest.mark.parametrize(("input_hz", "output_hz"), RATES)
def test_however_sound_is_split_it_is_the_same_at_the_other_rate(modules: Tab, input_hz: int, output_hz: int) -> None:
    difference, num_samples, error = modules.run(
        tuple[float, int, float],
        "audio/resampler.js",
        "Resampler",
        f"""
        const wave = (s) => Math.sin(2 * Math.PI * 440 * s);
        const tone = Float32Array.from({{ length: {input_hz} }}, (_, i) => wave(i / {input_hz}));
        const whole = new Resampler({input_hz}, {output_hz}).push(tone);
        const pieces = new Resampler({input_hz}, {output_hz});
        const split = [];
        for (let at = 0, size = 1; at < tone.length; at += size, size = (size * 7) % 509 + 1) {{
            split.push(...pieces.push(tone.subarray(at, at + size)));
        }}
        const delay = new Resampler({input_hz}, {output_hz}).half / {input_hz};
        let error = 0;
        for (let i = 2000; i < whole.length; i += 1) {{
            error = Math.max(error, Math.abs(whole[i] - wave(i / {output_hz} - delay)));
        }}
        return [Math.max(...split.map((value, i) => Math.abs(value - whole[i]))), split.length, error];
        """,
    )
    assert difference == 0
    assert abs(num_samples - output_hz) <= 1
    # A window of 16 crossings passes this tone to about one part in a thousand.
    assert error < 2e-3


def test_what_the_lower_rate_cannot_hold_is_gone_and_not_folded_back(modules: Tab) -> None:
    loudest = modules.run(
        float,
        "audio/resampler.js",
        "Resampler",
        """
        const tone = Float32Array.from({ length: 48000 }, (_, i) => Math.sin(2 * Math.PI * 11000 * i / 48000));
        return Math.max(...new Resampler(48000, 16000).push(tone).subarray(1000));
        """,
    )
    assert loudest < 1e-3


def test_sound_starts_after_a_short_wait_and_without_a_click(modules: Tab) -> None:
    before, after, step = player(
        tuple[float, float, float],
        modules,
        """
        play(500);
        buffer.push("a", sound(1000));
        play(60);
        const before = Math.max(...played);
        play(60);
        return [before, Math.max(...played), largestStep()];
        """,
    )
    assert before == 0
    assert after == 0.5
    assert step < 0.01


def test_a_short_answer_that_is_whole_does_not_wait(modules: Tab) -> None:
    assert player(
        list[tuple[str, float]],
        modules,
        """
        buffer.push("a", sound(20));
        buffer.end("a");
        play(40);
        return happened.map(({ kind, playedMs }) => [kind, playedMs]);
        """,
    ) == [("started", 0), ("ended", 20)]


def test_an_underrun_fades_and_playing_waits_longer_from_then_on_by_as_much_as_sound_was_late(modules: Tab) -> None:
    kinds, target_ms, num_underruns, step, total = player(
        tuple[list[str], float, int, float, float],
        modules,
        """
        buffer.push("a", sound(100));
        play(300);
        buffer.push("a", sound(100));
        play(100);
        const early = buffer.isPlaying;
        buffer.push("a", sound(100));
        buffer.end("a");
        play(300);
        return [
            happened.map(({ kind }) => kind), buffer.targetMs, buffer.numUnderruns, largestStep(),
            happened.at(-1).playedMs + (early ? 1e6 : 0),
        ];
        """,
    )
    assert kinds == ["started", "underrun", "ended"]
    # It waited 80 ms, played 100, and was dry for 120, in blocks of 2.7 ms.
    assert target_ms == pytest.approx(80 + 120, abs=6)
    assert num_underruns == 1
    assert step < 0.01
    assert total == 300


def test_an_answer_whose_end_comes_late_was_not_late_itself(modules: Tab) -> None:
    assert player(
        tuple[list[str], int],
        modules,
        """
        buffer.push("a", sound(100));
        play(500);
        buffer.end("a");
        play(10);
        return [happened.map(({ kind }) => kind), buffer.numUnderruns];
        """,
    ) == (["started", "ended"], 0)


def test_the_wait_does_not_grow_for_ever_and_shrinks_in_calm(modules: Tab) -> None:
    grown, calm = player(
        tuple[bool, bool],
        modules,
        """
        for (let i = 0; i < 20; i += 1) {
            buffer.push("a", sound(500));
            play(1500);
        }
        const grown = buffer.targetMs;
        for (let i = 0; i < 400; i += 1) {
            buffer.push("a", sound(1000));
            for (let block = 0; block < 375; block += 1) buffer.read(new Float32Array(128));
        }
        return [grown === MAX_TARGET_MS, buffer.targetMs === FIRST_TARGET_MS];
        """,
    )
    assert grown
    assert calm


def test_a_cut_is_silence_within_thirty_milliseconds_and_says_what_was_heard(modules: Tab) -> None:
    late, step, kinds, played_ms = player(
        tuple[float, float, list[str], float],
        modules,
        """
        buffer.push("a", sound(1000));
        play(200);
        const heard = played.length;
        buffer.cut();
        play(100);
        const late = Math.max(...played.slice(heard + 0.03 * 48000));
        return [late, largestStep(), happened.map(({ kind }) => kind), happened.at(-1).playedMs];
        """,
    )
    assert late == 0
    assert step < 0.01
    assert kinds == ["started", "cut"]
    assert 120 <= played_ms <= 155


def test_a_ducked_answer_is_quieter_and_comes_back(modules: Tab) -> None:
    ducked, back = player(
        tuple[float, float],
        modules,
        """
        buffer.push("a", sound(1000));
        play(200);
        buffer.duck(true);
        play(100);
        const ducked = played.at(-1);
        buffer.duck(false);
        play(100);
        return [ducked, played.at(-1)];
        """,
    )
    assert math.isclose(ducked, 0.125)
    assert back == 0.5


def test_two_answers_in_a_row_are_told_apart(modules: Tab) -> None:
    assert player(
        list[tuple[str, str, float]],
        modules,
        """
        buffer.push("a", sound(100));
        buffer.end("a");
        buffer.push("b", sound(50));
        buffer.end("b");
        play(300);
        return happened.map(({ kind, item, playedMs }) => [kind, item, playedMs]);
        """,
    ) == [("started", "a", 0), ("ended", "a", 100), ("started", "b", 0), ("ended", "b", 50)]


def test_samples_survive_their_way_over_the_wire(modules: Tab) -> None:
    assert modules.run(
        tuple[int, bool, list[int], list[float]],
        "audio/pcm.js",
        "pcm16FromBase64, pcm16ToBase64, toFloats, toPcm16",
        """
        const pcm = Int16Array.from({ length: 20001 }, (_, i) => (i * 7919) % 65536 - 32768);
        const back = pcm16FromBase64(pcm16ToBase64(pcm));
        const loud = toPcm16(Float32Array.of(-2, -1, 0, 1, 2));
        const isSame = back.every((value, i) => value === pcm[i]);
        return [back.length, isSame, [...loud], [...toFloats(Int16Array.of(-32768, 16384))]];
        """,
    ) == (20001, True, [-32768, -32767, 0, 32767, 32767], [-1, 0.5])
