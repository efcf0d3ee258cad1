"""Audio as clients write it: what a format is called, its bytes to samples at the model's rates, and back.

Both directions are streams: any split of the bytes gives the same samples, and a sample count depends on the length
alone. Shown in `tests/server/test_audio.py`. Not here: base64 of what is sent, and how long a message may be.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

import numpy as np
import soxr
from numpy.typing import NDArray

from antiphon.errors import AudioError
from antiphon.server.g711 import alaw, ulaw
from antiphon.units import INPUT_RATE_HZ, OUTPUT_RATE_HZ

Samples = NDArray[np.float32]

MIN_RATE_HZ = 4_000
MAX_RATE_HZ = 192_000
MAX_AUDIO_BYTES = 15 * 2**20
"""The specification's limit of one `input_audio_buffer.append`, decoded."""

TELEPHONE_RATE_HZ = 8_000
FULL_SCALE = 32_768
QUALITY = "HQ"
"""soxr's name for a passband of 91 % of the lower rate, without a ripple that 16 bits could show."""


class AudioFault(Enum):
    """What may be wrong with a client's audio; the value is the code in the error event."""

    UNKNOWN_FORMAT = "unsupported_audio_format"
    RATE = "unsupported_sample_rate"
    BASE64 = "invalid_base64"
    TOO_LARGE = "audio_too_large"
    CUT_SAMPLE = "incomplete_audio_sample"
    NOT_FINITE = "audio_not_finite"


class WireAudioError(AudioError):
    """code: the value of an `AudioFault`. The stream goes on as if what was refused had never come."""

    def __init__(self, fault: AudioFault, message: str) -> None:
        super().__init__(message)
        self.code = fault.value


class Encoding(Enum):
    PCM16 = "pcm16"
    FLOAT32 = "float32"
    ULAW = "ulaw"
    ALAW = "alaw"

    @property
    def num_bytes(self) -> int:
        """Of one sample."""
        match self:
            case Encoding.PCM16:
                return 2
            case Encoding.FLOAT32:
                return 4
            case Encoding.ULAW | Encoding.ALAW:
                return 1
            case _:
                assert_never(self)


@dataclass(frozen=True, slots=True)
class WireFormat:
    """One channel, little-endian. rate_hz: MIN_RATE_HZ to MAX_RATE_HZ."""

    encoding: Encoding
    rate_hz: int

    def __post_init__(self) -> None:
        if not MIN_RATE_HZ <= self.rate_hz <= MAX_RATE_HZ:
            raise WireAudioError(
                AudioFault.RATE, f"A rate of {self.rate_hz} Hz; it must be {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz."
            )

    def at(self, rate_hz: int) -> WireFormat:
        return replace(self, rate_hz=rate_hz)


FORMATS = {
    **dict.fromkeys(("audio/pcm", "audio/pcm16", "pcm", "pcm16"), WireFormat(Encoding.PCM16, OUTPUT_RATE_HZ)),
    **dict.fromkeys(("pcm_s16le", "s16le"), WireFormat(Encoding.PCM16, INPUT_RATE_HZ)),
    **dict.fromkeys(("audio/pcm_f32le", "pcm_f32le", "f32le"), WireFormat(Encoding.FLOAT32, INPUT_RATE_HZ)),
    **dict.fromkeys(
        ("audio/pcmu", "audio/g711_ulaw", "g711_ulaw", "g711-ulaw", "ulaw", "mulaw"),
        WireFormat(Encoding.ULAW, TELEPHONE_RATE_HZ),
    ),
    **dict.fromkeys(
        ("audio/pcma", "audio/g711_alaw", "g711_alaw", "g711-alaw", "alaw"),
        WireFormat(Encoding.ALAW, TELEPHONE_RATE_HZ),
    ),
}
"""Every spelling, with the rate that it stands for where none is declared. The first of each kind is the official one;
names that only vLLM-Omni has stand for its 16 kHz."""


def named_format(name: str) -> WireFormat:
    """Raises WireAudioError, if no format has this name."""
    try:
        return FORMATS[name.lower()]
    except KeyError:
        raise WireAudioError(
            AudioFault.UNKNOWN_FORMAT, f"No audio format is called {name[:32]!r}; known are {', '.join(FORMATS)}."
        ) from None


def decode_base64(text: str) -> bytes:
    """Strict: no other character, no space, padding where it belongs."""
    if len(text) > -(-MAX_AUDIO_BYTES // 3) * 4:
        raise WireAudioError(AudioFault.TOO_LARGE, f"{len(text)} characters of audio; at most {MAX_AUDIO_BYTES} bytes.")
    try:
        # Python's strict mode lets a lone padding after whole groups pass.
        if len(text) % 4:
            raise ValueError("not whole groups of four characters")
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireAudioError(AudioFault.BASE64, f"The audio is not base64: {error}.") from error


class Decoder:
    """One caller's bytes to samples at INPUT_RATE_HZ. Belongs to whoever reads the socket.

    After `flush`, samples out = samples in * INPUT_RATE_HZ / rate, rounded; before, soxr holds some milliseconds.
    """

    def __init__(self, form: WireFormat) -> None:
        self._encoding = form.encoding
        self._resampler = _Resampler(form.rate_hz, INPUT_RATE_HZ)
        self._cut = b""

    def decode(self, payload: bytes) -> Samples:
        """payload: any number of bytes; a cut sample waits for its rest. -> [n] float32 in [-1, 1]."""
        if len(payload) > MAX_AUDIO_BYTES:
            raise WireAudioError(AudioFault.TOO_LARGE, f"{len(payload)} bytes of audio; at most {MAX_AUDIO_BYTES}.")
        joined = self._cut + payload
        end = len(joined) - len(joined) % self._encoding.num_bytes
        samples = _expanded(joined[:end], self._encoding)
        self._cut = joined[end:]
        return self._resampler.take(samples)

    def flush(self) -> Samples:
        """The end of a stream: what is still held. What comes next is a new stream.

        Raises WireAudioError once, if the last sample is cut; the next call gives the rest without it.
        """
        cut, self._cut = self._cut, b""
        if cut:
            raise WireAudioError(AudioFault.CUT_SAMPLE, f"The audio ends {len(cut)} bytes into a sample.")
        return self._resampler.flush()


class Encoder:
    """Speech at OUTPUT_RATE_HZ to one listener's bytes. Belongs to whoever writes the socket."""

    def __init__(self, form: WireFormat) -> None:
        self._encoding = form.encoding
        self._resampler = _Resampler(OUTPUT_RATE_HZ, form.rate_hz)

    def encode(self, samples: Samples) -> bytes:
        """samples: [n] float32, clipped to full scale."""
        return _compressed(self._resampler.take(samples), self._encoding)

    def flush(self) -> bytes:
        """The end of a response: what is still held. What comes next is a new stream."""
        return _compressed(self._resampler.flush(), self._encoding)


class _Resampler:
    """A stream from one rate to another; equal rates pass through without delay."""

    def __init__(self, from_hz: int, to_hz: int) -> None:
        self._stream = (
            None if from_hz == to_hz else soxr.ResampleStream(from_hz, to_hz, 1, dtype="float32", quality=QUALITY)
        )

    def take(self, samples: Samples) -> Samples:
        return samples if self._stream is None else self._stream.resample_chunk(samples)

    def flush(self) -> Samples:
        nothing = np.zeros(0, np.float32)
        if self._stream is None:
            return nothing
        rest: Samples = self._stream.resample_chunk(nothing, last=True)
        self._stream.clear()
        return rest


def _expanded(payload: bytes, encoding: Encoding) -> Samples:
    """payload: whole samples -> [n] float32 in [-1, 1]."""
    match encoding:
        case Encoding.PCM16:
            pcm = np.frombuffer(payload, "<i2")
        case Encoding.ULAW:
            pcm = ulaw().expand(np.frombuffer(payload, np.uint8))
        case Encoding.ALAW:
            pcm = alaw().expand(np.frombuffer(payload, np.uint8))
        case Encoding.FLOAT32:
            samples = np.frombuffer(payload, "<f4").astype(np.float32)
            if not np.isfinite(samples).all():
                raise WireAudioError(AudioFault.NOT_FINITE, "The audio holds values that are not finite.")
            return samples.clip(-1, 1)
        case _:
            assert_never(encoding)
    return pcm.astype(np.float32) / np.float32(FULL_SCALE)


def _compressed(samples: Samples, encoding: Encoding) -> bytes:
    """samples: [n] float32."""
    if encoding is Encoding.FLOAT32:
        return samples.clip(-1, 1).astype("<f4").tobytes()
    pcm = np.rint(samples * FULL_SCALE).clip(-FULL_SCALE, FULL_SCALE - 1).astype("<i2")
    match encoding:
        case Encoding.PCM16:
            return pcm.tobytes()
        case Encoding.ULAW:
            return ulaw().compress(pcm).tobytes()
        case Encoding.ALAW:
            return alaw().compress(pcm).tobytes()
        case _:
            assert_never(encoding)
