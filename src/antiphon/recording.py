"""Sound files in and out: a recording cut into the seconds of a call, and a call written down as a recording.

Streams both ways, so an hour costs no more memory than a minute. Shown by tests/test_recording.py.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import soundfile as sf
import soxr
import torch
from torch import Tensor

from antiphon.errors import AudioError, ConfigError
from antiphon.units import INPUT_RATE_HZ, OUTPUT_RATE_HZ, OUTPUT_SAMPLES_PER_UNIT, UNIT_SAMPLES

Samples = npt.NDArray[np.float32]

MIN_RATE_HZ = 1000
"""Below this a file is not a recording of speech but most likely a wrong header."""


@dataclass(frozen=True, slots=True)
class RecordedUnit:
    """One second of a recording, the last one filled up with silence.

    heard: [UNIT_SAMPLES] float32, 16 kHz, what the model gets.
    caller: [OUTPUT_SAMPLES_PER_UNIT] float32, 24 kHz, the same second for the written call.
    """

    heard: Tensor
    caller: Samples


class Recording:
    """A sound file to be read once, front to back, as one channel (the mean of its channels)."""

    def __init__(self, path: Path) -> None:
        """Raises: AudioError if it is not there, not audio, or empty."""
        self._path = path
        with _open(path) as file:
            self._rate_hz: int = file.samplerate
            self._num_frames: int = file.frames
        if not self._num_frames:
            raise AudioError(f"{path} holds no samples; give a recording with sound in it")
        if self._rate_hz < MIN_RATE_HZ:
            raise AudioError(f"{path} claims {self._rate_hz} Hz; recordings start at {MIN_RATE_HZ} Hz")

    @property
    def num_units(self) -> int:
        """Seconds, the last one counted whole."""
        return -(-self._num_frames // self._rate_hz)

    def units(self) -> Iterator[RecordedUnit]:
        """All seconds in order. Raises: AudioError at the second that holds NaN or infinity or cannot be decoded."""
        heard, caller = _Resampled(self._rate_hz, INPUT_RATE_HZ), _Resampled(self._rate_hz, OUTPUT_RATE_HZ)
        with _open(self._path) as file:
            for number in range(self.num_units):
                second = self._read(file, number)
                is_last = number == self.num_units - 1
                heard.push(second, is_last=is_last)
                caller.push(second, is_last=is_last)
                # A resampler holds back what it needs to see more of; a second comes out once it is complete.
                while heard.num_ready >= UNIT_SAMPLES and caller.num_ready >= OUTPUT_SAMPLES_PER_UNIT:
                    yield RecordedUnit(torch.from_numpy(heard.take(UNIT_SAMPLES)), caller.take(OUTPUT_SAMPLES_PER_UNIT))
            if heard.num_ready or caller.num_ready:
                yield RecordedUnit(torch.from_numpy(heard.take(UNIT_SAMPLES)), caller.take(OUTPUT_SAMPLES_PER_UNIT))

    def _read(self, file: sf.SoundFile, number: int) -> Samples:
        try:
            frames: Samples = file.read(self._rate_hz, dtype="float32", always_2d=True)
        except sf.LibsndfileError as error:
            raise AudioError(f"{self._path} is damaged after {number} s: {error}") from error
        _check_finite(frames, self._path, number)
        return frames.mean(axis=1)


def read_voice(path: Path) -> tuple[Tensor, int]:
    """A whole recording of a voice: [channels, n] float32 and its rate in Hz. Raises: AudioError, as Recording."""
    Recording(path)
    with _open(path) as file:
        try:
            frames: Samples = file.read(dtype="float32", always_2d=True)
        except sf.LibsndfileError as error:
            raise AudioError(f"{path} is damaged: {error}") from error
        rate_hz: int = file.samplerate
    _check_finite(frames, path, 0)
    return torch.from_numpy(np.ascontiguousarray(frames.T)), rate_hz


def to_input_rate(voice: Tensor, rate_hz: int) -> Tensor:
    """voice: [channels, n] float32 of any rate. Returns [m] float32 on the host, 16 kHz, the mean of the channels."""
    return torch.from_numpy(soxr.resample(voice.mean(dim=0).numpy(), rate_hz, INPUT_RATE_HZ))


class Channels(Enum):
    """What a written call holds."""

    CALLER_AND_MODEL = 2
    """Caller left, model right."""
    MODEL = 1


class CallWriter:
    """Writes a call second by second; the file appears under its name only when all of it is there.

    Use as a context manager: on an error nothing is left behind.
    """

    def __init__(self, path: Path, channels: Channels) -> None:
        """Raises: ConfigError if such a file cannot be written there."""
        self._path = path
        self._channels = channels
        self._caller, self._model = _Track(), _Track()
        kind = path.suffix.removeprefix(".").upper()
        if kind not in sf.available_formats():
            raise ConfigError(f"{path}: unknown kind of sound file; use .wav or .flac")
        if not path.parent.is_dir():
            raise ConfigError(f"{path.parent} is not a folder; make it first")
        try:
            handle = tempfile.NamedTemporaryFile(  # noqa: SIM115 - closed with the writer
                dir=path.parent, prefix=f".{path.name}.", suffix=".part", delete=False
            )
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from error
        self._part = Path(handle.name)
        self._file = sf.SoundFile(handle, "w", OUTPUT_RATE_HZ, channels.value, format=kind)
        self._handle = handle

    def __enter__(self) -> CallWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._write(max(self._caller.end_samples, self._model.end_samples))
        self._file.close()
        self._handle.close()
        if kind is None:
            self._part.replace(self._path)
        else:
            self._part.unlink()

    def hear(self, caller: Samples) -> None:
        """Append the caller's next samples, 24 kHz."""
        self._caller.add(self._caller.end_samples, caller)

    def speak(self, start_samples: int, model: Samples) -> None:
        """The model's samples from a place that was not written yet and lies after its earlier ones."""
        self._model.add(start_samples, model)

    def advance(self, until_samples: int) -> None:
        """Write down everything before this place; nothing will be added there."""
        self._write(until_samples)

    def _write(self, until_samples: int) -> None:
        caller, model = self._caller.take(until_samples), self._model.take(until_samples)
        match self._channels:
            case Channels.CALLER_AND_MODEL:
                self._file.write(np.stack([caller, model], axis=1))
            case Channels.MODEL:
                self._file.write(model)


class _Track:
    """Samples at places, read in order with silence between them."""

    def __init__(self) -> None:
        self._read_samples = 0
        self._pieces: deque[tuple[int, Samples]] = deque()
        self.end_samples = 0

    def add(self, start_samples: int, samples: Samples) -> None:
        assert start_samples >= self.end_samples, f"{start_samples} lies before the end at {self.end_samples}"
        self._pieces.append((start_samples, samples))
        self.end_samples = start_samples + len(samples)

    def take(self, until_samples: int) -> Samples:
        taken = np.zeros(until_samples - self._read_samples, dtype=np.float32)
        while self._pieces and self._pieces[0][0] < until_samples:
            start, samples = self._pieces.popleft()
            now, later = samples[: until_samples - start], samples[until_samples - start :]
            taken[start - self._read_samples : start - self._read_samples + len(now)] = now
            if len(later):
                self._pieces.appendleft((until_samples, later))
        self._read_samples = until_samples
        return taken


class _Resampled:
    """A stream at another rate, given out in pieces of any size; silence fills what is missing at the end."""

    def __init__(self, from_hz: int, to_hz: int) -> None:
        self._stream = soxr.ResampleStream(from_hz, to_hz, 1, dtype="float32")
        self._ready = np.empty(0, dtype=np.float32)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def push(self, samples: Samples, *, is_last: bool) -> None:
        self._ready = np.concatenate([self._ready, self._stream.resample_chunk(samples, last=is_last)])

    def take(self, num_samples: int) -> Samples:
        taken, self._ready = self._ready[:num_samples], self._ready[num_samples:]
        return np.pad(taken, (0, num_samples - len(taken)))


def _open(path: Path) -> sf.SoundFile:
    if not path.is_file():
        raise AudioError(f"{path} is not a file; give a recording (wav, flac, ogg or mp3)")
    if not path.stat().st_size:
        raise AudioError(f"{path} is empty; give a recording with sound in it")
    try:
        return sf.SoundFile(path)
    except (sf.LibsndfileError, TypeError) as error:
        raise AudioError(f"{path} is not a sound file that can be read (wav, flac, ogg or mp3): {error}") from error


def _check_finite(frames: Samples, path: Path, second: int) -> None:
    if not np.isfinite(frames).all():
        raise AudioError(f"{path} holds NaN or infinite samples in second {second}; repair or convert the recording")
