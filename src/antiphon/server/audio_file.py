"""A sound file that a client sends whole, such as the voice that it wants to hear.

Shown by tests/server/test_audio_file.py.
"""

from __future__ import annotations

import base64
import binascii
import io

import numpy as np
import soundfile as sf

from antiphon.errors import AudioError
from antiphon.server.audio import MAX_RATE_HZ, MIN_RATE_HZ, Samples


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
    try:
        with sf.SoundFile(io.BytesIO(file)) as opened:
            rate_hz, num_frames = opened.samplerate, opened.frames
            if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
                raise AudioError(f"the sound file has {rate_hz} Hz; it may have {MIN_RATE_HZ} to {MAX_RATE_HZ}")
            if not 0 < num_frames <= max_s * rate_hz:
                raise AudioError(f"the sound file has {num_frames / rate_hz:.1f} s; it may have up to {max_s:.0f} s")
            # The header of a file may lie about what is in it.
            frames = opened.read(num_frames, dtype="float32", always_2d=True)
    except (sf.LibsndfileError, TypeError, ValueError) as error:
        raise AudioError("this is no sound file that can be read (wav, flac, ogg or mp3)") from error
    if not len(frames) or not np.isfinite(frames).all():
        raise AudioError("the sound file holds no sound, or samples that are not finite")
    return np.ascontiguousarray(frames.T), rate_hz
