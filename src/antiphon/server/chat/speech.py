"""Speech as a client wants it: a file in one of the formats that libsndfile writes, or bare samples.

Shown by tests/server/test_chat_speech.py.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

import numpy as np
import soundfile as sf
from numpy.typing import NDArray

from antiphon.server.audio import FORMATS, Encoder
from antiphon.units import OUTPUT_RATE_HZ

FileFormat = Literal["wav", "flac", "mp3", "opus"]
SpeechFormat = FileFormat | Literal["pcm16"]

_FILES: dict[FileFormat, tuple[str, str]] = {
    "wav": ("WAV", "PCM_16"),
    "flac": ("FLAC", "PCM_16"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "opus": ("OGG", "OPUS"),
}
_SILENCE_SAMPLES = OUTPUT_RATE_HZ // 10


def pcm16(samples: NDArray[np.float32]) -> bytes:
    """samples: [n] float32, 24 kHz. Little-endian, one channel, the same rate."""
    return Encoder(FORMATS["pcm16"]).encode(samples)


def sound(pcm: Sequence[bytes], form: SpeechFormat) -> bytes:
    """pcm: pieces of `pcm16`, in order. A file without any is short silence: some formats cannot hold nothing."""
    content = b"".join(pcm)
    if form == "pcm16":
        return content
    content = content or bytes(2 * _SILENCE_SAMPLES)
    container, coding = _FILES[form]
    with io.BytesIO() as file:
        sf.write(file, np.frombuffer(content, "<i2"), OUTPUT_RATE_HZ, coding, format=container)
        return file.getvalue()
