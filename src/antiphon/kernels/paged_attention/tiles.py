"""How a step's tokens and their keys are shared out among the programs of the kernel.

Tiles of one row's tokens, in two sizes: a decoding row has one token, and a program for it is bound by reading keys; a
row of many tokens is bound by products, and wants large ones. So a row goes into small tiles if one of them holds it,
else into large ones. And each tile's keys in parts, so that a step of few rows keeps the whole GPU busy. Into how many
is decided for each step, since what was recorded for many rows is run for few.
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

_SMALL_HEAD_DIM = 64

_RESIDENT_PROGRAMS = 4 * 132
"""That an H200 runs at once."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the steps of a decoder are shared out.

    num_group_heads: query heads per key head. has_large: rows of many tokens go into large tiles, else all into small
    ones. num_parts: that the tiles of a kind shall have at least, together. parts_per_tile: the same where there are
    many. least_keys: a part of fewer costs more than it saves.
    """

    num_group_heads: int
    has_large: bool
    num_parts: int
    parts_per_tile: int
    least_keys: int

    @staticmethod
    def of(num_heads: int, num_kv_heads: int, head_dim: int, *, is_float8: bool) -> Tiling:
        """is_float8: of keys and values. Found by trying on an H200, as all that is here."""
        group_size, num_parts = num_heads // num_kv_heads, _RESIDENT_PROGRAMS // num_kv_heads
        if is_float8:
            return Tiling(group_size, False, 2 * num_parts, 3, 128)
        return Tiling(group_size, True, num_parts, 1, 64 if head_dim <= _SMALL_HEAD_DIM else 128)

    def tokens_per_tile(self, kind: TileKind) -> int:
        return QUERIES_PER_TILE[kind] // padded_group(self.num_group_heads)

    def most_parts(self, num_tiles: int) -> int:
        """Of so many tiles of a kind, or fewer."""
        return num_tiles and max(self.num_parts, self.parts_per_tile * num_tiles) + num_tiles

    def parts_of(self, tiles: Numbers) -> Numbers:
        """tiles: [T, 5], the first numbers of `Tiles`. Returns: [P, 7], P at most `most_parts`."""
        numbers = np.zeros((len(tiles), PART_NUMBERS), np.int32)
        numbers[:, :TILE_NUMBERS] = tiles
        num_keys, nums = tiles[:, 3], numbers[:, TILE_NUMBERS + 1]
        # Equally long ones, as near as whole parts come to it, so that programs end together.
        wanted = max(self.num_parts, self.parts_per_tile * len(tiles))
        length = max(self.least_keys, -(-int(num_keys.sum()) // wanted))
        nums[:] = np.minimum(np.maximum((2 * num_keys + length) // (2 * length), 1), MAX_PARTS)
        ends = nums.cumsum()
        cut = numbers.repeat(nums, axis=0)
        cut[:, TILE_NUMBERS] = np.arange(len(cut)) - (ends - nums).repeat(nums)
        return cut

    def tell_tokens(self, parts: Numbers, kind: TileKind, tokens: Numbers) -> None:
        """Write where the parts leave what they found for each token. tokens: [N, 4], zeros as yet.

        The first of its tile's parts, how many there are, the token's first query in the tile, and 1 for a large tile;
        only of tokens whose tile has several parts.
        """
        (firsts,) = np.nonzero((parts[:, TILE_NUMBERS] == 0) & (parts[:, TILE_NUMBERS + 1] > 1))
        if not len(firsts):
            return
        _, first_token, token_end, *_, num_parts = parts[firsts].T
        nums = np.minimum(token_end - first_token, self.tokens_per_tile(kind))
        ends = nums.cumsum()
        within = np.arange(ends[-1]) - (ends - nums).repeat(nums)
        own = np.empty((len(within), TOKEN_NUMBERS), np.int32)
        own[:, 0], own[:, 1] = firsts.repeat(nums), num_parts.repeat(nums)
        own[:, 2], own[:, 3] = within * padded_group(self.num_group_heads), kind is TileKind.LARGE
        tokens[first_token.repeat(nums) + within] = own


@dataclass(frozen=True, slots=True)
class Tiles:
    """parts: [P, 7] int32; a program has all that it needs to know at once. Parts of a tile follow one another.

    The tile's row, -1 for padding, its first token, then of the row token_end, num_keys and num_anchor_keys; which part
    of the tile's keys, of how many.
    """

    kind: TileKind
    parts: Tensor


def padded_group(group_size: int) -> int:
    return 1 << (group_size - 1).bit_length()
