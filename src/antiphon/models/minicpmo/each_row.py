"""How encoders batch sessions without mixing them: what one row comes to does not depend on the rows beside it.

Shown by tests/stages/test_senses.py and tests/models/test_vision.py, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def each_row(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """layer(x) for a layer that treats rows alike; a single product or convolution on a GPU, one per row on a CPU.

    On a CPU products of another height, and convolutions of one row and of several, sum their terms in another order.
    There batches gain nothing and numbers can be exact; a GPU's may differ within rounding.

    x: [B, ...], any dtype. returns: [B, ...]
    """
    if x.device.type == "cpu":
        return torch.cat([layer(row) for row in torch.split(x, 1)])
    return layer(x)
