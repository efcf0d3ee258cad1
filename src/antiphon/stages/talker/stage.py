"""The talker: handoffs in, codec chunks out, several sessions in one step. Waveforms are code2wav's.

What is said is made in `speaker.py`; here is who speaks. Shown by tests/stages/test_talker.py.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.core.admission import Admission
from antiphon.core.context import Context
from antiphon.core.messages import CodecChunk, GoOn, Handoff
from antiphon.core.window import SlideMode
from antiphon.errors import AntiphonError
from antiphon.models.minicpmo.talker import TalkerNetwork
from antiphon.stages.loop import Ready
from antiphon.stages.paged import CacheConfig
from antiphon.stages.talker.speaker import Speaker, SpeakerSteps
from antiphon.stages.talker.state import TalkerCounts, TalkerSession, TalkerState


def turn_cache(max_position_tokens: int, block_size: int = 16) -> CacheConfig:
    """What one turn may need."""
    return CacheConfig.for_tokens(max_position_tokens, num_segments=1, block_size=block_size)


class TalkerStage:
    """Owns the talker's sessions, and who of them may speak.

    A session holds room for a whole turn from its first handoff to its turn's end; who finds none waits for it. Chats
    have rooms of their own, so that no call waits for a chat.
    """

    def __init__(
        self, network: TalkerNetwork, cache: CacheConfig, num_chat_rooms: int = 0, chain_steps: int = 1
    ) -> None:
        """cache: one that holds a call's turn of full length at least, besides `num_chat_rooms` of chats.

        chain_steps: as of `Speaker`.
        """
        self.speaker = Speaker(network, cache, chain_steps)
        self._turn_blocks = turn_cache(network.config.max_position_tokens, cache.block_size).num_blocks
        num_chat_blocks = num_chat_rooms * self._turn_blocks
        self._room = Admission(cache.num_blocks - num_chat_blocks)
        self._chat_room = Admission(num_chat_blocks)
        self._waiting: dict[
            str, tuple[TalkerState, Handoff[Tensor] | GoOn]
        ] = {}  # in order; they may have found no room
        self._opened: dict[str, Ready[None]] = {}

    def open(self, session: TalkerSession) -> TalkerState:
        """A fresh session; it holds no block until it speaks."""
        context = Context(self.speaker.decoder.pool, SlideMode.ROTATE_QUERY, self.speaker.max_context_tokens)
        self._opened[session.session_id] = Ready(None)
        return TalkerState(session, context)

    def start(self, state: TalkerState, work: Handoff[Tensor] | GoOn) -> None:
        """Speak a handoff, or go on with it; `step` returns its chunk."""
        self._waiting[state.session.session_id] = (state, work)

    @property
    def is_idle(self) -> bool:
        return not self._opened and self.speaker.loop.is_idle and not self._who_fits()

    def step(self) -> dict[str, Ready[None] | CodecChunk | AntiphonError]:
        """One forward pass for the most urgent sessions."""
        ended: dict[str, Ready[None] | CodecChunk | AntiphonError] = {**self._opened}
        self._opened.clear()
        while session_id := self._who_fits():
            state, work = self._waiting.pop(session_id)
            if not self._room_of(state).is_admitted(session_id):
                self._room_of(state).admit({session_id: self._turn_blocks})
            self.speaker.loop.add(session_id, self._speak(state, work), work.deadline_s)
        for finished in self.speaker.loop.step():
            ended[finished.session_id] = finished.result
            if isinstance(finished.result, CodecChunk) and finished.result.ends_turn:
                self._leave_room(finished.session_id)
        return ended

    def interrupt(self, state: TalkerState, epoch: int) -> None:
        """Forget the session's turn; it may speak again."""
        session_id = state.session.session_id
        self._waiting.pop(session_id, None)
        self.speaker.loop.cancel(session_id)
        self.speaker.forget(state)
        self._leave_room(session_id)

    def close(self, state: TalkerState) -> None:
        """Stop the session's work and give its blocks back; idempotent."""
        self._opened.pop(state.session.session_id, None)
        self.interrupt(state, epoch=0)

    def survey(self) -> TalkerCounts:
        num_rooms = self._room.num_free_blocks // self._turn_blocks
        return TalkerCounts(len(self._waiting), num_rooms, self.speaker.num_runs)

    def _speak(self, state: TalkerState, work: Handoff[Tensor] | GoOn) -> SpeakerSteps[CodecChunk]:
        if isinstance(work, GoOn):
            return self.speaker.say_more(state, work)
        return self.speaker.say(state, work) if state.session.is_chat else self.speaker.speak(state, work)

    def _who_fits(self) -> str:
        """The most urgent session that waits and has or finds room; "" for none."""
        by_urgency = sorted(self._waiting.items(), key=lambda entry: entry[1][1].deadline_s)
        return next((key for key, (state, _) in by_urgency if self._fits(key, self._room_of(state))), "")

    def _fits(self, session_id: str, room: Admission) -> bool:
        return room.num_free_blocks >= self._turn_blocks or room.is_admitted(session_id)

    def _room_of(self, state: TalkerState) -> Admission:
        return self._chat_room if state.session.is_chat else self._room

    def _leave_room(self, session_id: str) -> None:
        for room in (self._room, self._chat_room):
            room.leave(session_id)
