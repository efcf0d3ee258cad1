"""Random weights of any dimensions, drawn on the device where they are used: what costs as much as the real ones.

A set of tensors as `checkpoint.py` reads them, without a file. What such a model says is noise; behaviour is taught in
`tiny/behaviour.py` only. Shown by tests/models/test_random_weights.py.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from antiphon.models.minicpmo.checkpoint import Part, Stores, TensorHeader, WeightFile

_BIAS_SPREAD = 0.02


class RandomTensors:
    """Tensors by name that are drawn when they are read; the same ones every time on one kind of device."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.headers = {name: TensorHeader(shape, torch.float32) for name, shape in shapes.items()}

    def read(self, names: Collection[str], device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, header in self.headers.items():
            if name in names:
                yield name, drawn_weight(name, header.shape, dtype, device)


def random_stores(parts: Iterable[Part]) -> Stores:
    """All tensors of these networks."""
    parts = tuple(parts)
    return {
        file: RandomTensors(
            {name: shape for part in parts if part.file is file for name, shape in part.shapes().items()}
        )
        for file in WeightFile
    }


def drawn_weight(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Such that activations keep their size: norms, magnitudes of weight norms and slopes of snakes are 1.

    name: decides which numbers. Returns `shape`, in `dtype`, on `device`.
    """
    weight = torch.empty(shape, dtype=dtype, device=device)
    is_vector = len(shape) == 1
    if name.endswith(("original0", "alpha")) or (is_vector and name.endswith("weight")):
        return weight.fill_(1)
    spread = _BIAS_SPREAD if is_vector else 1 / math.sqrt(math.prod(shape[1:]))
    return weight.normal_(0, spread, generator=torch.Generator(device).manual_seed(zlib.crc32(name.encode())))
