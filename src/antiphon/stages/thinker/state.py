"""What the thinker is asked and answers for one session."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from antiphon.core.context import Slide
from antiphon.core.duplex import DuplexConfig
from antiphon.core.messages import Handoff
from antiphon.core.sampling import Draws, TextSampling
from antiphon.core.window import SlideMode, WindowPolicy
from antiphon.models.minicpmo.prompt import PromptText


@dataclass(frozen=True, slots=True)
class ThinkerSession:
    """Settings of a session, fully decided.

    reference: [n] float32 on the host, 16 kHz, the voice in the prompt; n = 0 for none.
    max_pictures: in one unit. max_slices: items that a picture may be cut into besides the view; 1 for none.
    seed: of its text draws.
    """

    session_id: str
    prompt: PromptText
    reference: Tensor
    window: WindowPolicy
    slide: SlideMode
    max_pictures: int
    max_slices: int
    duplex: DuplexConfig
    sampling: TextSampling
    draws: Draws
    seed: int


@dataclass(frozen=True, slots=True)
class UnitInput:
    """One second of a call.

    samples: [UNIT_SAMPLES] float32 on the host, 16 kHz.
    pictures: RGB, in the order in which they were taken.
    """

    samples: Tensor
    pictures: tuple[Image.Image, ...]


@dataclass(frozen=True, slots=True)
class PromptDone:
    """A session's prompt is in its context."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class UnitOutcome:
    """What one unit came to.

    token_ids: all tokens after the unit's input, terminator and `</unit>` included.
    handoffs: for the talker, one per turn that spoke in this unit.
    text: what can be shown of the words so far, whole characters only.
    slide: None when nothing was dropped.
    num_context_tokens, retained_units, previous_ids: after the slide.
    """

    unit: int
    token_ids: tuple[int, ...]
    is_listen: bool
    handoffs: tuple[Handoff[Tensor], ...]
    text: str
    slide: Slide | None
    num_context_tokens: int
    retained_units: tuple[int, ...]
    previous_ids: tuple[int, ...]
