"""Who may still come in: a session is admitted only if all that it can ever need is free.

So a running session is never preempted and never runs out of blocks. Shown by tests/core/test_admission.py.
"""

from __future__ import annotations

from antiphon.errors import ResourceExhausted


class Admission:
    """Owns the reservations on one cache. Blocks themselves are `BlockPool`'s."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._reserved: dict[str, int] = {}

    @property
    def num_free_blocks(self) -> int:
        return self._num_blocks - sum(self._reserved.values())

    def admit(self, session_id: str, num_blocks: int) -> None:
        """Reserve a session's worst case.

        Raises: ResourceExhausted if it is not free; nothing is reserved then.
        """
        assert session_id not in self._reserved, f"session {session_id} is admitted already"
        if num_blocks > self.num_free_blocks:
            raise ResourceExhausted(
                f"the engine is full: a session that may need {num_blocks} KV blocks found {self.num_free_blocks} of "
                f"{self._num_blocks} unreserved; try again when another one has ended"
            )
        self._reserved[session_id] = num_blocks

    def leave(self, session_id: str) -> None:
        """Give a reservation back; idempotent."""
        self._reserved.pop(session_id, None)
