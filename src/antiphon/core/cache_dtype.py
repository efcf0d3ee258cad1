"""In which numbers the thinker keeps keys and values, and which slides go with them. No tensors.

docs/kv_cache.md has the arithmetic and what it costs. Shown by tests/test_kv_dtype.py.
"""

from __future__ import annotations

from enum import Enum

from antiphon.core.window import SlideMode
from antiphon.errors import ConfigError


class CacheDtype(Enum):
    """Of keys and values in the cache."""

    MODEL = "model"
    """As the model computes them."""
    FLOAT8_E4M3 = "float8_e4m3"
    """A byte each, and a float32 scale for each key and each value of a head. Written once, rounded once."""


def check_slide(slide: SlideMode, kept_in: CacheDtype) -> None:
    """Raises: ConfigError if such slides would round such keys again and again."""
    if slide is SlideMode.ROTATE_KEYS and kept_in is CacheDtype.FLOAT8_E4M3:
        raise ConfigError(
            f"slide {slide.value} would round the keys of a cache with kv_dtype {kept_in.value} anew at every slide; "
            f"take slide {SlideMode.ROTATE_QUERY.value} or {SlideMode.REPREFILL.value}, or kv_dtype "
            f"{CacheDtype.MODEL.value}"
        )
