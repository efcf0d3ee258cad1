"""Prompts that sessions share: computed once, held once, kept for a while after their last user.

Only complete prompts are stored, in blocks that nothing else uses, so any length can be shared and nobody ever writes
to them again. Keys are digests of content; nothing here knows what a prompt says. Shown by tests/core/test_prompts.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from antiphon.core.admission import Admission
from antiphon.core.blocks import BlockPool


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """blocks: held by the store; whoever uses them becomes another holder (`Context.adopt_prompt`)."""

    blocks: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """What the store did so far, and the blocks that it holds now."""

    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0
    num_blocks: int = 0


class PromptStore:
    """Owns one holder of each stored prompt's blocks and their reservation.

    max_blocks: more are not kept once their last user has gone. 0 keeps a prompt only while it is used.
    """

    def __init__(self, pool: BlockPool, admission: Admission, max_blocks: int) -> None:
        self._pool = pool
        self._admission = admission
        self._max_blocks = max_blocks
        self._stored: OrderedDict[str, StoredPrompt] = OrderedDict()  # least recently used first
        self._counts = PromptCounts()

    @property
    def counts(self) -> PromptCounts:
        return replace(self._counts, num_blocks=self._num_blocks)

    def find(self, key: str) -> StoredPrompt | None:
        """Look a prompt up, and count it."""
        counts, prompt = self._counts, self._stored.get(key)
        if prompt is None:
            self._counts = replace(counts, num_misses=counts.num_misses + 1)
            return None
        self._counts = replace(counts, num_hits=counts.num_hits + 1)
        self._stored.move_to_end(key)
        return prompt

    def keep(self, key: str, prompt: StoredPrompt) -> None:
        """Store a prompt that a session has just computed and holds; its blocks are reserved under `key` already."""
        assert key not in self._stored, f"prompt {key} is stored already"
        self._pool.share(prompt.blocks)
        self._stored[key] = prompt
        self.trim()

    def trim(self) -> None:
        """Forget unused prompts, least recently used first, until the rest is small enough; when a session left."""
        while self._num_blocks > self._max_blocks and self.evict():
            pass

    def evict(self, but: str = "") -> bool:
        """Forget the least recently used prompt that nobody uses, except `but`. Returns whether there was one."""
        for key, prompt in self._stored.items():
            if key != but and all(self._pool.num_holders(block) == 1 for block in prompt.blocks):
                del self._stored[key]
                self._pool.release(prompt.blocks)
                self._admission.leave(key)
                self._counts = replace(self._counts, num_evictions=self._counts.num_evictions + 1)
                return True
        return False

    def admit(self, wanted: Mapping[str, int], but: str = "") -> None:
        """Reserve blocks by name, all or none; unused prompts make room, except `but`.

        Raises: ResourceExhausted; nothing is reserved then.
        """
        while self._admission.num_free_blocks < sum(wanted.values()) and self.evict(but=but):
            pass
        self._admission.admit(wanted)

    def tables(self) -> list[tuple[int, ...]]:
        """All blocks held, for `BlockPool.check`."""
        return [prompt.blocks for prompt in self._stored.values()]

    @property
    def _num_blocks(self) -> int:
        return sum(len(prompt.blocks) for prompt in self._stored.values())
