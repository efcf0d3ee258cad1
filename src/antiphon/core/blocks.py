"""Who holds which KV block. Knows nothing of tokens or tensors. Shown by tests/core/test_context.py."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from antiphon.errors import ResourceExhausted


class BlockPool:
    """The only writer of block ownership. A block is free, one table's own, or counted: held by one or more tables.

    Own blocks are many, and nothing is written down for each: they enter their table and leave it inside `grow` and
    `cut`, so that it alone has them. Whoever shares blocks counts them: `allocate`, `share`, `release`.

    num_blocks: blocks in the device's cache.
    block_size: slots in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, f"a pool needs blocks, got {num_blocks}"
        assert block_size > 0, f"a block needs slots, got {block_size}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        # First in, first out: a freed block is reused last, which leaves a stale table the least chance to do harm.
        # In a circle with room for all blocks, so that many come and go in one copy.
        self._free = array("i", range(num_blocks))
        self._first_free = 0
        self.num_free_blocks = num_blocks
        # Tables that hold a counted block; 0 for all others.
        self._num_holders = [0] * num_blocks

    def num_holders(self, block: int) -> int:
        """Block tables that hold a counted block; 0 if it is free or a table's own."""
        return self._num_holders[block]

    def grow(self, table: array[int], num_blocks: int) -> None:
        """Append blocks to a table whose own they are until it is cut, all or none.

        Raises: ResourceExhausted if fewer are free.
        """
        table.extend(self._taken(num_blocks))

    def cut(self, table: array[int], start: int, end: int) -> None:
        """Free the blocks `start:end` of a table whose own they are. They leave it, so nobody can free them twice."""
        blocks = table[start:end]
        assert not blocks or not self._num_holders[blocks[0]], f"block {blocks[0]} is counted and cannot be cut off"
        del table[start:end]
        self._put_back(blocks)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks to be counted, all or none; the caller is their only holder.

        Raises: ResourceExhausted if fewer are free.
        """
        blocks = self._taken(num_blocks).tolist()
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def require(self, num_blocks: int) -> None:
        """Raises: ResourceExhausted if fewer blocks are free. Takes none."""
        if num_blocks > self.num_free_blocks:
            raise ResourceExhausted(
                f"{num_blocks} KV blocks wanted, {self.num_free_blocks} of {self.num_blocks} are free; "
                "end a session or give the cache more memory"
            )

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of these counted blocks."""
        for block in blocks:
            assert self._num_holders[block] > 0, f"block {block} is free or a table's own and cannot be shared"
            self._num_holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one holder from each of these counted blocks; without holders a block is free."""
        freed = array("i")
        for block in blocks:
            assert self._num_holders[block] > 0, f"block {block} is released but nobody counted it as held"
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                freed.append(block)
        self._put_back(freed)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that ownership is exactly what `tables`, all block tables there are, say."""
        held = Counter(block for table in tables for block in table)
        ends = self._first_free, self._first_free + self.num_free_blocks
        free = (self._free + self._free)[slice(*ends)].tolist()
        unheld = {*free}
        assert len(unheld) == len(free), f"free blocks {free} are free more than once"
        for block, num_counted in enumerate(self._num_holders):
            assert not num_counted or block not in unheld, f"block {block} is free, {num_counted} are counted"
            num_holders = num_counted or int(block not in unheld)  # nobody counts a table's own
            assert held[block] == num_holders, f"block {block}: {held[block]} tables hold it, it has {num_holders}"

    def _taken(self, num_blocks: int) -> array[int]:
        self.require(num_blocks)
        end = self._first_free + num_blocks
        taken = self._free[self._first_free : end]
        if end >= self.num_blocks:
            end -= self.num_blocks
            taken += self._free[:end]
        self._first_free = end
        self.num_free_blocks -= num_blocks
        return taken

    def _put_back(self, blocks: array[int]) -> None:
        num_free = self.num_free_blocks + len(blocks)
        assert num_free <= self.num_blocks, f"{num_free} of {self.num_blocks} blocks would be free"
        start = (self._first_free + self.num_free_blocks) % self.num_blocks
        num_to_end = min(len(blocks), self.num_blocks - start)
        self._free[start : start + num_to_end] = blocks[:num_to_end]
        self._free[: len(blocks) - num_to_end] = blocks[num_to_end:]
        self.num_free_blocks = num_free
