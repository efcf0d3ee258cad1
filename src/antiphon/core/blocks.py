"""Who holds which KV block. Knows nothing of tokens or tensors. Shown by tests/core/test_context.py."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from antiphon.errors import ResourceExhausted


class BlockPool:
    """The only writer of block ownership. A block is free, or held by one or more block tables.

    num_blocks: blocks in the device's cache.
    block_size: slots in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, f"a pool needs blocks, got {num_blocks}"
        assert block_size > 0, f"a block needs slots, got {block_size}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        # First in, first out: a freed block is reused last, which leaves a stale table the least chance to do harm.
        self._free: deque[int] = deque(range(num_blocks))
        self._num_holders = [0] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def num_holders(self, block: int) -> int:
        """Block tables that hold it; 0 if it is free."""
        return self._num_holders[block]

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks, all or none; the caller is their only holder.

        Raises: ResourceExhausted if fewer are free.
        """
        self.require(num_blocks)
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def require(self, num_blocks: int) -> None:
        """Raises: ResourceExhausted if fewer blocks are free. Takes none."""
        if num_blocks > len(self._free):
            raise ResourceExhausted(
                f"{num_blocks} KV blocks wanted, {len(self._free)} of {self.num_blocks} are free; "
                "end a session or give the cache more memory"
            )

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block."""
        for block in blocks:
            assert self._num_holders[block] > 0, f"block {block} is free and cannot be shared"
            self._num_holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one holder from each block; without holders a block is free."""
        for block in blocks:
            assert self._num_holders[block] > 0, f"block {block} is released but nobody holds it"
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that ownership is exactly what `tables`, all block tables there are, say."""
        held = Counter(block for table in tables for block in table)
        for block, num_holders in enumerate(self._num_holders):
            assert held[block] == num_holders, f"block {block}: {held[block]} tables hold it, {num_holders} are counted"
        free = sorted(self._free)
        assert free == [b for b in range(self.num_blocks) if not held[b]], f"free blocks {free} are not the unheld ones"
