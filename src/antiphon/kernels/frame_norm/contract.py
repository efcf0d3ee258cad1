"""Operands of `frame_norm`: what is added first, what the norm is modulated with, and where convolutions go on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

CONV_KERNEL = 3
"""Frames that a causal convolution sees: the two before a frame, and the frame."""

TAIL_FRAMES = CONV_KERNEL - 1


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What is added to the stream: gate · y.

    y:    [B, T, C] floating, contiguous
    gate: [C] float32, contiguous
    """

    y: Tensor
    gate: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ConvTails:
    """The last inputs of A causal convolutions, before the chunks of R sessions and after them.

    arena:   [P, A, G, 2, C] float32, contiguous; of all sessions, G guidance rows each
    befores: per session [A, G, 2, C] float32, anywhere; only the reference reads it
    sources: [R] int64, where these begin, in elements from the arena's first
    places:  [R] int64, where in the arena the new ones go, never where one of the old ones is; -1: nowhere
    lengths: [R] int64, frames of each session's chunk; at least 1
    """

    arena: Tensor
    befores: tuple[Tensor, ...]
    sources: Tensor
    places: Tensor
    lengths: Tensor


def tail_source(arena: Tensor, before: Tensor) -> int:
    """Of a session's old tails, on the arena's device: its entry in `ConvTails.sources`."""
    return (before.data_ptr() - arena.data_ptr()) // arena.itemsize
