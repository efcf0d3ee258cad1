"""How a step's tokens are shared out among the programs of the kernel: tiles of one row's tokens, in two sizes.

A decoding row has one token, and a program for it is bound by reading keys; a row of many tokens is bound by products,
and wants large ones. So a row goes into small tiles if one of them holds it, else into large ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class TileKind(Enum):
    SMALL = "small"
    LARGE = "large"


QUERIES_PER_TILE = {TileKind.SMALL: 16, TileKind.LARGE: 64}
"""Tokens times query heads of a key head; a group of heads is padded to a power of two."""

_NUM_SMS = 132
"""Of an H200."""

_MAX_SPLITS = 64
_MIN_LARGE_SPLITS = 4
"""Most large tiles that there is room for are padding: a step seldom has as many rows of several tokens as it could."""

_KEYS_PER_SPLIT = 128
"""A split of fewer keys costs more than it saves."""

_SMALL_HEAD_DIM = 64

TILE_NUMBERS = 5


@dataclass(frozen=True, slots=True)
class Tiles:
    """places: [T, 5] int32; a program has all that it needs to know of its tile at once.

    The tile's row, -1 for padding, its first token, then of the row token_end, num_keys and num_anchor_keys.
    """

    kind: TileKind
    places: Tensor


def tokens_per_tile(kind: TileKind, group_size: int) -> int:
    """group_size: query heads per key head."""
    return QUERIES_PER_TILE[kind] // (1 << (group_size - 1).bit_length())


def num_splits(kind: TileKind, num_programs: int, head_dim: int, max_keys: int) -> int:
    """Into how many parts the keys of every row are cut. num_programs: without cutting."""
    most = min(_MAX_SPLITS, max_keys // _KEYS_PER_SPLIT)
    least = _MIN_LARGE_SPLITS if kind is TileKind.LARGE else 1
    # Programs that an SM holds at once, and of small heads as many again as have the same bytes under way.
    programs = _NUM_SMS * (4 if head_dim > _SMALL_HEAD_DIM else 32)
    wanted = min(most, max(least, programs // num_programs))
    # A power of two: each number of splits is a kernel of its own.
    return 1 << max(0, wanted.bit_length() - 1)
