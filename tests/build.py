"""Real objects for tests, made cheaply. Fixtures that last a session are in `conftest.py`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from antiphon.config import SessionConfig
from antiphon.core.duplex import DuplexConfig
from antiphon.core.messages import Address, HeardUnit
from antiphon.core.sampling import Draws, TextSampling
from antiphon.core.window import BasicWindow, SlideMode
from antiphon.engine import Call, Engine
from antiphon.errors import AntiphonError, ResourceExhausted
from antiphon.kernels.beside import Beside
from antiphon.kernels.transfer import Download
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.flow import NUM_FLOW_STEPS
from antiphon.models.minicpmo.flow_cache import FlowShape
from antiphon.models.minicpmo.flow_membership import Retention
from antiphon.models.minicpmo.model import Model, Section, load_model
from antiphon.models.minicpmo.prompt import PromptText
from antiphon.models.minicpmo.speech_arena import ArenaSize, SpeechArena
from antiphon.models.minicpmo.tokens import TextTokenizer
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.draw_table import DrawSlot
from antiphon.stages.paged import CacheConfig
from antiphon.stages.stepping import StepLoop, Steps
from antiphon.stages.thinker.decider import Decider
from antiphon.stages.thinker.rebuild import Retained
from antiphon.stages.thinker.senses import Senses
from antiphon.stages.thinker.stage import PromptLimits, ThinkerStage, ThinkerState
from antiphon.stages.thinker.state import ThinkerSession, UnitInput, UnitOutcome
from antiphon.units import MEL_FRAMES_PER_CODEC_TOKEN, UNIT_SAMPLES

DrawT = TypeVar("DrawT")
ResultT = TypeVar("ResultT")

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_CHECKPOINT = GOLDEN / "endtoend" / "checkpoint"
CPU = torch.device("cpu")
VOICED_PROMPT = PromptText("<|im_start|>system\nTalk.\n<|audio_start|>", "<|audio_end|><|im_end|>")
SESSION = ThinkerSession(
    session_id="call",
    prompt=PromptText("Talk.", ""),
    reference=torch.empty(0),
    window=BasicWindow(high_tokens=150, low_tokens=90),
    slide=SlideMode.ROTATE_QUERY,
    max_pictures=0,
    max_slices=1,
    max_text_tokens=0,
    duplex=DuplexConfig(num_forced_listens=1),
    sampling=TextSampling(),
    draws=Draws.SAMPLED,
    seed=0,
    keeps_inputs=False,
    deadline_s=0.0,
)
"""A caller without a voice to be like, pictures or text."""

Tensors = dict[str, Tensor]


def model(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    """The model of a checkpoint, on the CPU."""
    return load_model(open_checkpoint(folder), dict.fromkeys(Section, CPU), dtype)


def copied_checkpoint(original: Path, folder: Path) -> Path:
    """A checkpoint of one's own, to be damaged."""
    shutil.copytree(original, folder)
    return folder


def edit_main(folder: Path, edit: Callable[[Tensors], object]) -> None:
    """Change the tensors of a checkpoint's `model.safetensors`."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def edit_pickle(file: Path, edit: Callable[[Tensors], object]) -> None:
    """Change the tensors of a file of `torch.save`."""
    tensors: Tensors = torch.load(file, weights_only=True)
    edit(tensors)
    torch.save(tensors, file)


def voice(engine: Engine, num_tokens: int = 30, seed: int = 1) -> VoicePrompt:
    """A voice of random numbers, `num_tokens` codec tokens long."""
    generator = torch.Generator().manual_seed(seed)
    mel = torch.randn(MEL_FRAMES_PER_CODEC_TOKEN * num_tokens, engine.model.flow.num_mel_bins, generator=generator)
    return VoicePrompt(tuple(range(num_tokens)), mel, torch.randn(192, generator=generator))


def second(seed: int) -> UnitInput:
    """A second of quiet noise without pictures."""
    return UnitInput(0.05 * torch.randn(UNIT_SAMPLES, generator=torch.Generator().manual_seed(seed)), ())


def senses(model: Model, tokenizer: TextTokenizer) -> Senses:
    return Senses(model.thinker, tokenizer.special, model.audio, model.vision, Beside(CPU, 0))


def speech_arena(model: Model) -> SpeechArena:
    """Room for two turns with voices of up to 2 s."""
    shape = FlowShape(model.config.flow, NUM_FLOW_STEPS)
    size = ArenaSize.for_turns(Retention.REFERENCE, voice_frames=100, max_speaking=2, largest_batch=1)
    return SpeechArena(shape, Retention.REFERENCE, size, torch.float32, CPU)


def decider(model: Model, tokenizer: TextTokenizer, num_blocks: int) -> Decider:
    return Decider(model.thinker, tokenizer, CacheConfig(num_blocks))


def thinker_stage(model: Model, tokenizer: TextTokenizer, decider: Decider) -> ThinkerStage:
    """A stage of its own. Prompts of at most 300 tokens; they are not kept once their users have gone."""
    limits = PromptLimits(300, is_shared=True, max_stored_bytes=0)
    return ThinkerStage(senses(model, tokenizer), decider, tokenizer, limits)


def opened(stage: ThinkerStage, settings: ThinkerSession | Retained) -> ThinkerState:
    """A session whose prompt is in the cache. Raises: why it cannot be; nothing is left of it then."""
    state = stage.open_call(settings)
    while True:
        end = stage.step().get(state.session.session_id)
        if isinstance(end, AntiphonError):
            stage.close(state)
            raise end
        if end is not None:
            return state


def hear(stage: ThinkerStage, state: ThinkerState, heard: UnitInput) -> UnitOutcome:
    """One second of the only session that is at work. Raises: what it fails with."""
    stage.start(state, HeardUnit(Address(state.session.session_id, 0, 0, 0), 0.0, heard))
    while True:
        for end in stage.step().values():
            if isinstance(end, AntiphonError):
                raise end
            assert isinstance(end, UnitOutcome), f"no unit: {end}"
            return end


def until_full(engine: Engine, session: SessionConfig, voice: VoicePrompt) -> Iterator[Call]:
    """Calls without a voice in the prompt, opened until the engine takes no more."""
    for number in count():
        try:
            yield engine.open(f"caller {number}", session, torch.empty(0), voice)
        except ResourceExhausted:
            return


class NoDraws:
    """A chooser for work that draws nothing."""

    def choose(self, states: Tensor, draws: Sequence[object]) -> Download:
        raise AssertionError(f"{len(draws)} draws from {tuple(states.shape)}")

    def embed_drawn(self, slots: Sequence[DrawSlot]) -> Tensor:
        raise AssertionError(f"{len(slots)} drawn tokens are fed")


def run_alone(loop: StepLoop[DrawT, ResultT], steps: Steps[DrawT, ResultT]) -> ResultT:
    """The result of a session's work. Raises: what it fails with."""
    return loop.run("alone", steps, deadline_s=0.0)


def run_together(
    loop: StepLoop[DrawT, ResultT], works: Iterable[tuple[str, Steps[DrawT, ResultT]]]
) -> dict[str, ResultT | AntiphonError]:
    """What the work of each session came to, all in common steps."""
    for session_id, steps in works:
        loop.add(session_id, steps, deadline_s=0.0)
    ended: dict[str, ResultT | AntiphonError] = {}
    while not loop.is_idle:
        ended |= {finished.session_id: finished.result for finished in loop.step()}
    return ended
