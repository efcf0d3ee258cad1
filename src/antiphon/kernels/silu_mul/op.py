"""The gated activation of a SwiGLU block.

    out = gate · sigmoid(gate) · up

gate, up, out: [..., F] floating, one shape and dtype; out is new.
Dispatch: the plain torch reference on every device. Raises ShapeError.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.silu_mul import reference


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Activate; tensors and errors in the module's docstring."""
    if gate.shape != up.shape:
        raise ShapeError(f"silu_mul wants two tensors of one shape, got {tuple(gate.shape)} and {tuple(up.shape)}")
    return reference.silu_mul(gate, up)
