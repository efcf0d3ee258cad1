"""What may follow a product."""

from __future__ import annotations

from enum import Enum


class Activation(Enum):
    NONE = "none"
    GELU = "gelu"
