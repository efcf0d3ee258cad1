"""One session's context together with what the cache needs after each change of it.

The only place where bookkeeping (`core.Context`) and cache (`PagedDecoder`) change together. Shown by the golden kind
thinker and tests/stages/test_memory.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from antiphon.core.context import Context, Placement, Slide
from antiphon.core.unit_records import UnitRecord
from antiphon.core.window import OffWindow, SlideMode, SlidePlan, WindowPolicy
from antiphon.errors import InputError
from antiphon.kernels.transfer import Download, upload
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.stages.draw_table import DrawSlot
from antiphon.stages.paged import PagedDecoder
from antiphon.stages.step_packing import Row
from antiphon.stages.stepping import MAX_STEP_TOKENS, Drawn, Reply, Request, Steps
from antiphon.stages.thinker.choosing import TextDraw

ResultT = TypeVar("ResultT")
MemorySteps = Steps[TextDraw, ResultT]

_FREED_WITH_A_UNIT = 4
"""Inputs of dropped units that are freed whenever a unit is closed. To free hundreds at once would hold up a step."""


@dataclass(frozen=True, slots=True, eq=False)
class RetainedUnit:
    """A closed unit outside a cache. inputs: [record.num_tokens, hidden] model dtype, on the host."""

    record: UnitRecord
    inputs: Tensor


class ThinkerMemory:
    """Owns a session's context; the prompt first, then units that are fed and closed.

    What needs a forward pass is a generator for a `StepLoop`; bookkeeping is done before the first row is asked for.
    max_tokens: the context never holds more.
    keeps_inputs: units can be taken out (`retained`); else inputs are kept only if a slide computes them anew.
    """

    def __init__(
        self,
        network: ThinkerNetwork,
        decoder: PagedDecoder,
        window: WindowPolicy,
        slide: SlideMode,
        max_tokens: int,
        *,
        keeps_inputs: bool = False,
    ) -> None:
        self._network = network
        self._decoder = decoder
        self._window = window
        self.context = Context(decoder.pool, slide, max_tokens)
        # Inputs of the units in the ring, oldest first, on the host; then of the open unit, on the device.
        self._keeps_inputs = keeps_inputs or (slide is SlideMode.REPREFILL and not isinstance(window, OffWindow))
        self._inputs: list[Download] = []
        # Of dropped units. More units leave it than come to be kept, so that no more is held than just before a slide.
        self._dropped_inputs: list[Download] = []
        self._open_inputs: list[Tensor] = []
        # Appended, and not in the cache yet: at most one part.
        self._unfed: list[tuple[Placement, Tensor]] = []

    def feed_prompt(self, embeds: Tensor) -> MemorySteps[None]:
        """embeds: [n, hidden], the next part of what stands in front of the suffix; n = 0 allowed."""
        if embeds.shape[0]:
            yield from self._run(self.context.append_prompt(embeds.shape[0]), embeds)

    def feed_suffix(self, ids: tuple[int, ...]) -> MemorySteps[None]:
        """The prompt's end. Where the window keeps `previous` text, that text will stand in front of it."""
        if self._window.keeps_previous:
            placement = self.context.append_suffix(ids)
        elif ids:
            placement = self.context.append_prompt(len(ids))
        if ids:
            yield from self._run(placement, self.embed(ids))

    def feed(self, embeds: Tensor) -> MemorySteps[Tensor]:
        """Append to the open unit.

        embeds: [n, hidden], n at least 1.
        Returns the final-norm states [m, hidden] of the last m ≤ n tokens; all of them unless n is very large.
        """
        reply = yield from self._append(embeds, None)
        return reply.states

    def feed_later(self, embeds: Tensor) -> None:
        """Append to the open unit what nobody asks about: it is computed with what is fed next, or before a slide.

        embeds: [n, hidden], n at least 1.
        """
        assert not self._unfed, "what came before is not fed yet"
        self._unfed.append((self._appended(embeds), embeds))

    def feed_and_draw(self, embeds: Tensor, draw: TextDraw) -> MemorySteps[Drawn]:
        """Append to the open unit, and choose the token after it.

        embeds: [n, hidden], n at least 1.
        """
        reply = yield from self._append(embeds, draw)
        assert reply.drawn is not None, "a draw was asked for"
        return reply.drawn

    def feed_drawn(self, slot: DrawSlot, draw: TextDraw | None) -> MemorySteps[Reply]:
        """Append the token that was drawn last, which the host need not know, and choose another one if asked to."""
        assert not self._unfed, "a draw comes after what is fed"
        reply = yield Request(Row(self.context, self.context.append(1)), slot, draw)
        if self._keeps_inputs:
            self._open_inputs.append(reply.inputs)
        return reply

    def close_unit(self, unit: int, previous_ids: tuple[int, ...]) -> MemorySteps[Slide | None]:
        """End the open unit and let the window decide. previous_ids: words that `previous` may take over."""
        self.context.close_unit(unit, previous_ids)
        if self._keeps_inputs:
            for kept in self._inputs[-1:]:
                kept.read()  # it is there for a unit's time, and holds pinned memory no longer
            self._inputs.append(Download(torch.cat(self._open_inputs)))
            self._open_inputs = []
            del self._dropped_inputs[-_FREED_WITH_A_UNIT:]
        plan = self._window.plan(self.context.num_tokens, self.context.units, self.context.previous)
        if plan is None:
            return None
        # It sees what the slide drops.
        for placement, embeds in self._take_unfed():
            yield from self._run(placement, embeds)
        slide = self.context.slide(plan)
        yield from self._apply(slide)
        return slide

    def embed(self, ids: tuple[int, ...]) -> Tensor:
        """ids: n token ids. Returns [n, hidden]."""
        return self._network.embed_ids(ids)

    def free(self) -> None:
        """Give all blocks and inputs back; idempotent."""
        self.context.free()
        self._inputs, self._dropped_inputs = [], []
        self._open_inputs, self._unfed = [], []

    def _append(self, embeds: Tensor, draw: TextDraw | None) -> MemorySteps[Reply]:
        last = self._appended(embeds)
        parts = [*self._take_unfed(), (last, embeds)]
        first, _ = parts[0]
        slots = tuple(slot for placement, _ in parts for slot in placement.slots)
        assert first.first_position + len(slots) == last.first_position + len(last.slots), "something stands between"
        whole = Placement(slots, first.first_position, last.key_shift)
        reply = yield from self._run(whole, torch.cat([part for _, part in parts]), draw)
        return replace(reply, start=max(reply.start, reply.end - embeds.shape[0]))

    def _appended(self, embeds: Tensor) -> Placement:
        """Where these tokens of the open unit go."""
        placement = self.context.append(embeds.shape[0])
        if self._keeps_inputs:
            self._open_inputs.append(embeds)
        return placement

    def _take_unfed(self) -> list[tuple[Placement, Tensor]]:
        unfed, self._unfed = self._unfed, []
        return unfed

    def _apply(self, slide: Slide) -> MemorySteps[None]:
        """Bring the cache to what the slide says; nothing is decided here."""
        if slide.anchor_ids:
            yield from self._run(slide.anchor, self.embed(slide.anchor_ids))
        if slide.rotated_by:
            self._decoder.rotate(slide.rotated, slide.rotated_by)
        if self._keeps_inputs:
            self._dropped_inputs += self._inputs[: len(slide.dropped)]
            del self._inputs[: len(slide.dropped)]
            if slide.recomputed.slots:
                inputs = torch.cat([kept.read() for kept in self._inputs])
                yield from self._run(slide.recomputed, upload(inputs, self._decoder.cache.keys.device))

    def _run(self, placed: Placement, embeds: Tensor, draw: TextDraw | None = None) -> MemorySteps[Reply]:
        """Ask for a row, in pieces if it is long. Returns the last piece's reply."""
        num_tokens = embeds.shape[0]
        for start in range(0, num_tokens, MAX_STEP_TOKENS):
            end = min(start + MAX_STEP_TOKENS, num_tokens)
            piece = Placement(placed.slots[start:end], placed.first_position + start, placed.key_shift)
            reply = yield Request(Row(self.context, piece), embeds[start:end], draw if end == num_tokens else None)
        return reply

    @property
    def num_kept_tokens(self) -> int:
        """Tokens of the context whose input embeddings are kept."""
        return sum(inputs.shape[0] for inputs in (*(kept.read() for kept in self._inputs), *self._open_inputs))

    def retained(self) -> tuple[RetainedUnit, ...]:
        """The units in the ring, oldest first; between units. Raises: InputError if their inputs are not kept."""
        units = self.context.units
        if not self._keeps_inputs:
            raise InputError("this session keeps no inputs and cannot be moved; open it with keeps_inputs")
        assert not self._open_inputs, "a unit is open"
        return tuple(RetainedUnit(unit, kept.read()) for unit, kept in zip(units, self._inputs, strict=True))

    def refill(self, previous: tuple[int, ...], units: Sequence[RetainedUnit]) -> MemorySteps[None]:
        """Compute another memory's `previous` and units anew, behind a prompt like its own.

        Raises: ContextLengthExceeded or ResourceExhausted, before the first row; then the session must end.
        """
        assert self.context.num_tokens == self.context.num_anchor_tokens, "a memory is refilled before its first unit"
        slide = self.context.slide(SlidePlan(0, previous))
        placed = []
        for unit in units:
            placed.append(self.context.append(unit.record.num_tokens))
            self.context.close_unit(unit.record.unit, unit.record.spoken)
        yield from self._apply(slide)
        if self._keeps_inputs:
            self._inputs.extend(Download(unit.inputs) for unit in units)
        if placed:
            slots = tuple(slot for one in placed for slot in one.slots)
            whole = Placement(slots, placed[0].first_position, placed[0].key_shift)
            inputs = torch.cat([unit.inputs for unit in units])
            yield from self._run(whole, upload(inputs, self._decoder.cache.keys.device))
