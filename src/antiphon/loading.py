"""A checkpoint and settings to an engine that runs, with all that whoever serves its calls needs of the checkpoint.

Shown by tests/server/test_run.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from antiphon.config import EngineConfig, SessionConfig
from antiphon.engine import Engine
from antiphon.live import LiveEngine
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.tokens import PREVIOUS_MARKER, load_tokenizer
from antiphon.voices import VoiceBook


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """session: whose need the caches are sized for. marker: ids in front of `previous` text.

    is_tiny: the weights are random, and what they say is noise.
    """

    live: LiveEngine
    voices: VoiceBook
    session: SessionConfig
    marker: tuple[int, ...]
    is_tiny: bool


@contextmanager
def running_engine(
    model: str,
    config: EngineConfig,
    session: Callable[[tuple[int, ...]], SessionConfig],
    say: Callable[[str], None],
) -> Iterator[Running]:
    """An engine as long as the context lasts.

    model: folder or hub id. session: given the marker's ids. say: is told how far loading is.
    Raises: CheckpointError, ConfigError.
    """
    started_s = time.perf_counter()
    say(f"opening {model}")
    checkpoint = open_checkpoint(model)
    voices = VoiceBook(checkpoint)
    marker = tuple(load_tokenizer(checkpoint.folder).encode(PREVIOUS_MARKER))
    wanted = session(marker)
    if checkpoint.is_tiny:
        say("THE TINY CHECKPOINT HAS RANDOM WEIGHTS: WHAT IT SAYS IS NOISE")
        torch.set_num_threads(1)  # its tensors are so small that sharing one costs more than it saves
    stages = config.stages
    devices = f"thinker on {stages.thinker.device}, talker on {stages.talker.device}"
    say(f"loading {config.dtype.value}: {devices}, code2wav on {stages.code2wav.device}")
    with Engine.load(checkpoint, config, wanted) as engine, LiveEngine(engine) as live:
        say(f"loaded in {time.perf_counter() - started_s:.1f} s")
        yield Running(live, voices, wanted, marker, checkpoint.is_tiny)
