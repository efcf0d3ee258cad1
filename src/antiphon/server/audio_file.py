"""A sound file that a client sends whole, such as the voice that it wants to hear.

Shown by tests/server/test_audio_file.py and tests/server/test_heard_file.py.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import soundfile as sf
import soxr

from antiphon.errors import AudioError
from antiphon.server.audio import MAX_RATE_HZ, MIN_RATE_HZ, Samples
from antiphon.units import INPUT_RATE_HZ

BLOCK_SAMPLES = 2**20
"""Of all channels, that are decoded at once where a sound is read bit by bit."""


def decode_file(text: str) -> bytes:
    """text: a file in base64, by itself or as a `data:` URL. Raises: AudioError."""
    head, comma, body = text.partition(",")
    if text.startswith("data:"):
        if not comma or not head.endswith(";base64"):
            raise AudioError("the data URL is not in base64; write data:TYPE;base64,...")
    elif "://" in text[:16]:
        raise AudioError("nothing is fetched from the network; send the file itself as a data URL")
    else:
        body = text
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise AudioError(f"the file is not base64: {error}") from error


def read_sound(file: bytes, max_s: float) -> tuple[Samples, int]:
    """file: wav, flac, ogg or mp3. Returns [channels, n] float32, and their rate in Hz.

    Raises: AudioError if it is none of them, damaged, empty, longer than `max_s`, of an impossible rate or not finite.
    """
    with _opened(file, max_s) as opened:
        # The header of a file may lie about what is in it.
        frames = opened.read(opened.frames, dtype="float32", always_2d=True)
        return np.ascontiguousarray(_checked(frames).T), opened.samplerate


def read_heard(file: bytes, max_s: float) -> Samples:
    """The same as [n] float32, 16 kHz, the mean of its channels; read bit by bit, so that it is never there as a whole.

    Raises: AudioError as `read_sound`.
    """
    with _opened(file, max_s) as opened:
        resampler = soxr.ResampleStream(opened.samplerate, INPUT_RATE_HZ, 1, dtype="float32")
        pieces: list[Samples] = []
        for frames in opened.blocks(max(1, BLOCK_SAMPLES // opened.channels), dtype="float32", always_2d=True):
            pieces.append(resampler.resample_chunk(_checked(frames).mean(axis=1)))
        heard = np.concatenate([*pieces, resampler.resample_chunk(np.empty(0, np.float32), last=True)])
    if not len(heard):
        raise AudioError("the sound file holds no sound")
    return heard


@contextmanager
def _opened(file: bytes, max_s: float) -> Iterator[sf.SoundFile]:
    """Raises: AudioError, also for what fails while it is read."""
    try:
        with sf.SoundFile(io.BytesIO(file)) as opened:
            rate_hz, num_frames = opened.samplerate, opened.frames
            if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
                raise AudioError(f"the sound file has {rate_hz} Hz; it may have {MIN_RATE_HZ} to {MAX_RATE_HZ}")
            if not 0 < num_frames <= max_s * rate_hz:
                raise AudioError(f"the sound file has {num_frames / rate_hz:.1f} s; it may have up to {max_s:.0f} s")
            yield opened
    except (sf.LibsndfileError, TypeError, ValueError) as error:
        raise AudioError("this is no sound file that can be read (wav, flac, ogg or mp3)") from error


def _checked(frames: Samples) -> Samples:
    """Raises: AudioError."""
    if not len(frames) or not np.isfinite(frames).all():
        raise AudioError("the sound file holds no sound, or samples that are not finite")
    return frames
