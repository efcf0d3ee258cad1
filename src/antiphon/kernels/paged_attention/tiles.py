"""How a step's tokens and their keys are shared out among the programs of the kernel.

Tiles of one row's tokens, in two sizes: a decoding row has one token, and a program for it is bound by reading keys; a
row of many tokens is bound by products, and wants large ones. So a row goes into small tiles if one of them holds it,
else into large ones. And each tile's keys in parts, so that a step of few rows keeps the whole GPU busy. Into how many
is decided for each step: what was recorded for many rows may be run for few.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.int32]


class TileKind(Enum):
    SMALL = "small"
    LARGE = "large"


QUERIES_PER_TILE = {TileKind.SMALL: 16, TileKind.LARGE: 64}
"""Tokens times query heads of a key head; a group of heads is padded to a power of two."""

MAX_PARTS = 64
"""Of a tile."""

TILE_NUMBERS = 5
PART_NUMBERS = TILE_NUMBERS + 2
TOKEN_NUMBERS = 4

NO_ROW = -1
"""Of a part that is padding."""

_NUM_SMS = 132
"""Of an H200."""

_SMALL_HEAD_DIM = 64


@dataclass(frozen=True, slots=True)
class Cutting:
    """num_more: parts of all tiles of a kind, beyond one each. least_keys: a part of fewer costs more than it saves."""

    num_more: int
    least_keys: int

    @staticmethod
    def of(num_kv_heads: int, head_dim: int) -> Cutting:
        """So that parts are as many as an SM holds at once; of small heads as many again as have the same bytes."""
        is_small = head_dim <= _SMALL_HEAD_DIM
        return Cutting(_NUM_SMS * (32 if is_small else 4) // num_kv_heads, 64 if is_small else 128)


UNCUT = Cutting(0, 1)
"""Every tile is one part."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """parts: [P, 7] int32; a program has all that it needs to know at once. Parts of a tile follow one another.

    The tile's row, -1 for padding, its first token, then of the row token_end, num_keys and num_anchor_keys; which part
    of the tile's keys, of how many.
    """

    kind: TileKind
    parts: Tensor


def tokens_per_tile(kind: TileKind, group_size: int) -> int:
    """group_size: query heads per key head."""
    return QUERIES_PER_TILE[kind] // padded_group(group_size)


def padded_group(group_size: int) -> int:
    return 1 << (group_size - 1).bit_length()


def parts_of(tiles: Numbers, cutting: Cutting) -> Numbers:
    """tiles: [T, 5], the first numbers of `Tiles`. Returns: [P, 7], P at most T + cutting.num_more."""
    num_keys = tiles[:, 3]
    if not cutting.num_more or not len(tiles):
        nums = np.ones(len(tiles), np.int32)
    else:
        # Equally long ones, so that programs end together; the last of a tile may be shorter.
        length = max(cutting.least_keys, -(-int(num_keys.sum()) // cutting.num_more))
        nums = np.clip(-(-num_keys // length), 1, MAX_PARTS)
    ends = np.cumsum(nums)
    numbers = np.empty((int(nums.sum()), PART_NUMBERS), np.int32)
    numbers[:, :TILE_NUMBERS] = np.repeat(tiles, nums, axis=0)
    numbers[:, TILE_NUMBERS] = np.arange(len(numbers)) - np.repeat(ends - nums, nums)
    numbers[:, TILE_NUMBERS + 1] = np.repeat(nums, nums)
    return numbers


def tokens_of(parts: Numbers, kind: TileKind, group_size: int, tokens: Numbers) -> None:
    """Write where the parts leave what they found for each token. tokens: [N, 4], zeros as yet.

    The first of its tile's parts, how many there are, the token's first query in the tile, and 1 for a large tile; only
    of tokens whose tile has several parts.
    """
    (firsts,) = np.nonzero((parts[:, TILE_NUMBERS] == 0) & (parts[:, TILE_NUMBERS + 1] > 1))
    if not len(firsts):
        return
    _, first_token, token_end, *_, num_parts = parts[firsts].T
    nums = np.minimum(token_end - first_token, tokens_per_tile(kind, group_size))
    within = np.arange(int(nums.sum())) - np.repeat(np.cumsum(nums) - nums, nums)
    own = tokens[np.repeat(first_token, nums) + within]
    own[:, 0], own[:, 1] = np.repeat(firsts, nums), np.repeat(num_parts, nums)
    own[:, 2], own[:, 3] = within * padded_group(group_size), kind is TileKind.LARGE
    tokens[np.repeat(first_token, nums) + within] = own
