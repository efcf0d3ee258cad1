from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import AudioError, ConfigError
from antiphon.recording import CallWriter, Channels, Recording, Samples, read_voice, to_input_rate
from antiphon.units import INPUT_RATE_HZ, OUTPUT_RATE_HZ, OUTPUT_SAMPLES_PER_UNIT, UNIT_SAMPLES


def tone(rate_hz: int, duration_s: float, frequency_hz: float = 440.0) -> Samples:
    times = np.arange(round(rate_hz * duration_s)) / rate_hz
    return (0.5 * np.sin(2 * np.pi * frequency_hz * times)).astype(np.float32)


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
@pytest.mark.parametrize("rate_hz", [8000, 16000, 44100, 48000])
def test_a_recording_of_any_kind_and_rate_becomes_whole_seconds(tmp_path: Path, suffix: str, rate_hz: int) -> None:
    path = tmp_path / f"caller.{suffix}"
    sf.write(path, tone(rate_hz, 2.5), rate_hz)
    units = list(Recording(path).units())
    assert len(units) == 3
    assert {unit.heard.shape for unit in units} == {(UNIT_SAMPLES,)}
    assert {unit.caller.shape for unit in units} == {(OUTPUT_SAMPLES_PER_UNIT,)}
    heard = np.concatenate([unit.heard.numpy() for unit in units])
    assert np.abs(heard[4000:36000]).max() == pytest.approx(0.5, abs=0.1)
    peak_hz = np.abs(np.fft.rfft(heard[4000:20000])).argmax() * INPUT_RATE_HZ / 16000
    assert peak_hz == pytest.approx(440, abs=2)


def test_a_stereo_recording_is_heard_as_the_mean_of_its_channels(tmp_path: Path) -> None:
    left, right = tone(16000, 1.0), tone(16000, 1.0, 700.0)
    sf.write(tmp_path / "a.wav", np.stack([left, right], axis=1), 16000, subtype="FLOAT")
    (unit,) = Recording(tmp_path / "a.wav").units()
    np.testing.assert_allclose(unit.heard.numpy(), (left + right) / 2, atol=1e-6)


def test_at_the_models_rate_samples_arrive_unchanged_and_the_rest_is_silence(tmp_path: Path) -> None:
    samples = tone(INPUT_RATE_HZ, 1.25)
    sf.write(tmp_path / "a.wav", samples, INPUT_RATE_HZ, subtype="FLOAT")
    heard = np.concatenate([unit.heard.numpy() for unit in Recording(tmp_path / "a.wav").units()])
    np.testing.assert_array_equal(heard[: len(samples)], samples)
    assert not heard[len(samples) :].any()


def test_a_very_short_recording_is_one_second(tmp_path: Path) -> None:
    sf.write(tmp_path / "a.wav", tone(44100, 0.001), 44100)
    assert len(list(Recording(tmp_path / "a.wav").units())) == 1


def test_what_is_no_recording_is_refused_with_its_name(tmp_path: Path) -> None:
    text, empty, silent = tmp_path / "text.wav", tmp_path / "empty.wav", tmp_path / "silent.wav"
    text.write_text("this is no sound")
    empty.touch()
    sf.write(silent, np.empty(0, dtype=np.float32), 16000)
    for path in (tmp_path / "missing.wav", tmp_path, text, empty, silent):
        with pytest.raises(AudioError, match=path.name):
            Recording(path)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_sample_that_is_no_number_is_refused_with_its_second(tmp_path: Path, poison: float) -> None:
    samples = tone(16000, 3.0)
    samples[40000] = poison
    sf.write(tmp_path / "a.wav", samples, 16000, subtype="FLOAT")
    with pytest.raises(AudioError, match="second 2"):
        list(Recording(tmp_path / "a.wav").units())
    with pytest.raises(AudioError):
        read_voice(tmp_path / "a.wav")


def test_a_voice_keeps_its_channels_and_its_rate(tmp_path: Path) -> None:
    sf.write(tmp_path / "voice.wav", np.stack([tone(48000, 1.0)] * 2, axis=1), 48000)
    samples, rate_hz = read_voice(tmp_path / "voice.wav")
    assert samples.shape == (2, 48000)
    assert rate_hz == 48000
    assert to_input_rate(samples, rate_hz).shape == (INPUT_RATE_HZ,)


@given(
    speech=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60)), max_size=8),
    steps=st.lists(st.integers(0, 80), max_size=8),
    channels=st.sampled_from(Channels),
)
def test_a_written_call_holds_every_sample_at_its_place(
    speech: list[tuple[int, int]], steps: list[int], channels: Channels, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("call") / "out.wav"
    want = np.zeros((2000, 2), dtype=np.float32)
    end = written = heard = 0
    with CallWriter(path, channels) as writer:
        for index, (gap, length) in enumerate(speech):
            start = max(end, written) + gap
            samples = np.full(length, (index + 1) / 16, dtype=np.float32)
            writer.speak(start, samples)
            want[start : start + length, 1] = samples
            end = start + length
            if index < len(steps):
                caller = np.full(steps[index], 0.25, dtype=np.float32)
                writer.hear(caller)
                want[heard : heard + len(caller), 0] = caller
                heard += len(caller)
                written = max(written, min(heard, 1000))
                writer.advance(written)
    got, rate_hz = sf.read(path, dtype="float32", always_2d=True)
    assert rate_hz == OUTPUT_RATE_HZ
    assert len(got) == max(end, heard)
    kept = want[: len(got)] if channels is Channels.CALLER_AND_MODEL else want[: len(got), 1:]
    np.testing.assert_allclose(got, kept, atol=2**-15)


def test_a_call_that_fails_leaves_no_file_behind(tmp_path: Path) -> None:
    with pytest.raises(AssertionError), CallWriter(tmp_path / "out.wav", Channels.MODEL) as writer:
        write_out_of_order(writer)
    assert list(tmp_path.iterdir()) == []


def test_an_older_file_survives_a_call_that_fails(tmp_path: Path) -> None:
    (tmp_path / "out.wav").write_text("older")
    with pytest.raises(AssertionError), CallWriter(tmp_path / "out.wav", Channels.MODEL) as writer:
        write_out_of_order(writer)
    assert (tmp_path / "out.wav").read_text() == "older"


def write_out_of_order(writer: CallWriter) -> None:
    writer.speak(10, np.ones(10, dtype=np.float32))
    writer.speak(5, np.ones(10, dtype=np.float32))


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "out.xyz", tmp_path / "out", tmp_path / "nowhere" / "out.wav"):
        with pytest.raises(ConfigError, match=path.parent.name):
            CallWriter(path, Channels.MODEL)
