"""The talker: handoffs in, codec chunks out, several sessions in one step. Waveforms are code2wav's.

What is said is made in `speaker.py`; here is who speaks. Shown by tests/stages/test_talker.py.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.core.admission import Admission
from antiphon.core.context import Context
from antiphon.core.messages import CodecChunk, Handoff
from antiphon.core.window import SlideMode
from antiphon.errors import AntiphonError
from antiphon.models.minicpmo.talker import TalkerNetwork
from antiphon.stages.loop import Ready
from antiphon.stages.paged import CacheConfig
from antiphon.stages.talker.speaker import Speaker
from antiphon.stages.talker.state import TalkerCounts, TalkerSession, TalkerState


def turn_cache(max_position_tokens: int, block_size: int = 16) -> CacheConfig:
    """What one turn may need."""
    return CacheConfig.for_tokens(max_position_tokens, num_segments=1, block_size=block_size)


class TalkerStage:
    """Owns the talker's sessions, and who of them may speak.

    A session holds room for a whole turn from its first handoff to its turn's end; who finds none waits for it.
    """

    def __init__(self, network: TalkerNetwork, cache: CacheConfig) -> None:
        """cache: one that holds a turn of full length at least."""
        self.speaker = Speaker(network, cache)
        self._turn_blocks = turn_cache(network.config.max_position_tokens, cache.block_size).num_blocks
        self._room = Admission(cache.num_blocks)
        self._waiting: dict[str, tuple[TalkerState, Handoff[Tensor]]] = {}  # in order; they may have found no room
        self._opened: dict[str, Ready[None]] = {}

    def open(self, session: TalkerSession) -> TalkerState:
        """A fresh session; it holds no block until it speaks."""
        context = Context(self.speaker.decoder.pool, SlideMode.ROTATE_QUERY, self.speaker.max_context_tokens)
        self._opened[session.session_id] = Ready(None)
        return TalkerState(session, context)

    def start(self, state: TalkerState, handoff: Handoff[Tensor]) -> None:
        """Speak a handoff; `step` returns its chunk."""
        self._waiting[state.session.session_id] = (state, handoff)

    @property
    def is_idle(self) -> bool:
        return not self._opened and self.speaker.loop.is_idle and not self._who_fits()

    def step(self) -> dict[str, Ready[None] | CodecChunk | AntiphonError]:
        """One forward pass for the most urgent sessions."""
        ended: dict[str, Ready[None] | CodecChunk | AntiphonError] = {**self._opened}
        self._opened.clear()
        while session_id := self._who_fits():
            state, handoff = self._waiting.pop(session_id)
            if not self._room.is_admitted(session_id):
                self._room.admit({session_id: self._turn_blocks})
            self.speaker.loop.add(session_id, self.speaker.speak(state, handoff), handoff.deadline_s)
        for finished in self.speaker.loop.step():
            ended[finished.session_id] = finished.result
            if isinstance(finished.result, CodecChunk) and finished.result.ends_turn:
                self._room.leave(finished.session_id)
        return ended

    def interrupt(self, state: TalkerState, epoch: int) -> None:
        """Forget the session's turn; it may speak again."""
        session_id = state.session.session_id
        self._waiting.pop(session_id, None)
        self.speaker.loop.cancel(session_id)
        state.context.free()
        self._room.leave(session_id)

    def close(self, state: TalkerState) -> None:
        """Stop the session's work and give its blocks back; idempotent."""
        self._opened.pop(state.session.session_id, None)
        self.interrupt(state, epoch=0)

    def survey(self) -> TalkerCounts:
        return TalkerCounts(len(self._waiting), self._room.num_free_blocks // self._turn_blocks)

    def _who_fits(self) -> str:
        """The most urgent session that waits and has or finds room; "" for none."""
        by_urgency = sorted(self._waiting.items(), key=lambda entry: entry[1][1].deadline_s)
        has_room = self._room.num_free_blocks >= self._turn_blocks
        return next((key for key, _ in by_urgency if has_room or self._room.is_admitted(key)), "")
