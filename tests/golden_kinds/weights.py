"""Puts golden weights into our networks, as the checkpoint loader does: built on meta, tensors assigned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def filled(build: Callable[[], ModuleT], tensors: Mapping[str, Tensor], prefix: str) -> ModuleT:
    """A module with the tensors whose names start with `prefix`; every parameter must be there, and no tensor left."""
    with torch.device("meta"):
        module = build()
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    module.load_state_dict(own, assign=True)
    return module.eval().requires_grad_(requires_grad=False)
