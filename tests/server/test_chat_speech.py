"""Speech as files: what a client reads is what the model said."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile as sf

from antiphon.server.chat.speech import FileFormat, pcm16, sound
from antiphon.units import OUTPUT_RATE_HZ

SPEECH = (0.3 * np.sin(np.arange(OUTPUT_RATE_HZ) / 20)).astype(np.float32)
FORMATS: tuple[FileFormat, ...] = ("wav", "flac", "mp3", "opus")


def test_samples_are_little_endian_and_clipped() -> None:
    assert pcm16(np.array([0, 1 / 32768, 2, -2], np.float32)) == b"\0\0\1\0\xff\x7f\x00\x80"


@pytest.mark.parametrize("form", ["wav", "flac"])
def test_a_file_without_loss_has_the_samples_of_the_stream(form: FileFormat) -> None:
    pieces = [pcm16(SPEECH[:1000]), pcm16(SPEECH[1000:])]
    heard, rate_hz = sf.read(io.BytesIO(sound(pieces, form)), dtype="int16")
    assert rate_hz == OUTPUT_RATE_HZ
    assert heard.tobytes() == b"".join(pieces) == sound(pieces, "pcm16")


@pytest.mark.parametrize("form", ["mp3", "opus"])
def test_a_file_with_loss_sounds_alike(form: FileFormat) -> None:
    heard, rate_hz = sf.read(io.BytesIO(sound([pcm16(SPEECH)], form)), dtype="float32")
    assert rate_hz == OUTPUT_RATE_HZ
    assert abs(len(heard) - len(SPEECH)) < OUTPUT_RATE_HZ // 10
    loudness, expected = np.sqrt(np.square(heard).mean()), np.sqrt(np.square(SPEECH).mean())
    assert loudness == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_without_sound_is_a_short_silence(form: FileFormat) -> None:
    heard, _ = sf.read(io.BytesIO(sound([], form)), dtype="int16")
    assert 0 < len(heard) < OUTPUT_RATE_HZ
    assert not heard.any()
    assert sound([], "pcm16") == b""
