"""From spoken tokens and their hidden states to codec tokens, as generators for common steps.

Source: REFERENCE 8; in chats 14.5. Shown by tests/stages/test_talker.py and the golden kind talker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from antiphon.core.context import Context
from antiphon.core.messages import CodecChunk, GoOn, Handoff
from antiphon.core.sampling import ALL_TOKENS
from antiphon.core.window import BasicWindow
from antiphon.kernels.transfer import Download, upload
from antiphon.models.minicpmo.captured import NumRuns, Recorder
from antiphon.models.minicpmo.talker import TalkerNetwork
from antiphon.stages.chain_graphs import ChainGraphs, ChainParts
from antiphon.stages.draw_table import DrawPlace, DrawSlot, Newest
from antiphon.stages.paged import CacheConfig, PagedDecoder
from antiphon.stages.step_packing import Row
from antiphon.stages.stepping import Chain, Request, Settle, StepLoop, Steps
from antiphon.stages.talker.choosing import CodecChooser, CodecDraw
from antiphon.stages.talker.state import Saying, TalkerState

MAX_CHUNK_TOKENS = 25
"""Codec tokens in one second of speech. The reference samples one more and drops it (REFERENCE 8.2)."""

MAX_HANDOFF_TOKENS = 500
"""Codec tokens that a chat says of one handoff; the reference's limit of a chunk of text (REFERENCE 14.5)."""

ResultT = TypeVar("ResultT")
SpeakerSteps = Steps[CodecDraw, ResultT]


@dataclass(frozen=True, slots=True)
class CodecStep:
    """One sampled codec token. hidden: [hidden], the state it was drawn from. is_eos: it ends the segment."""

    token: int
    hidden: Tensor
    is_eos: bool


CHAIN_STEPS = 5
"""Of a chunk's steps, so many at once on a GPU: the first token of a chunk is drawn with its condition, 25 are left."""


class _SpokenChains:
    """Chains of codec tokens."""

    def __init__(self, chooser: CodecChooser, graphs: ChainGraphs) -> None:
        self._chooser = chooser
        self._graphs = graphs

    def run_chains(self, rows: Sequence[Row], draws: Sequence[tuple[CodecDraw, ...]]) -> tuple[Download, Tensor]:
        """As `Chains`."""
        return self._graphs.run(rows, [self._chooser.columns(step) for step in zip(*draws, strict=True)])


class Speaker:
    """Owns the talker's cache, its draws and the unfinished work of its sessions."""

    def __init__(self, network: TalkerNetwork, cache: CacheConfig, chain_steps: int = 1) -> None:
        """chain_steps: of a call's chunk, so many at once."""
        weight = network.emb_text.weight
        self._network = network
        self._device = weight.device
        self._eos = network.config.num_codec_tokens - 1
        self.decoder = PagedDecoder(network, network.config.decoder, cache, weight.device, weight.dtype)
        self.chooser = CodecChooser(network)
        self.chains = ChainGraphs(
            ChainParts(
                forward=network,
                cache=self.decoder.cache,
                embed=network.embed_codes,
                draw=self.chooser.draw_of_all,
                table=self.chooser.table,
                padding=self.chooser.padding,
                tiling=self.decoder.tiling,
            ),
            chain_steps,
        )
        chains = _SpokenChains(self.chooser, self.chains)
        self.loop: StepLoop[CodecDraw, CodecChunk] = StepLoop(self.decoder, self.chooser, chains)

    def capture(self, max_rows: int, recorder: Recorder) -> Iterator[int]:
        """Record steps, draws and chains of up to so many rows, before the first step; on a GPU only.

        Yields, each time one is done, how many of its kind are left.
        """
        yield from self.decoder.capture(max_rows, self.max_context_tokens, recorder)
        yield from self.chooser.capture(max_rows, recorder)
        yield from self.chains.capture(max_rows, self.max_context_tokens, recorder)

    @property
    def num_runs(self) -> NumRuns:
        """Of steps, draws and chains."""
        return self.decoder.num_runs + self.chooser.num_runs + self.chains.num_runs

    @property
    def max_context_tokens(self) -> int:
        """Positions that the model was trained on."""
        return self._network.config.max_position_tokens

    def speak(self, state: TalkerState, handoff: Handoff[Tensor]) -> SpeakerSteps[CodecChunk]:
        """The codec tokens of one unit of a turn. Raises: ResourceExhausted; the session must end then.

        handoff.hidden: [n, llm_hidden] on the host; n = 0 is a unit that only goes on with the turn.
        """
        is_first_of_turn = state.context.num_tokens == 0
        ids = upload(torch.tensor(handoff.token_ids, dtype=torch.int64), self._device)
        condition = self._network.condition(ids, upload(handoff.hidden, self._device))
        # The first and the last chunk of a turn may be short; one in between fills its second.
        may_end = is_first_of_turn or handoff.ends_turn
        steps = yield from self.codes(state, condition, min_tokens=0 if may_end else MAX_CHUNK_TOKENS + 1)
        tokens = [step.token for step in steps if not step.is_eos][:MAX_CHUNK_TOKENS]
        state.num_chunks += 1
        if handoff.ends_turn:
            state.context.free()
        return CodecChunk(
            handoff.address, handoff.deadline_s, handoff.unit, tuple(tokens), is_first_of_turn, handoff.ends_turn
        )

    def say(self, state: TalkerState, handoff: Handoff[Tensor]) -> SpeakerSteps[CodecChunk]:
        """The first chunk of one piece of a chat's answer; `say_more` while it goes on. Errors as of `speak`."""
        if state.saying is None:
            state.saying = Saying(self.chooser.table.take(state.session.sampling.repetition_window_tokens))
        saying = state.saying
        assert saying.drawn is None, "the handoff before this one is not said"
        ids = upload(torch.tensor(handoff.token_ids, dtype=torch.int64), self._device)
        condition = self._network.condition(ids, upload(handoff.hidden, self._device), ends_text=handoff.ends_turn)
        self._make_room(state.context, condition.shape[0] + MAX_HANDOFF_TOKENS)
        saying.ends_turn, saying.num_tokens = handoff.ends_turn, 0
        row = Row(state.context, state.context.append(condition.shape[0]))
        reply = yield Request(row, condition, _draw(state, saying.slot, saying.newest, is_eos_masked=False))
        saying.drawn = reply.drawn
        return (yield from self.say_more(state, handoff))

    def say_more(self, state: TalkerState, work: Handoff[Tensor] | GoOn) -> SpeakerSteps[CodecChunk]:
        """The next chunk of what a chat's talker is at. work: of which this is the answer."""
        saying, context = state.saying, state.context
        assert saying is not None, "nothing is being said"
        tokens: list[int] = []
        goes_on = True
        while goes_on and len(tokens) < MAX_CHUNK_TOKENS:
            drawn = saying.drawn
            assert drawn is not None, "all of the handoff is said"
            draw = _draw(state, saying.slot, Newest.TAKEN, is_eos_masked=False)
            reply = yield Request(Row(context, context.append(1)), saying.slot, draw)
            saying.drawn, token = reply.drawn, drawn.read()
            if token == self._eos:
                context.retract(1)
                goes_on = False
            else:
                tokens.append(token)
                saying.num_tokens += 1
                goes_on = saying.num_tokens < MAX_HANDOFF_TOKENS
        if not goes_on:
            # The draw after the end, or after the limit, never happened.
            state.num_draws -= 1
            saying.newest, saying.drawn = Newest.VOID, None
        context.close_unit(state.num_chunks, ())
        unit, ends_turn = state.num_chunks, saying.ends_turn and not goes_on
        state.num_chunks += 1
        if ends_turn:
            self.forget(state)
        return CodecChunk(
            work.address,
            work.deadline_s,
            unit,
            tuple(tokens),
            is_first_of_turn=False,
            ends_turn=ends_turn,
            goes_on=goes_on,
        )

    def forget(self, state: TalkerState) -> None:
        """The turn is over; idempotent."""
        state.context.free()
        if state.saying is not None:
            self.chooser.table.give_back(state.saying.slot)
            state.saying = None

    def codes(self, state: TalkerState, condition: Tensor, *, min_tokens: int) -> SpeakerSteps[tuple[CodecStep, ...]]:
        """Sample until EOS or until one token more than a chunk holds; neither stays in the context.

        condition: [m, hidden].
        min_tokens: EOS is impossible before so many tokens.
        """
        self._make_room(state.context, condition.shape[0] + MAX_CHUNK_TOKENS)
        slot = self.chooser.table.take(state.session.sampling.repetition_window_tokens)
        try:
            steps = yield from self._sample(state, condition, slot, min_tokens)
        finally:
            self.chooser.table.give_back(slot)
        state.context.close_unit(state.num_chunks, ())
        return tuple(steps)

    def _sample(
        self, state: TalkerState, condition: Tensor, slot: DrawSlot, min_tokens: int
    ) -> SpeakerSteps[list[CodecStep]]:
        context = state.context
        steps: list[CodecStep] = []
        row = Row(context, context.append(condition.shape[0]))
        newest = yield Request(row, condition, _draw(state, slot, Newest.FORGOTTEN, is_eos_masked=min_tokens > 0))
        num_drawn = 1
        while True:
            unread, num_left = newest, MAX_CHUNK_TOKENS + 1 - num_drawn
            if num_left:
                # Fed before they are read: an EOS costs these rows, which are taken back.
                num_next = self.chains.num_steps if num_left >= self.chains.num_steps else 1
                draws = tuple(
                    _draw(state, slot, Newest.TAKEN, is_eos_masked=number < min_tokens)
                    for number in range(num_drawn, num_drawn + num_next)
                )
                row = Row(context, context.append(num_next))
                newest = yield Request(row, slot, draws[0]) if num_next == 1 else Chain(row, slot, draws)
                num_drawn += num_next
            else:
                yield Settle(unread.draws[-1])
            for drawn, hidden in zip(unread.draws, unread.states[-len(unread.draws) :], strict=True):
                token = drawn.read()
                steps.append(CodecStep(token, hidden, token == self._eos))
                if token == self._eos or len(steps) > MAX_CHUNK_TOKENS:
                    num_void = num_drawn - len(steps)
                    context.retract(num_void)
                    state.num_draws -= num_void
                    return steps

    def _make_room(self, context: Context, num_tokens: int) -> None:
        """Drop the turn's oldest chunks until the next one fits into the positions the talker was trained on."""
        limit = self.max_context_tokens - num_tokens
        window = BasicWindow(high_tokens=limit, low_tokens=limit - 1)
        plan = window.plan(context.num_tokens, context.units, ())
        if plan is not None:
            context.slide(plan)


def _draw(state: TalkerState, slot: DrawSlot, newest: Newest, *, is_eos_masked: bool) -> CodecDraw:
    session = state.session
    sampling = session.sampling
    if newest is Newest.FORGOTTEN:
        sampling = replace(sampling, top_p=1.0, top_k=ALL_TOKENS)
    draw = CodecDraw(
        sampling=sampling,
        draws=session.draws,
        place=DrawPlace(slot, newest, session.sampling.repetition_window_tokens),
        is_eos_masked=is_eos_masked,
        seed=session.seed,
        counter=state.num_draws,
    )
    state.num_draws += 1
    return draw
