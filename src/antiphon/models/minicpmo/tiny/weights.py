"""Draws random weights for networks. They follow from the weights' names, so that two runs give the same bytes."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

from antiphon.models.minicpmo.checkpoint import Part

Weights = dict[str, Tensor]
"""float32 values by name."""

_SPREAD = 0.05
"""Of biases around 0 and of norms' weights around 1."""

_MAGNITUDE, _DIRECTION = "original0", "original1"


def random_weights(part: Part) -> Weights:
    """Weights of a part by their names in its file, such that activations keep their size from layer to layer."""
    tables = {f"{name}.weight" for name, module in part.network.named_modules() if isinstance(module, nn.Embedding)}
    weights: Weights = {}
    for name, like in part.network.state_dict().items():
        weights[part.prefix + name] = _draw(part.prefix + name, like.shape, is_table=name in tables)
    for name in weights:
        if name.endswith(_MAGNITUDE):
            direction = weights[name.removesuffix(_MAGNITUDE) + _DIRECTION]
            weights[name] = direction.flatten(1).norm(dim=1).view(weights[name].shape)
    return weights


def normal(name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Standard normal values that belong to `name`. Returns `shape` float32."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


def _draw(name: str, shape: torch.Size, *, is_table: bool) -> Tensor:
    values = normal(name, shape)
    if is_table:
        return values
    if len(shape) > 1:
        return values / math.sqrt(shape[1:].numel())
    if name.endswith("bias"):
        return _SPREAD * values
    return 1 + _SPREAD * values
