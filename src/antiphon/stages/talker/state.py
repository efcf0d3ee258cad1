"""What the talker keeps for one session."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.core.context import Context
from antiphon.core.sampling import CodecSampling, Draws


@dataclass(frozen=True, slots=True)
class TalkerSession:
    """Settings of a session. seed: of its codec draws."""

    session_id: str
    sampling: CodecSampling
    draws: Draws
    seed: int


@dataclass(slots=True)
class TalkerState:
    """Owned by TalkerStage.

    context: the turn so far; units of it are chunks. Empty between turns.
    num_draws: draws made in the session, which number the next one.
    num_chunks: chunks of the session, which number the next one.
    """

    session: TalkerSession
    context: Context
    num_draws: int = 0
    num_chunks: int = 0


@dataclass(frozen=True, slots=True)
class TalkerCounts:
    """num_waiting: sessions that want to speak and find no room. num_rooms: turns that would still fit."""

    num_waiting: int
    num_rooms: int
