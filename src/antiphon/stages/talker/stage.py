"""The talker: spoken tokens and their hidden states in, codec tokens out. Waveforms are code2wav's.

Source: REFERENCE 8. Shown by tests/stages/test_talker.py and the golden kind talker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.core.context import Context
from antiphon.core.messages import CodecChunk, Handoff
from antiphon.core.sampling import Draws
from antiphon.core.window import BasicWindow, SlideMode
from antiphon.kernels.sampling.contract import CodecRules
from antiphon.kernels.sampling.op import sample_codec
from antiphon.models.minicpmo.talker import TalkerNetwork
from antiphon.stages.paged import CacheConfig, PagedDecoder, Row
from antiphon.stages.talker.state import TalkerSession, TalkerState

MAX_CHUNK_TOKENS = 25
"""Codec tokens in one second of speech. The reference samples one more and drops it (REFERENCE 8.2)."""


@dataclass(frozen=True, slots=True)
class CodecStep:
    """One sampled codec token. hidden: [hidden], the state it was drawn from. is_eos: it ends the segment."""

    token: int
    hidden: Tensor
    is_eos: bool


class TalkerStage:
    """Owns the talker's states and cache. Single calls for now: one session advances at a time."""

    def __init__(self, network: TalkerNetwork, cache: CacheConfig) -> None:
        weight = network.emb_text.weight
        self._network = network
        self._device = weight.device
        self._eos = network.config.num_codec_tokens - 1
        self.decoder = PagedDecoder(network, network.config.decoder, cache, weight.device, weight.dtype)

    def open(self, session: TalkerSession) -> TalkerState:
        """A fresh session; it holds no block until it speaks."""
        max_tokens = self._network.config.max_position_tokens
        return TalkerState(session, Context(self.decoder.pool, SlideMode.ROTATE_QUERY, max_tokens))

    def close(self, state: TalkerState) -> None:
        """Give the session's blocks back; idempotent."""
        state.context.free()

    def speak(self, state: TalkerState, handoff: Handoff[Tensor]) -> CodecChunk:
        """The codec tokens of one handoff.

        handoff.hidden: [n, llm_hidden]; n = 0 is a unit that only goes on with the turn.
        Raises: ResourceExhausted; the turn's context is as before then.
        """
        is_first_of_turn = state.context.num_tokens == 0
        condition = self._network.condition(self._ids(handoff.token_ids), handoff.hidden)
        # The first and the last chunk of a turn may be short; one in between fills its second.
        may_end = is_first_of_turn or handoff.ends_turn
        steps = self.steps(state, condition, min_tokens=0 if may_end else MAX_CHUNK_TOKENS + 1)
        tokens = [step.token for step in steps if not step.is_eos][:MAX_CHUNK_TOKENS]
        state.num_chunks += 1
        if handoff.ends_turn:
            state.context.free()
        return CodecChunk(handoff.address, handoff.unit, tuple(tokens), is_first_of_turn, handoff.ends_turn)

    def steps(self, state: TalkerState, condition: Tensor, *, min_tokens: int) -> Iterator[CodecStep]:
        """Sample until EOS or until one token more than a chunk holds; that one is not fed.

        condition: [m, hidden].
        min_tokens: EOS is impossible before so many tokens.
        """
        context = state.context
        self._make_room(context, condition.shape[0] + MAX_CHUNK_TOKENS)
        hidden = self._feed(context, condition)
        chunk: list[int] = []
        while True:
            token = self._sample(state, hidden, chunk, is_eos_masked=len(chunk) < min_tokens)
            yield CodecStep(token, hidden, token == self._eos)
            if token == self._eos or len(chunk) == MAX_CHUNK_TOKENS:
                break
            chunk.append(token)
            hidden = self._feed(context, self._network.embed_codes(self._ids((token,))))
        context.close_unit(state.num_chunks, ())

    def _make_room(self, context: Context, num_tokens: int) -> None:
        """Drop the turn's oldest chunks until the next one fits into the positions the talker was trained on."""
        limit = self._network.config.max_position_tokens - num_tokens
        window = BasicWindow(high_tokens=limit, low_tokens=limit - 1)
        plan = window.plan(context.num_tokens, context.units, ())
        if plan is not None:
            context.slide(plan)

    def _feed(self, context: Context, embeds: Tensor) -> Tensor:
        placement = context.append(embeds.shape[0])
        return self.decoder.run([Row(context, placement, embeds)])[-1]

    def _sample(self, state: TalkerState, hidden: Tensor, chunk: list[int], *, is_eos_masked: bool) -> int:
        sampling = state.session.sampling
        newest = chunk[-sampling.repetition_window_tokens :]
        rules = CodecRules(
            history=self._ids(tuple(newest))[None],
            repetition_penalty=torch.tensor([sampling.repetition_penalty], device=self._device),
            temperature=torch.tensor([sampling.temperature], device=self._device),
            is_eos_masked=torch.tensor([is_eos_masked], device=self._device),
            is_greedy=torch.tensor([state.session.draws is Draws.MOST_LIKELY], device=self._device),
            seeds=self._ids((state.session.seed,)),
            counters=self._ids((state.num_draws,)),
        )
        state.num_draws += 1
        return int(sample_codec(self._network.logits(hidden[None]), rules))

    def _ids(self, ids: tuple[int, ...]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)
