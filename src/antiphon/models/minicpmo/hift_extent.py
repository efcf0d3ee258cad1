"""How much of the pieces of a run is real, where pieces of several lengths were filled up to one.

The vocoder of 1.0.5 looks ahead as far as it looks back, and sees zeros behind the end of a piece. So what stands
behind a shorter piece's end is made zero wherever a layer looks, and its samples are those of the piece alone. Shown
by tests/models/test_hift.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.snake.op import snake
from antiphon.units import SAMPLES_PER_MEL_FRAME


class Ends(Protocol):
    """Where pieces end in a tensor of some number of steps a frame."""

    def cut(self, x: Tensor) -> Tensor:
        """x: [B or 1, C, n] floating -> the same with zeros behind the ends, [B, C, n] if they differ."""

    def snake(self, x: Tensor, alpha: Tensor, eps: float) -> Tensor:
        """The activation, cut. x: [B, C, n] float32. alpha: [C]."""


class Extent(Protocol):
    """How many mel frames of B pieces are real."""

    def at(self, steps_per_frame: int, num_more: int = 0) -> Ends:
        """In a tensor of so many steps for each frame, and so many more at its end."""

    def last_repeated(self, frames: Tensor) -> Tensor:
        """frames: [B, T, H] -> the same with each piece's last frame behind its end, for who interpolates."""

    def mirrored(self, samples: Tensor, width: int) -> Tensor:
        """samples: [B, 480 T] -> [B, 480 T + 2 width], both ends mirrored."""


@dataclass(frozen=True, slots=True)
class _Whole:
    def at(self, steps_per_frame: int, num_more: int = 0) -> Ends:
        return NO_ENDS

    def last_repeated(self, frames: Tensor) -> Tensor:
        return frames

    def mirrored(self, samples: Tensor, width: int) -> Tensor:
        return F.pad(samples[:, None], (width, width), mode="reflect")[:, 0]


@dataclass(frozen=True, slots=True)
class _NoEnds:
    def cut(self, x: Tensor) -> Tensor:
        return x

    def snake(self, x: Tensor, alpha: Tensor, eps: float) -> Tensor:
        return snake(x, alpha, eps=eps)


WHOLE: Extent = _Whole()
"""All of every piece is real."""

NO_ENDS: Ends = _NoEnds()
"""The same."""


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """num_frames: [B] int64, of each piece, 1 at least."""

    num_frames: Tensor

    def at(self, steps_per_frame: int, num_more: int = 0) -> Ends:
        return _RaggedEnds(self.num_frames * steps_per_frame + num_more)

    def last_repeated(self, frames: Tensor) -> Tensor:
        places = torch.arange(frames.shape[1], device=frames.device)
        places = places.minimum(self.num_frames[:, None] - 1)
        return frames.gather(1, places[..., None].expand(-1, -1, frames.shape[2]))

    def mirrored(self, samples: Tensor, width: int) -> Tensor:
        last = self.num_frames[:, None] * SAMPLES_PER_MEL_FRAME - 1
        places = torch.arange(-width, samples.shape[1] + width, device=samples.device).abs()
        # Behind a mirrored end anything will do.
        return samples.gather(1, (last - (places - last).abs()).clamp(min=0))


@dataclass(frozen=True, slots=True, eq=False)
class _RaggedEnds:
    """lengths: [B] int64."""

    lengths: Tensor

    def cut(self, x: Tensor) -> Tensor:
        is_real = torch.arange(x.shape[-1], device=x.device) < self.lengths[:, None]
        return torch.where(is_real[:, None], x, 0)

    def snake(self, x: Tensor, alpha: Tensor, eps: float) -> Tensor:
        return snake(x, alpha, eps=eps, lengths=self.lengths)
