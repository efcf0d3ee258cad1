"""What a session and the cache are without blocks, shifts and slots: the model that test_context.py compares core with.

A token is a number that no other token has. A session is lists of tokens; the cache remembers, for each slot, which
token was written there and to which position its key is rotated now. Everything that core claims can be read off them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from antiphon.core.blocks import BlockPool
from antiphon.core.context import Context, Placement, Segment, Slide
from antiphon.core.prompts import StoredPrompt
from antiphon.core.window import SlideMode, WindowPolicy


@dataclass(frozen=True, slots=True)
class Stored:
    """What a slot holds. angle: the position that the key is rotated to."""

    token: int
    angle: int


class PlainCache:
    """Slot to content; does exactly what a placement says and nothing else."""

    def __init__(self) -> None:
        self._slots: dict[int, Stored] = {}

    def write(self, placement: Placement, tokens: Sequence[int]) -> None:
        """Store tokens as the forward pass would: consecutive positions, keys rotated by `key_shift` more."""
        assert len(set(placement.slots)) == len(placement.slots) == len(tokens), f"{tokens} for {placement}"
        first_angle = placement.first_position + placement.key_shift
        for offset, (slot, token) in enumerate(zip(placement.slots, tokens, strict=True)):
            self._slots[slot] = Stored(token, first_angle + offset)

    def rotate(self, placement: Placement, by_positions: int) -> None:
        for slot in placement.slots:
            stored = self._slots[slot]
            self._slots[slot] = Stored(stored.token, stored.angle + by_positions)

    def read(self, slots: Sequence[int]) -> list[Stored]:
        return [self._slots[slot] for slot in slots]


@dataclass(slots=True)
class Unit:
    tokens: list[int]
    spoken: tuple[int, ...]


@dataclass(slots=True)
class PlainSession:
    """A session twice: as core keeps it (`context`) and as lists of tokens.

    is_prompt_shared: its prompt was given to others, or taken from them; it does not grow any more.
    """

    context: Context
    mode: SlideMode
    policy: WindowPolicy
    max_tokens: int
    prompt: list[int] = field(default_factory=list)
    is_prompt_shared: bool = False
    previous: tuple[int, ...] = ()
    suffix: tuple[int, ...] | None = None
    units: list[Unit] = field(default_factory=list)
    open_tokens: list[int] = field(default_factory=list)

    @property
    def anchor_tokens(self) -> list[int]:
        return [*self.prompt, *self.previous, *(self.suffix or ())]

    @property
    def ring_tokens(self) -> list[int]:
        return [*(token for unit in self.units for token in unit.tokens), *self.open_tokens]

    @property
    def num_tokens(self) -> int:
        return len(self.anchor_tokens) + len(self.ring_tokens)

    def forget(self) -> None:
        self.prompt, self.is_prompt_shared = [], False
        self.previous, self.suffix = (), None
        self.units, self.open_tokens = [], []

    def own_blocks(self) -> list[int]:
        """Blocks that nobody else may hold."""
        segments = self.context.segments()[1:] if self.is_prompt_shared else self.context.segments()
        return [block for segment in segments for block in segment.blocks]

    def apply(self, slide: Slide, cache: PlainCache) -> None:
        """Let the cache do what a slide asks for; the lists already are what the plan wanted."""
        if slide.anchor_ids:
            cache.write(slide.anchor, slide.anchor_ids)
        match self.mode:
            case SlideMode.ROTATE_QUERY:
                assert not slide.rotated.slots, "the default slide touched keys"
                assert not slide.recomputed.slots, "the default slide computed keys"
            case SlideMode.ROTATE_KEYS:
                assert not slide.recomputed.slots, "a rotation computed keys"
                cache.rotate(slide.rotated, slide.rotated_by)
            case SlideMode.REPREFILL:
                assert not slide.rotated.slots, "a recomputation rotated keys"
                assert self.context.segments()[-1].first_slot == 0, "a new ring begins inside a block"
                cache.write(slide.recomputed, self.ring_tokens)

    def check(self, cache: PlainCache, block_size: int) -> None:
        """Core's record and the cache hold exactly these tokens at exactly their positions."""
        self.context.check()
        *anchor, ring = self.context.segments()
        assert all(segment.first_slot == 0 for segment in anchor), f"an anchor segment lost its start: {anchor}"
        anchor_slots = [slot for segment in anchor for slot in slots_of(segment, block_size)]
        ring_slots = list(slots_of(ring, block_size))
        at_anchor = [Stored(token, position) for position, token in enumerate(self.anchor_tokens)]
        first = len(at_anchor) + self.context.shift
        in_ring = [Stored(token, first + offset) for offset, token in enumerate(self.ring_tokens)]
        assert cache.read(anchor_slots) == at_anchor
        assert cache.read(ring_slots) == in_ring
        assert self.context.num_tokens == self.num_tokens
        assert self.context.num_anchor_tokens == len(at_anchor)
        assert self.context.previous == self.previous
        kept = [(record.num_tokens, record.spoken) for record in self.context.units]
        assert kept == [(len(unit.tokens), unit.spoken) for unit in self.units]


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrompt:
    """A prompt that is held whether or not a session uses it."""

    prompt: StoredPrompt
    tokens: list[int]

    def check(self, cache: PlainCache, block_size: int) -> None:
        segment = Segment(array("i", self.prompt.blocks), 0, self.prompt.num_tokens)
        stored = cache.read(list(slots_of(segment, block_size)))
        assert stored == [Stored(token, i) for i, token in enumerate(self.tokens)], "a shared prompt was overwritten"


def slots_of(segment: Segment, block_size: int) -> Iterator[int]:
    """Slots of a segment's tokens in order, by division instead of core's arithmetic."""
    every = [block * block_size + offset for block in segment.blocks for offset in range(block_size)]
    return iter(every[segment.first_slot : segment.first_slot + segment.num_tokens])


def blocks_wanted(segment: Segment, num_tokens: int, block_size: int) -> int:
    """Blocks that so many more tokens need."""
    num_free_slots = len(segment.blocks) * block_size - segment.first_slot - segment.num_tokens
    return -(-max(0, num_tokens - num_free_slots) // block_size)


def snapshot(context: Context, pool: BlockPool) -> object:
    """Everything that a refused action must leave alone. Segments without a token say nothing."""
    segments = [(tuple(s.blocks), s.first_slot, s.num_tokens) for s in context.segments() if s.num_tokens]
    return segments, [*context.units], context.previous, context.shift, context.num_tokens, pool.num_free_blocks
