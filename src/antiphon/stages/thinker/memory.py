"""One session's context together with what the cache needs after each change of it.

The only place where bookkeeping (`core.Context`) and cache (`PagedDecoder`) change together. Shown by the golden kind
thinker and tests/stages/test_memory.py.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from antiphon.core.context import Context, Slide
from antiphon.core.window import SlideMode, WindowPolicy
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.stages.paged import PagedDecoder, Row


class ThinkerMemory:
    """Owns a session's context; the prompt first, then units that are fed and closed.

    max_tokens: the context never holds more.
    """

    def __init__(
        self,
        network: ThinkerNetwork,
        decoder: PagedDecoder,
        window: WindowPolicy,
        slide: SlideMode,
        max_tokens: int,
    ) -> None:
        self._network = network
        self._decoder = decoder
        self._window = window
        self.context = Context(decoder.pool, slide, max_tokens)
        # Inputs of the units in the ring, oldest first, then of the open unit; kept only if a slide computes them anew.
        self._keeps_inputs = slide is SlideMode.REPREFILL
        self._inputs: deque[Tensor] = deque()
        self._open_inputs: list[Tensor] = []

    def feed_prompt(self, embeds: Tensor) -> None:
        """embeds: [n, hidden], the next part of what stands in front of the suffix; n = 0 allowed."""
        if embeds.shape[0]:
            self._decoder.run_long(Row(self.context, self.context.append_prompt(embeds.shape[0]), embeds))

    def feed_suffix(self, ids: tuple[int, ...]) -> None:
        """The prompt's end. Where the window keeps `previous` text, that text will stand in front of it."""
        if self._window.keeps_previous:
            placement = self.context.append_suffix(ids)
        elif ids:
            placement = self.context.append_prompt(len(ids))
        if ids:
            self._decoder.run_long(Row(self.context, placement, self.embed(ids)))

    def feed(self, embeds: Tensor) -> Tensor:
        """Append to the open unit.

        embeds: [n, hidden], n at least 1.
        Returns the final-norm states [m, hidden] of the last m ≤ n tokens; all of them unless n is very large.
        """
        row = Row(self.context, self.context.append(embeds.shape[0]), embeds)
        if self._keeps_inputs:
            self._open_inputs.append(embeds)
        return self._decoder.run_long(row)

    def close_unit(self, unit: int, previous_ids: tuple[int, ...]) -> Slide | None:
        """End the open unit and let the window decide. previous_ids: words that `previous` may take over."""
        self.context.close_unit(unit, previous_ids)
        if self._keeps_inputs:
            self._inputs.append(torch.cat(self._open_inputs))
            self._open_inputs = []
        plan = self._window.plan(self.context.num_tokens, self.context.units, self.context.previous)
        if plan is None:
            return None
        slide = self.context.slide(plan)
        self._apply(slide)
        return slide

    def embed(self, ids: tuple[int, ...]) -> Tensor:
        """ids: n token ids. Returns [n, hidden]."""
        return self._network.embed_ids(ids)

    def free(self) -> None:
        """Give all blocks and inputs back; idempotent."""
        self.context.free()
        self._inputs.clear()
        self._open_inputs = []

    def _apply(self, slide: Slide) -> None:
        """Bring the cache to what the slide says; nothing is decided here."""
        if slide.anchor_ids:
            self._decoder.run_long(Row(self.context, slide.anchor, self.embed(slide.anchor_ids)))
        if slide.rotated_by:
            self._decoder.rotate(slide.rotated, slide.rotated_by)
        if self._keeps_inputs:
            for _ in slide.dropped:
                self._inputs.popleft()
            if slide.recomputed.slots:
                self._decoder.run_long(Row(self.context, slide.recomputed, torch.cat(tuple(self._inputs))))
