"""One caller's samples on their way to mel chunks of one second: REFERENCE 4.2 step 3 and 6.2. Not the encoder.

The reference keeps up to 30 s of audio and computes all its features anew each second. Of that window a chunk depends
on its own frames and, through the dynamic floor, on the largest value anywhere; so this keeps the few frames that the
next chunk shows again and a peak per stretch of the window. tests/models/test_audio.py shows the results to be equal.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.errors import AudioError
from antiphon.models.minicpmo.audio_features import (
    EDGE_SAMPLES,
    FFT_SAMPLES,
    HOP_SAMPLES,
    Floor,
    MelExtractor,
    check_samples,
    mirrored,
    normalised,
)
from antiphon.units import INPUT_RATE_HZ, UNIT_SAMPLES

EXTRA_FRAMES = 2
"""Frames shown on either side of a chunk's own, for the encoder's convolutions."""

CHUNK_FRAMES = UNIT_SAMPLES // HOP_SAMPLES

PADDED_FIRST_SAMPLES = INPUT_RATE_HZ * 1035 // 1000
"""Audio that the first chunk starts from; silence is put in front of less."""

FIRST_CHUNK_SAMPLES = PADDED_FIRST_SAMPLES // HOP_SAMPLES * HOP_SAMPLES

MAX_WAITING_SAMPLES = 30 * INPUT_RATE_HZ

_AHEAD_SAMPLES = FIRST_CHUNK_SAMPLES - UNIT_SAMPLES
"""A chunk has this much audio after its own second, enough for the extra frames."""

_TAIL_SAMPLES = _AHEAD_SAMPLES - (EXTRA_FRAMES * HOP_SAMPLES - EDGE_SAMPLES)
"""Of that, what the next chunk's first new frame sees."""

_WINDOW_SAMPLES = 30 * INPUT_RATE_HZ
_SLIDE_SAMPLES = 10 * INPUT_RATE_HZ
_SLIDE_CHUNKS = _SLIDE_SAMPLES // UNIT_SAMPLES
_DYNAMIC_FROM_SAMPLES = 5 * INPUT_RATE_HZ


@dataclass(frozen=True, slots=True)
class MelWindow:
    """What the features of a chunk were computed over. start_frame counts from the stream's start."""

    start_frame: int
    num_samples: int

    @property
    def num_frames(self) -> int:
        return self.num_samples // HOP_SAMPLES

    @property
    def num_stable_frames(self) -> int:
        """Frames that no later sample can change."""
        return (self.num_samples - EDGE_SAMPLES) // HOP_SAMPLES + 1

    @property
    def floor(self) -> Floor:
        return Floor.FIXED if self.num_samples < _DYNAMIC_FROM_SAMPLES else Floor.DYNAMIC


@dataclass(frozen=True, slots=True)
class MelChunk:
    """The features of one second, with extra frames on both sides.

    mel: [bins, prefix_frames + CHUNK_FRAMES + suffix_frames] float32 on the host
    start_frame: its first own frame, counted from the stream's start
    padding_samples: silence put in front of it; consumed_samples: taken from the stream, that silence included
    """

    mel: Tensor
    prefix_frames: int
    suffix_frames: int
    start_frame: int
    padding_samples: int
    consumed_samples: int
    window: MelWindow

    @property
    def end_frame(self) -> int:
        return self.start_frame + CHUNK_FRAMES


@dataclass(frozen=True, slots=True)
class _Stretch:
    """As many chunks as one slide removes from the window, reduced to their largest log10 power.

    peak: over the frames that became stable in them
    edge_peak: over the EXTRA_FRAMES just before those, as they look once the window begins with them and its start is
    mirrored; until then they count in the stretch before, as they were
    """

    edge_peak: float
    peak: float = -math.inf


class MelStream:
    """The audio of one session; one writer, its unit assembly. Memory is bounded; all state is fresh when created."""

    def __init__(self, extractor: MelExtractor) -> None:
        self._extractor = extractor
        self._waiting = torch.empty(0, device="cpu")
        self._tail = torch.empty(0, device="cpu")
        self._shown_again = torch.empty(extractor.num_mel_bins, 0, device="cpu")
        self._num_chunks = 0
        self._window = MelWindow(0, 0)
        self._stretches: tuple[_Stretch, ...] = (_Stretch(edge_peak=-math.inf),)

    def fork(self) -> MelStream:
        """A stream that remembers the same and goes on by itself."""
        return copy(self)  # what it holds is replaced, never changed

    @property
    def waiting_samples(self) -> int:
        return self._waiting.numel()

    def push(self, samples: Tensor) -> None:
        """Append audio.

        samples: [n] float32 on the host, 16 kHz, any n; copied
        Raises: AudioError, as `check_samples`, or if too much would wait; the stream is then as before.
        """
        check_samples(samples)
        if self.waiting_samples + samples.numel() > MAX_WAITING_SAMPLES:
            raise AudioError(
                f"{self.waiting_samples} samples wait and {samples.numel()} more came; the limit is "
                f"{MAX_WAITING_SAMPLES}: send audio no faster than it is spoken"
            )
        self._waiting = torch.cat((self._waiting, samples))

    def take(self) -> MelChunk | None:
        """The next chunk, None while too little audio waits.

        The first chunk takes whatever is there and puts silence in front: ask for it when the first unit is complete.
        """
        is_first = self._num_chunks == 0
        needed_samples = FIRST_CHUNK_SAMPLES if is_first else UNIT_SAMPLES
        padding_samples = max(PADDED_FIRST_SAMPLES - self.waiting_samples, 0) if is_first else 0
        if not self.waiting_samples or self.waiting_samples + padding_samples < needed_samples:
            return None
        waiting = F.pad(self._waiting, (padding_samples, 0))
        samples, self._waiting = waiting[:needed_samples], waiting[needed_samples:]

        log_mel, num_new = self._log_mel(samples)
        new = log_mel[:, :num_new]
        self._extend_window(samples, new.max().item())
        peak = max(self._stretches[0].edge_peak, log_mel.max().item(), *(s.peak for s in self._stretches))
        shown = torch.cat((self._shown_again, new), dim=1)
        self._shown_again = new[:, -2 * EXTRA_FRAMES :]

        chunk = MelChunk(
            mel=normalised(shown, self._window.floor.level(peak)),
            prefix_frames=0 if is_first else EXTRA_FRAMES,
            suffix_frames=EXTRA_FRAMES,
            start_frame=self._num_chunks * CHUNK_FRAMES,
            padding_samples=padding_samples,
            consumed_samples=needed_samples,
            window=self._window,
        )
        self._num_chunks += 1
        if self._num_chunks % _SLIDE_CHUNKS == 0:
            self._open_stretch(samples)
        return chunk

    def _log_mel(self, samples: Tensor) -> tuple[Tensor, int]:
        """Frames that came with the samples, and how many of them are stable; the others see a mirrored end.

        samples: [n] float32. returns: [bins, T] float32; stable <= T
        """
        piece = torch.cat((self._tail, samples))
        self._tail = samples[-_TAIL_SAMPLES:]
        left = EDGE_SAMPLES if self._num_chunks == 0 else 0
        log_mel = self._extractor.log_mel(mirrored(piece, left=left, right=EDGE_SAMPLES))[:, :-1]
        return log_mel, (left + piece.numel() - FFT_SAMPLES) // HOP_SAMPLES + 1

    def _extend_window(self, samples: Tensor, peak: float) -> None:
        """Take in a chunk's samples [n] and the peak of its stable frames, then slide if the window is full."""
        *stretches, last = self._stretches
        stretches.append(replace(last, peak=max(last.peak, peak)))
        start_frame, num_samples = self._window.start_frame, self._window.num_samples + samples.numel()
        if num_samples >= _WINDOW_SAMPLES:
            del stretches[0]
            start_frame += _SLIDE_SAMPLES // HOP_SAMPLES
            num_samples -= _SLIDE_SAMPLES
        self._stretches = tuple(stretches)
        self._window = MelWindow(start_frame, num_samples)

    def _open_stretch(self, samples: Tensor) -> None:
        """A later slide makes the window begin _AHEAD_SAMPLES before the end of these samples [n]."""
        edge = self._extractor.log_mel(mirrored(samples[-_AHEAD_SAMPLES:], left=EDGE_SAMPLES, right=0))
        self._stretches = (*self._stretches, _Stretch(edge_peak=edge.max().item()))
