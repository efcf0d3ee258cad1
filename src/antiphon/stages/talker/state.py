"""What the talker keeps for one session."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.core.context import Context
from antiphon.core.sampling import CodecSampling, Draws
from antiphon.models.minicpmo.captured import NumRuns
from antiphon.stages.draw_table import DrawSlot, Newest
from antiphon.stages.stepping import Drawn


@dataclass(frozen=True, slots=True)
class TalkerSession:
    """Settings of a session. seed: of its codec draws. is_chat: it says all of a handoff, however long that takes."""

    session_id: str
    sampling: CodecSampling
    draws: Draws
    seed: int
    is_chat: bool = False


@dataclass(slots=True, eq=False)
class Saying:
    """What a chat's answer is at, from its first handoff to its end.

    slot, newest: of its draws, all of them in one history.
    drawn: the next codec token, if more is to come of the handoff.
    ends_turn: of the handoff. num_tokens: codec tokens that were said of it.
    """

    slot: DrawSlot
    newest: Newest = Newest.FORGOTTEN
    drawn: Drawn | None = None
    ends_turn: bool = False
    num_tokens: int = 0


@dataclass(slots=True)
class TalkerState:
    """Owned by TalkerStage.

    context: the turn so far; units of it are chunks. Empty between turns.
    num_draws: draws made in the session, which number the next one.
    num_chunks: chunks of the session, which number the next one.
    saying: of a chat, while its answer is spoken.
    """

    session: TalkerSession
    context: Context
    num_draws: int = 0
    num_chunks: int = 0
    saying: Saying | None = None


@dataclass(frozen=True, slots=True)
class TalkerCounts:
    """num_waiting: sessions that want to speak and find no room. num_rooms: calls' turns that would still fit.

    num_runs: of steps and draws; what is launched on a GPU was not recorded at start.
    """

    num_waiting: int
    num_rooms: int
    num_runs: NumRuns
