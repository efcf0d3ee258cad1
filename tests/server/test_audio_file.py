"""Sound files as clients send them, whole and damaged."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import soundfile

from antiphon.errors import AudioError
from antiphon.server.audio import MAX_RATE_HZ, MIN_RATE_HZ
from antiphon.server.audio_file import decode_file, read_sound


def written(
    seconds: float, rate_hz: int = 16_000, channels: int = 1, kind: str = "WAV", subtype: str | None = None
) -> bytes:
    """A hum, as a file of this kind."""
    time_s = np.arange(round(seconds * rate_hz)) / rate_hz
    hum = (0.3 * np.sin(2 * np.pi * 220 * time_s)).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, np.repeat(hum[:, None], channels, axis=1), rate_hz, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_file_of_any_known_kind_is_read_with_its_rate_and_channels(kind: str, channels: int) -> None:
    samples, rate_hz = read_sound(written(0.5, 24_000, channels, kind), max_s=1.0)
    assert rate_hz == 24_000
    assert samples.shape[0] == channels
    assert samples.dtype == np.float32
    assert samples.flags.c_contiguous
    # A lossy kind may pad.
    assert 12_000 <= samples.shape[1] <= 14_000
    assert 0.1 < np.abs(samples).max() < 0.5


def test_a_file_comes_by_itself_or_as_a_data_url() -> None:
    file = written(0.1)
    text = base64.b64encode(file).decode()
    assert decode_file(text) == file
    assert decode_file(f"data:audio/wav;base64,{text}") == file


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("data:audio/wav;base64", "not in base64"),
        ("data:audio/wav,RIFF", "not in base64"),
        ("https://example.com/voice.wav", "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("AAA", "not base64"),
        ("AA AA", "not base64"),
        ("data:audio/wav;base64,?", "not base64"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}", "not base64"),
    ],
)
def test_what_is_no_file_in_base64_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(AudioError, match=complaint) as refused:
        decode_file(text)
    assert refused.value.code == "invalid_audio"


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        (b"", "no sound file"),
        (b"RIFF", "no sound file"),
        (written(0.5)[:20], "no sound file"),
        (written(1.5), "1.5 s; it may have up to 1 s"),
        (written(0.0), "0.0 s"),
        (written(0.5, MIN_RATE_HZ - 1), f"{MIN_RATE_HZ - 1} Hz"),
        (written(0.1, MAX_RATE_HZ + 1), f"{MAX_RATE_HZ + 1} Hz"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(file: bytes, complaint: str) -> None:
    with pytest.raises(AudioError, match=complaint):
        read_sound(file, max_s=1.0)


def test_the_limits_themselves_are_allowed() -> None:
    assert read_sound(written(1.0, MIN_RATE_HZ), max_s=1.0)[1] == MIN_RATE_HZ
    assert read_sound(written(0.1, MAX_RATE_HZ), max_s=1.0)[1] == MAX_RATE_HZ


def test_a_file_that_holds_less_than_it_says_is_what_it_holds() -> None:
    whole = written(1.0)
    samples, _ = read_sound(whole[: len(whole) // 2], max_s=1.0)
    assert 0 < samples.shape[1] < 16_000


def test_samples_that_are_no_numbers_are_refused() -> None:
    file = io.BytesIO()
    soundfile.write(file, np.full(1600, np.nan, np.float32), 16_000, format="WAV", subtype="FLOAT")
    with pytest.raises(AudioError, match="not finite"):
        read_sound(file.getvalue(), max_s=1.0)
