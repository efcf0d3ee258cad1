"""What one session attends to: anchor segments, then the ring of units. Bookkeeping only, no tensors.

    anchor[0]        anchor[1] (context mode)   ring
    prompt           previous ‖ suffix          u7 u8 u9 (open unit)
    └ fresh blocks   └ fresh blocks             └ fresh blocks; may start inside its first one

Positions run 0..num_tokens-1 over all segments in this order. A ring key is written rotated to
`position + shift`; `Context.slide` moves `shift` so that this stays true for the keys already there (docs/kv_cache.md).
Shown by tests/core/test_context.py against a brute-force model.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from antiphon.core.blocks import BlockPool
from antiphon.core.prompts import StoredPrompt
from antiphon.core.unit_records import UnitRecord, UnitRecords
from antiphon.core.window import SlideMode, SlidePlan
from antiphon.errors import ContextLengthExceeded


class Placement(NamedTuple):
    """Where consecutive tokens go. A tuple, because every row of every step makes one.

    slots: one per token, `block * block_size + offset`.
    first_position: position of the first token.
    key_shift: keys are rotated to `position + key_shift`.
    """

    slots: tuple[int, ...]
    first_position: int
    key_shift: int


@dataclass(slots=True)
class Segment:
    """A run of tokens in blocks of its own. first_slot: offset of the first token in the first block.

    is_shareable: other contexts may hold its blocks as well.
    """

    blocks: array[int] = field(default_factory=lambda: array("i"))
    first_slot: int = 0
    num_tokens: int = 0
    is_shareable: bool = False


@dataclass(frozen=True, slots=True)
class Slide:
    """What a slide did to the bookkeeping, and so what the cache still needs; made by `Context.slide` only.

    dropped: units that left, oldest first.
    anchor_ids, anchor: `previous ‖ suffix` to be forwarded, and where; no ids when it did not change.
    rotated: ring tokens whose keys must be rotated by `rotated_by` positions in place; no slots when none must.
    recomputed: retained ring tokens to be forwarded from their embeddings; no slots when none must.
    """

    dropped: UnitRecords
    anchor_ids: tuple[int, ...]
    anchor: Placement
    rotated: Placement
    rotated_by: int
    recomputed: Placement


class Context:
    """The single record of a session's tokens in the cache: block tables, positions, units, `previous`.

    pool: where its blocks come from; `free` gives all of them back.
    mode: how slides are done.
    max_tokens: the context never grows beyond this.
    """

    def __init__(self, pool: BlockPool, mode: SlideMode, max_tokens: int) -> None:
        self._pool = pool
        self._mode = mode
        self._max_tokens = max_tokens
        self._anchor: list[Segment] = []
        self._ring = Segment()
        self._segments: tuple[Segment, ...] = (self._ring,)
        self._units = UnitRecords()
        self._num_open_tokens = 0
        self._suffix: tuple[int, ...] = ()
        # Every step asks for these; they change with a block, and with the anchor.
        self._table = b""
        self._is_table_old = False
        self.num_anchor_tokens = 0
        self.previous: tuple[int, ...] = ()
        self.shift = 0

    @property
    def num_tokens(self) -> int:
        return self.num_anchor_tokens + self._ring.num_tokens

    @property
    def block_table(self) -> bytes:
        """Blocks of all segments in order, int32 each, so that a step copies them as they are."""
        if self._is_table_old:
            self._table = b"".join([segment.blocks for segment in self.segments()])
            self._is_table_old = False
        return self._table

    @property
    def num_blocks(self) -> int:
        return sum(len(segment.blocks) for segment in self._anchor) + len(self._ring.blocks)

    @property
    def units(self) -> UnitRecords:
        """Closed units in the ring, oldest first, as they are now; to be read, not changed."""
        return self._units

    def segments(self) -> tuple[Segment, ...]:
        """Anchor segments, then the ring; to be read, not changed."""
        return self._segments

    def append_prompt(self, num_tokens: int) -> Placement:
        """Place tokens at the end of the shared prompt segment, before any unit or suffix."""
        assert len(self._anchor) <= 1, "the prompt cannot grow once the suffix segment stands behind it"
        assert not self._ring.num_tokens, "the prompt cannot grow under units"
        segment = self._anchor[0] if self._anchor else Segment(is_shareable=True)
        assert all(self._pool.num_holders(block) == 1 for block in segment.blocks), "a shared prompt is complete"
        placement = self._append(segment, num_tokens, key_shift=0)
        self._anchor = [segment]
        self._note_blocks()
        return placement

    def adopt_prompt(self, prompt: StoredPrompt) -> None:
        """Use a prompt that is in the cache already; this context becomes one more holder and never writes to it."""
        assert not self._anchor, "a context has one prompt"
        self._pool.share(prompt.blocks)
        self._anchor = [Segment(array("i", prompt.blocks), 0, prompt.num_tokens, is_shareable=True)]
        self._note_blocks()

    @property
    def prompt(self) -> StoredPrompt:
        """The shared segment as it could be stored, complete once a suffix or a unit stands behind it."""
        segment = self._anchor[0] if self._anchor else Segment()
        return StoredPrompt(tuple(segment.blocks), segment.num_tokens)

    def append_suffix(self, suffix: tuple[int, ...]) -> Placement:
        """Place the private segment that `previous` will share with `suffix` (context mode)."""
        assert len(self._anchor) <= 1, "a context has one suffix"
        assert not self._ring.num_tokens, "the anchor cannot grow under units but by a slide"
        prompt, private = self._anchor[0] if self._anchor else Segment(is_shareable=True), Segment()
        placement = self._append(private, len(suffix), key_shift=0)
        self._anchor, self._suffix = [prompt, private], suffix
        self._note_blocks()
        return placement

    def append(self, num_tokens: int) -> Placement:
        """Place tokens of the open unit at the end of the ring.

        Raises: ContextLengthExceeded or ResourceExhausted; nothing changed then.
        """
        placement = self._append(self._ring, num_tokens, key_shift=self.shift)
        self._num_open_tokens += num_tokens
        return placement

    def retract(self, num_tokens: int) -> None:
        """Take back the newest tokens of the open unit, as if they had not been appended; the cache needs nothing."""
        assert 0 <= num_tokens <= self._num_open_tokens, f"{num_tokens} of {self._num_open_tokens} open tokens"
        ring = self._ring
        self._num_open_tokens -= num_tokens
        ring.num_tokens -= num_tokens
        num_blocks = -(-(ring.first_slot + ring.num_tokens) // self._pool.block_size)
        if num_blocks < len(ring.blocks):
            self._pool.cut(ring.blocks, num_blocks, len(ring.blocks))
            self._is_table_old = True

    def close_unit(self, unit: int, spoken: tuple[int, ...]) -> UnitRecord:
        """Make what was appended since the last close a unit of the ring."""
        record = UnitRecord(unit, self._num_open_tokens, spoken)
        self._units.append(record)
        self._num_open_tokens = 0
        return record

    def slide(self, plan: SlidePlan) -> Slide:
        """Apply a plan in one transaction; the open unit must be closed.

        Raises: ContextLengthExceeded if a longer `previous` is too long for what stays, ResourceExhausted if it finds
        no block; nothing changed then.
        """
        assert not self._num_open_tokens, f"{self._num_open_tokens} tokens of an open unit would be cut from their unit"
        assert 0 <= plan.num_dropped_units <= len(self._units), f"{plan} for {len(self._units)} units"
        num_dropped_tokens = self._units.num_tokens_of(plan.num_dropped_units)
        is_rewritten = plan.previous != self.previous
        if is_rewritten:
            self._require_room_for_anchor(plan, num_dropped_tokens)
        dropped = self._units.take(plan.num_dropped_units)
        self._drop_front(num_dropped_tokens)
        growth = 0
        anchor_ids: tuple[int, ...] = ()
        anchor = _NOWHERE
        if is_rewritten:
            growth = len(plan.previous) - len(self.previous)
            anchor_ids, anchor = self._rewrite_anchor(plan.previous)
        moved_by = growth - num_dropped_tokens
        rotated = recomputed = _NOWHERE
        match self._mode:
            case SlideMode.ROTATE_QUERY:
                self.shift -= moved_by
            case SlideMode.ROTATE_KEYS:
                rotated = self._ring_placement()
            case SlideMode.REPREFILL:
                recomputed = self._refill_ring()
        self._note_blocks()
        return Slide(dropped, anchor_ids, anchor, rotated, moved_by if rotated.slots else 0, recomputed)

    def free(self) -> None:
        """Give all blocks back and forget everything; idempotent."""
        for segment in self.segments():
            if segment.is_shareable:
                self._pool.release(segment.blocks)
            else:
                self._pool.cut(segment.blocks, 0, len(segment.blocks))
        self._anchor = []
        self._ring = Segment()
        self._units = UnitRecords()
        self._num_open_tokens = 0
        self._suffix = self.previous = ()
        self.shift = 0
        self._note_blocks()

    def check(self) -> None:
        """Assert what must hold after every action."""
        size = self._pool.block_size
        tables = [segment.blocks for segment in self.segments()]
        assert self.block_table == b"".join(tables), "the block table is not that of the segments"
        num_anchor_tokens = sum(segment.num_tokens for segment in self._anchor)
        assert self.num_anchor_tokens == num_anchor_tokens, f"{self.num_anchor_tokens} anchor tokens are noted"
        for segment in self.segments():
            end = segment.first_slot + segment.num_tokens
            assert len(segment.blocks) == -(-end // size), f"{len(segment.blocks)} blocks for slots up to {end}"
            assert 0 <= segment.first_slot < size, f"first slot {segment.first_slot} lies outside the first block"
        self._units.check()
        num_unit_tokens = self._units.num_tokens + self._num_open_tokens
        assert num_unit_tokens == self._ring.num_tokens, f"{num_unit_tokens} unit tokens, ring {self._ring.num_tokens}"
        assert self.num_tokens <= self._max_tokens, f"{self.num_tokens} tokens, limit {self._max_tokens}"
        assert self._mode is SlideMode.ROTATE_QUERY or self.shift == 0, f"shift {self.shift} in mode {self._mode}"

    def _note_blocks(self) -> None:
        """After every change of the anchor or of several blocks."""
        self._is_table_old = True
        self._segments = (*self._anchor, self._ring)
        self.num_anchor_tokens = sum(segment.num_tokens for segment in self._anchor)

    def _append(self, segment: Segment, num_tokens: int, key_shift: int) -> Placement:
        first_position = self.num_tokens
        if first_position + num_tokens > self._max_tokens:
            raise ContextLengthExceeded(
                f"the context holds {first_position} tokens and cannot take {num_tokens} more (limit "
                f"{self._max_tokens}); use a sliding window or a higher limit"
            )
        first = segment.first_slot + segment.num_tokens
        end = first + num_tokens
        size = self._pool.block_size
        num_new_blocks = -(-end // size) - len(segment.blocks)
        if num_new_blocks > 0:
            if segment.is_shareable:
                segment.blocks.extend(self._pool.allocate(num_new_blocks))
            else:
                self._pool.grow(segment.blocks, num_new_blocks)
            self._is_table_old = True
        segment.num_tokens += num_tokens
        if num_tokens == 1:  # which is what a step does for most of its rows
            return Placement((segment.blocks[first // size] * size + first % size,), first_position, key_shift)
        return Placement(tuple(self._slots(segment, first, end)), first_position, key_shift)

    def _slots(self, segment: Segment, first: int, end: int) -> Iterator[int]:
        size = self._pool.block_size
        for index in range(first, end):
            yield segment.blocks[index // size] * size + index % size

    def _ring_placement(self) -> Placement:
        ring = self._ring
        slots = self._slots(ring, ring.first_slot, ring.first_slot + ring.num_tokens)
        return Placement(tuple(slots), self.num_anchor_tokens, self.shift)

    def _drop_front(self, num_tokens: int) -> None:
        ring = self._ring
        ring.num_tokens -= num_tokens
        ring.first_slot += num_tokens
        num_empty = ring.first_slot // self._pool.block_size if ring.num_tokens else len(ring.blocks)
        self._pool.cut(ring.blocks, 0, num_empty)
        ring.first_slot = ring.first_slot % self._pool.block_size if ring.num_tokens else 0

    def _require_room_for_anchor(self, plan: SlidePlan, num_dropped_tokens: int) -> None:
        assert len(self._anchor) == 2, "only a context with a suffix segment can take `previous`"
        num_tokens = self.num_tokens - num_dropped_tokens + len(plan.previous) - len(self.previous)
        if num_tokens > self._max_tokens:
            raise ContextLengthExceeded(
                f"with {len(plan.previous)} tokens of earlier words the context would hold {num_tokens} tokens (limit "
                f"{self._max_tokens}); keep fewer words or units"
            )
        size, ring = self._pool.block_size, self._ring
        is_emptied = num_dropped_tokens == ring.num_tokens
        num_freed = len(ring.blocks) if is_emptied else (ring.first_slot + num_dropped_tokens) // size
        num_wanted = -(-(len(plan.previous) + len(self._suffix)) // size) - len(self._anchor[1].blocks)
        if num_wanted > num_freed:
            self._pool.require(num_wanted - num_freed)

    def _rewrite_anchor(self, previous: tuple[int, ...]) -> tuple[tuple[int, ...], Placement]:
        ids = (*previous, *self._suffix)
        segment = self._anchor[1]
        self._pool.cut(segment.blocks, 0, len(segment.blocks))
        self._pool.grow(segment.blocks, -(-len(ids) // self._pool.block_size))
        segment.num_tokens = len(ids)
        self._note_blocks()
        self.previous = previous
        slots = tuple(self._slots(segment, 0, len(ids)))
        return ids, Placement(slots, self._anchor[0].num_tokens, key_shift=0)

    def _refill_ring(self) -> Placement:
        """The ring starts anew at slot 0 of the blocks it has: every slot is written again before it is read."""
        ring = self._ring
        num_blocks = -(-ring.num_tokens // self._pool.block_size)
        self._pool.cut(ring.blocks, num_blocks, len(ring.blocks))
        ring.first_slot = 0
        return self._ring_placement()


_NOWHERE = Placement((), 0, 0)
