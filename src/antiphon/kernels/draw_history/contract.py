"""Operands of `draw_history`: what the device remembers of each slot's draws."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Remembered:
    """S slots, contiguous tensors of one device.

    last, fed: [S] int64, the newest id that was drawn, and the one that the network is given for it
    is_recorded: [S] bool, whether the history remembers `last` once it is taken
    num_recorded: [S] int64, ids that came into the history since it began
    ring: [S, W] int64; id number i of a history of w places stands at i modulo w
    """

    last: Tensor
    fed: Tensor
    is_recorded: Tensor
    num_recorded: Tensor
    ring: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class NewDraws:
    """R draws. ids: [R] int64, and what the network is given for each, fed. is_recorded: [R] bool."""

    ids: Tensor
    is_recorded: Tensor
    fed: Tensor
