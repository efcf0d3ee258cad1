"""Real objects for tests, made cheaply. Fixtures that last a session are in `conftest.py`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from antiphon.config import SessionConfig
from antiphon.engine import Call, Engine
from antiphon.errors import AntiphonError, ResourceExhausted
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.flow_cache import Voice
from antiphon.models.minicpmo.model import Model, load_model
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.stepping import StepLoop, Steps
from antiphon.stages.thinker.state import UnitInput
from antiphon.units import MEL_FRAMES_PER_CODEC_TOKEN, UNIT_SAMPLES

DrawT = TypeVar("DrawT")
ChoiceT = TypeVar("ChoiceT")
ResultT = TypeVar("ResultT")

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_CHECKPOINT = GOLDEN / "endtoend" / "checkpoint"
CPU = torch.device("cpu")

Tensors = dict[str, Tensor]


def model(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    """The model of a checkpoint, on the CPU."""
    return load_model(open_checkpoint(folder), CPU, dtype)


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


def voice(engine: Engine, num_tokens: int = 30, seed: int = 1) -> Voice:
    """A voice of random numbers, `num_tokens` codec tokens long."""
    generator = torch.Generator().manual_seed(seed)
    mel = torch.randn(MEL_FRAMES_PER_CODEC_TOKEN * num_tokens, engine.num_mel_bins, generator=generator)
    return engine.build_voice(VoicePrompt(tuple(range(num_tokens)), mel, torch.randn(192, generator=generator)))


def second(seed: int) -> UnitInput:
    """A second of quiet noise without pictures."""
    return UnitInput(0.05 * torch.randn(UNIT_SAMPLES, generator=torch.Generator().manual_seed(seed)), ())


def until_full(engine: Engine, session: SessionConfig, voice: Voice) -> Iterator[Call]:
    """Calls without a voice in the prompt, opened until the engine takes no more."""
    for number in count():
        try:
            yield engine.open(f"caller {number}", session, torch.empty(0), voice)
        except ResourceExhausted:
            return


def run_alone(loop: StepLoop[DrawT, ChoiceT, ResultT], steps: Steps[DrawT, ChoiceT, ResultT]) -> ResultT:
    """The result of a session's work. Raises: what it fails with."""
    return loop.run("alone", steps, deadline_s=0.0)


def run_together(
    loop: StepLoop[DrawT, ChoiceT, ResultT], works: Iterable[tuple[str, Steps[DrawT, ChoiceT, ResultT]]]
) -> dict[str, ResultT | AntiphonError]:
    """What the work of each session came to, all in common steps."""
    for session_id, steps in works:
        loop.add(session_id, steps, deadline_s=0.0)
    ended: dict[str, ResultT | AntiphonError] = {}
    while not loop.is_idle:
        ended |= {finished.session_id: finished.result for finished in loop.step()}
    return ended
