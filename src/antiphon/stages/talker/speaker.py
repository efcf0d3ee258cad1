"""From spoken tokens and their hidden states to codec tokens, as generators for common steps.

Source: REFERENCE 8; in chats 14.5. Shown by tests/stages/test_talker.py and the golden kind talker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from antiphon.core.context import Context
from antiphon.core.messages import CodecChunk, GoOn, Handoff
from antiphon.core.sampling import ALL_TOKENS
from antiphon.core.window import BasicWindow
from antiphon.kernels.transfer import upload
from antiphon.models.minicpmo.talker import TalkerNetwork
from antiphon.stages.draw_table import DrawPlace, DrawSlot, Newest
from antiphon.stages.paged import CacheConfig, PagedDecoder
from antiphon.stages.step_packing import Row
from antiphon.stages.stepping import Request, Settle, StepLoop, Steps
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


class Speaker:
    """Owns the talker's cache, its draws and the unfinished work of its sessions."""

    def __init__(self, network: TalkerNetwork, cache: CacheConfig) -> None:
        weight = network.emb_text.weight
        self._network = network
        self._device = weight.device
        self._eos = network.config.num_codec_tokens - 1
        self.decoder = PagedDecoder(network, network.config.decoder, cache, weight.device, weight.dtype)
        self.chooser = CodecChooser(network)
        self.loop: StepLoop[CodecDraw, CodecChunk] = StepLoop(self.decoder, self.chooser)

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
        while True:
            drawn, hidden = newest.drawn, newest.states[-1]
            assert drawn is not None, "a draw was asked for"
            is_last = len(steps) == MAX_CHUNK_TOKENS
            if is_last:
                yield Settle(drawn)
            else:
                # Fed before it is read: an EOS costs this row, which is taken back.
                draw = _draw(state, slot, Newest.TAKEN, is_eos_masked=len(steps) + 1 < min_tokens)
                newest = yield Request(Row(context, context.append(1)), slot, draw)
            token = drawn.read()
            steps.append(CodecStep(token, hidden, token == self._eos))
            if is_last:
                return steps
            if token == self._eos:
                context.retract(1)
                state.num_draws -= 1
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
