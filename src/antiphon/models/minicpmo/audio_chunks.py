"""Seconds of several sessions on their way to the audio encoder: one buffer, and the encoder's pass as a CUDA graph.

What a pass is, `audio_encoder.py` knows. Shown by tests/models/test_audio.py and, on a GPU, by tests/test_cuda.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from antiphon.kernels.history_attention.contract import NOBODY, Histories, HistoryShape, offset
from antiphon.kernels.transfer import NUM_STAGING, Staging, upload
from antiphon.models.minicpmo.audio_history import AudioEncoderState
from antiphon.models.minicpmo.audio_stream import CHUNK_FRAMES, EXTRA_FRAMES, MelChunk
from antiphon.models.minicpmo.captured import Recorder

SHOWN_FRAMES = CHUNK_FRAMES + 2 * EXTRA_FRAMES

ChunkRow = tuple[MelChunk, AudioEncoderState]
"""A second, and what its session remembers."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkInputs:
    """What B seconds are encoded from, on the encoder's device.

    mels: [B, bins, SHOWN_FRAMES] float32
    num_empty_frames: [B] int64, frames at a row's front that stand for nothing: a stream's first second has none there
    """

    mels: Tensor
    num_empty_frames: Tensor
    histories: Histories


Encode = Callable[[ChunkInputs], Tensor]
"""[B, tokens, output_size]; the histories take what is new."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkLayout:
    """Where the rows of a buffer stand. origin: as in `Histories`."""

    num_rows: int
    num_mel_bins: int
    shape: HistoryShape
    origin: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        """In bytes: lengths, offsets and empty frames; mels."""
        return [3 * 8 * self.num_rows, 4 * self.num_rows * self.num_mel_bins * SHOWN_FRAMES]

    def views(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """[3, B] int64 and [B, bins, SHOWN_FRAMES] float32 of a buffer, [num_bytes] uint8."""
        numbers, mels = torch.split(buffer, self._sizes)
        return (
            numbers.view(torch.int64).view(3, -1),
            mels.view(torch.float32).view(self.num_rows, self.num_mel_bins, SHOWN_FRAMES),
        )

    def fill(self, buffer: Tensor, rows: Sequence[ChunkRow]) -> None:
        """Write the rows into a buffer of the host, and padding behind them."""
        numbers, mels = self.views(buffer)
        columns = numbers.numpy()
        columns[:, len(rows) :] = [[NOBODY], [0], [0]]
        columns[:, : len(rows)] = [
            [state.num_positions for _, state in rows],
            [offset(self.shape, self.origin, state.kv) for _, state in rows],
            [EXTRA_FRAMES - chunk.prefix_frames for chunk, _ in rows],
        ]
        for (chunk, _), mel in zip(rows, mels, strict=False):
            num_empty = SHOWN_FRAMES - chunk.mel.shape[1]
            mel[:, :num_empty] = 0
            mel[:, num_empty:] = chunk.mel
        mels[len(rows) :] = 0

    def inputs_in(self, buffer: Tensor, kv: tuple[Tensor, ...]) -> ChunkInputs:
        """A filled buffer, wherever it is, as inputs. kv: as in `Histories`."""
        (lengths, offsets, num_empty_frames), mels = self.views(buffer)
        return ChunkInputs(mels, num_empty_frames, Histories(self.shape, kv, self.origin, offsets, lengths))


def launched(encode: Encode, layout: ChunkLayout, rows: Sequence[ChunkRow]) -> Tensor:
    """Encode rows, as many as the layout has, launch by launch."""
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
    layout.fill(buffer, rows)
    return encode(layout.inputs_in(upload(buffer, layout.origin.device), tuple(state.kv for _, state in rows)))


class RecordedChunks:
    """The encoder's pass over up to so many rows, recorded. A replay overwrites what the one before it gave."""

    def __init__(self, encode: Encode, layout: ChunkLayout, recorder: Recorder) -> None:
        self.num_rows = layout.num_rows
        self._layout = layout
        self._staging = cycle([Staging(layout.num_bytes) for _ in range(NUM_STAGING)])
        self._buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device=layout.origin.device)
        # Nobody's rows: the launches are the same, and nothing is remembered.
        self._upload(())
        self._replay = recorder.record(lambda: encode(layout.inputs_in(self._buffer, ())))

    def run(self, rows: Sequence[ChunkRow]) -> Tensor:
        self._upload(rows)
        return self._replay()[: len(rows)].clone()

    def _upload(self, rows: Sequence[ChunkRow]) -> None:
        staging = next(self._staging)
        staging.make_free()
        self._layout.fill(staging.host, rows)
        staging.send(self._buffer, self._layout.num_bytes)
