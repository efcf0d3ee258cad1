"""What the thinker is asked and answers for one session."""

from __future__ import annotations

from dataclasses import dataclass, replace

from PIL import Image
from torch import Tensor

from antiphon.core.chat import AnswerConfig, AnswerEnd
from antiphon.core.context import Slide
from antiphon.core.duplex import DuplexConfig, Wish
from antiphon.core.messages import Handoff
from antiphon.core.prompts import PromptCounts
from antiphon.core.sampling import Draws, TextSampling
from antiphon.core.window import SlideMode, WindowPolicy
from antiphon.models.minicpmo.captured import NumRuns
from antiphon.models.minicpmo.chat_prompt import ChatPrompt
from antiphon.models.minicpmo.prompt import PromptText


@dataclass(frozen=True, slots=True)
class ThinkerSession:
    """Settings of a session, fully decided.

    reference: [n] float32 on the host, 16 kHz, the voice in the prompt; n = 0 for none.
    max_pictures, max_text_tokens: in one unit.
    max_slices: items that a picture may be cut into besides the view; 1 for none.
    seed: of its text draws. deadline_s: when its caller should be able to speak, on the engine's clock.
    keeps_inputs: the input embeddings of its units are kept as long as the units are, so that it can be moved.
    script: as in `UnitDraw`.
    """

    session_id: str
    prompt: PromptText
    reference: Tensor
    window: WindowPolicy
    slide: SlideMode
    max_pictures: int
    max_slices: int
    max_text_tokens: int
    duplex: DuplexConfig
    sampling: TextSampling
    draws: Draws
    seed: int
    keeps_inputs: bool
    deadline_s: float
    script: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class UnitInput:
    """One second of a call.

    samples: [UNIT_SAMPLES] float32 on the host, 16 kHz.
    pictures: RGB, in the order in which they were taken.
    text_ids: what was typed, plain text; it is read after the sound.
    wish: what is wanted of the unit.
    """

    samples: Tensor
    pictures: tuple[Image.Image, ...]
    text_ids: tuple[int, ...] = ()
    wish: Wish = Wish.FREE


@dataclass(frozen=True, slots=True, eq=False)
class ChatSession:
    """A chat's settings, fully decided. sampling: of its listen rules and turns nothing is used.

    seed: of its text draws. deadline_s: of all of it, on the engine's clock; behind those of calls.
    """

    session_id: str
    prompt: ChatPrompt
    answer: AnswerConfig
    sampling: TextSampling
    draws: Draws
    seed: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class PieceOutcome:
    """What one piece of a chat's answer came to.

    text: what can be shown more of it, whole characters only. num_tokens: of the answer so far.
    end: why it is over; None if it goes on.
    handoffs: for the talker, one if the answer is spoken and something is to be said; the last one ends the turn.
    """

    text: str
    num_tokens: int
    end: AnswerEnd | None
    handoffs: tuple[Handoff[Tensor], ...]


@dataclass(frozen=True, slots=True)
class PromptDone:
    """A session's prompt is in its context."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptReady:
    """A session can hear. is_hit: another session's prompt could be used. max_tokens: its context never holds more."""

    num_tokens: int
    max_tokens: int
    is_hit: bool


@dataclass(frozen=True, slots=True)
class UnitOutcome:
    """What one unit came to.

    token_ids: all tokens after the unit's input, terminator and `</unit>` included.
    handoffs: for the talker, one per turn that spoke in this unit.
    texts: for each handoff, what can be shown of the words so far, whole characters only.
    slide: None when nothing was dropped.
    num_context_tokens, num_context_blocks, retained_units, previous_ids: after the slide. Units are numbered without a
    gap, and the newest are retained.
    """

    unit: int
    token_ids: tuple[int, ...]
    is_listen: bool
    handoffs: tuple[Handoff[Tensor], ...]
    texts: tuple[str, ...]
    slide: Slide | None
    num_context_tokens: int
    num_context_blocks: int
    retained_units: range
    previous_ids: tuple[int, ...]

    def only_of(self, epoch: int) -> UnitOutcome:
        """Without what is for the talker and belongs to another epoch."""
        said = [*zip(self.handoffs, self.texts, strict=True)]
        own = [(handoff, text) for handoff, text in said if handoff.address.epoch == epoch]
        return replace(self, handoffs=tuple(one for one, _ in own), texts=tuple(text for _, text in own))


@dataclass(frozen=True, slots=True)
class ThinkerCounts:
    """num_free_blocks: hold nothing. num_unreserved_blocks: promised to nobody. block_bytes: keys and values of one.

    num_runs: of steps, draws, ears and eyes; what is launched on a GPU was not recorded at start.
    """

    prompts: PromptCounts
    num_blocks: int
    num_free_blocks: int
    num_unreserved_blocks: int
    block_bytes: int
    num_runs: NumRuns
