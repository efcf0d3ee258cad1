"""What the parts of a call tell each other. Frozen; `session_id, epoch, turn, seq` say where a message belongs.

Tensors are opaque here: `HiddenT` is the engine's tensor type. The order is UnitInput → Handoff → CodecChunk → Speech.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

HiddenT = TypeVar("HiddenT")


@dataclass(frozen=True, slots=True)
class Address:
    """epoch: counts interruptions. turn: counts spoken answers. seq: counts messages of this kind in the session."""

    session_id: str
    epoch: int
    turn: int
    seq: int


@dataclass(frozen=True, slots=True)
class Handoff(Generic[HiddenT]):
    """Thinker to talker: what to say in this unit.

    hidden: [len(token_ids), hidden_size], the thinker's final-norm state at each token's own position.
    """

    address: Address
    unit: int
    token_ids: tuple[int, ...]
    hidden: HiddenT
    ends_turn: bool


@dataclass(frozen=True, slots=True)
class CodecChunk:
    """Talker to code2wav. is_first_of_turn: code2wav speaks at once instead of waiting for a full window."""

    address: Address
    unit: int
    codec_tokens: tuple[int, ...]
    is_first_of_turn: bool
    ends_turn: bool
