"""Who may still come in: a session is admitted only if all that it can ever need is free.

So a running session is never preempted and never runs out of blocks. Shown by tests/core/test_admission.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from antiphon.errors import ResourceExhausted


class Admission:
    """Owns the reservations on one cache, by name: sessions, shared prompts. Blocks themselves are `BlockPool`'s."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._reserved: dict[str, int] = {}

    @property
    def num_free_blocks(self) -> int:
        return self._num_blocks - sum(self._reserved.values())

    def is_admitted(self, name: str) -> bool:
        return name in self._reserved

    def admit(self, wanted: Mapping[str, int]) -> None:
        """Reserve worst cases in blocks by name, all or none.

        Raises: ResourceExhausted if they are not free together; nothing is reserved then.
        """
        twice = sorted(self._reserved.keys() & wanted)
        assert not twice, f"admitted already: {twice}"
        num_blocks = sum(wanted.values())
        if num_blocks > self.num_free_blocks:
            raise ResourceExhausted(
                f"the engine is full: a session that may need {num_blocks} KV blocks found {self.num_free_blocks} of "
                f"{self._num_blocks} unreserved; try again when another one has ended"
            )
        self._reserved |= wanted

    def leave(self, session_id: str) -> None:
        """Give a reservation back; idempotent."""
        self._reserved.pop(session_id, None)
