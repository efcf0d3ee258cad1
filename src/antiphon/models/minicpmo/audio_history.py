"""What the audio encoder remembers of each session, and where a step of several sessions finds it.

Source: REFERENCE 6.4. The encoder itself is `audio_encoder.py`. Shown by tests/models/test_audio.py and
tests/stages/test_senses.py.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels.history_attention.contract import HistoryShape
from antiphon.models.minicpmo.config import AudioConfig


def history_shape(config: AudioConfig) -> HistoryShape:
    head_dim = config.hidden_size // config.num_heads
    return HistoryShape(config.num_layers, config.num_heads, config.max_positions, head_dim)


@dataclass(frozen=True, slots=True, eq=False)
class AudioHistory:
    """An AudioEncoderState on the host. kv: [layers, 2, heads, num_positions, D], keys and values."""

    kv: Tensor
    num_resets: int


class AudioEncoderState:
    """What the encoder remembers of one session. Written by AudioEncoder.encode_chunks only; freed with the session.

    kv: as `HistoryShape.of_tensor`
    num_positions: filled part of the history; what is written behind it becomes history by `advance`, so that a step
    that fails leaves the state as it was
    num_resets: how often the history was full and was dropped, which the reference does too (REFERENCE 6.4)
    """

    def __init__(self, shape: HistoryShape, *, device: torch.device, dtype: torch.dtype) -> None:
        self.kv = torch.empty(shape.of_tensor, device=device, dtype=dtype)
        self.num_positions = 0
        self.num_resets = 0

    def fork(self) -> AudioEncoderState:
        """The same history, to be continued by either of the two, not by both: they share its memory."""
        return copy(self)

    def history(self) -> AudioHistory:
        """A copy, which no later chunk changes."""
        return AudioHistory(self.kv[:, :, :, : self.num_positions].to("cpu", copy=True), self.num_resets)

    def restore(self, history: AudioHistory) -> None:
        """Go on from another state's history, of the same encoder."""
        self.num_positions, self.num_resets = history.kv.shape[3], history.num_resets
        self.kv[:, :, :, : self.num_positions] = history.kv

    def make_room(self, num_positions: int) -> None:
        """Forget everything if so many positions would fill the table."""
        if self.num_positions and self.num_positions + num_positions >= self.kv.shape[3]:
            self.num_positions = 0
            self.num_resets += 1

    def advance(self, num_positions: int) -> None:
        self.num_positions += num_positions
