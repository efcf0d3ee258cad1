"""What an engine is made of: each stage with its networks on its device, and the place where it runs.

A builder makes one stage from its source, in this process or another. Nothing runs here. Shown by
tests/test_engine.py and tests/test_placements.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from queue import SimpleQueue
from typing import TypeVar, assert_never

import torch
from rich.console import Console
from torch import Tensor

from antiphon.config import ChatConfig, EngineConfig, Placement, SessionConfig, StageConfig, check_window
from antiphon.core.cache_dtype import check_slide
from antiphon.core.codec_buffer import CHUNK_TOKENS
from antiphon.core.messages import CodecChunk, GoOn, Handoff, HeardUnit, Retain, Spoken
from antiphon.core.sampling import Draws
from antiphon.kernels.beside import Beside
from antiphon.models.minicpmo.captured import GraphRecorder
from antiphon.models.minicpmo.chat_prompt import ChatPrompt
from antiphon.models.minicpmo.flow import LONGEST_CHUNK_TOKENS, NUM_FLOW_STEPS
from antiphon.models.minicpmo.flow_cache import FlowShape
from antiphon.models.minicpmo.model import Model, Section
from antiphon.models.minicpmo.source import ModelSource
from antiphon.models.minicpmo.speech_arena import ArenaSize, SpeechArena
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.progress import follow
from antiphon.runner.device import DTYPES, Precedence, resolve_device
from antiphon.runner.placed import Died, Here, Placed, Threaded
from antiphon.runner.process import Builder, Separate
from antiphon.stages.code2wav.renderer import Renderer, grid_on
from antiphon.stages.code2wav.stage import Code2WavStage
from antiphon.stages.code2wav.state import Caller, Code2WavCounts, Code2WavSession
from antiphon.stages.code2wav.voices import VoiceStore
from antiphon.stages.loop import Answer, Interruption, Message, StageLoop
from antiphon.stages.paged import CacheConfig
from antiphon.stages.step_graphs import recorded_numbers
from antiphon.stages.talker.speaker import CHAIN_STEPS
from antiphon.stages.talker.stage import TalkerStage, turn_cache
from antiphon.stages.talker.state import TalkerCounts, TalkerSession, TalkerState
from antiphon.stages.thinker.answering import ChatState
from antiphon.stages.thinker.decider import Decider
from antiphon.stages.thinker.rebuild import Retained
from antiphon.stages.thinker.senses import Senses
from antiphon.stages.thinker.stage import NUM_SEGMENTS, PromptLimits, ThinkerResult, ThinkerStage, ThinkerState
from antiphon.stages.thinker.state import ChatSession, PromptReady, ThinkerCounts, ThinkerSession, UnitInput
from antiphon.units import MEL_FRAME_RATE_HZ

logger = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")
AnswerT = TypeVar("AnswerT")

EYES_SIZES = (1, 2, 4, 8)
"""Items of pictures in a recorded pass: what cameras of some calls show between two steps."""

ThinkerMessage = Message[ThinkerSession | Retained | ChatSession, HeardUnit[UnitInput] | Retain | GoOn]
TalkerMessage = Message[TalkerSession, Handoff[Tensor] | GoOn]
Code2WavMessage = Message[Code2WavSession, CodecChunk]
ThinkerAnswer = Answer[PromptReady, ThinkerResult, ThinkerCounts]
TalkerAnswer = Answer[None, CodecChunk, TalkerCounts]
Code2WavAnswer = Answer[None, Spoken[Tensor], Code2WavCounts]
ThinkerLoop = StageLoop[
    ThinkerSession | Retained | ChatSession,
    HeardUnit[UnitInput] | Retain | GoOn,
    ThinkerState | ChatState,
    PromptReady,
    ThinkerResult,
    ThinkerCounts,
]
TalkerLoop = StageLoop[TalkerSession, Handoff[Tensor] | GoOn, TalkerState, None, CodecChunk, TalkerCounts]
Code2WavLoop = StageLoop[Code2WavSession, CodecChunk, Caller, None, Spoken[Tensor], Code2WavCounts]


@dataclass(frozen=True, slots=True)
class ThinkerBuilder:
    """session: whose need the cache is sized for."""

    source: ModelSource
    config: EngineConfig
    session: SessionConfig

    @property
    def device(self) -> torch.device:
        return resolve_device(self.config.stages.thinker.device)

    @property
    def precedence(self) -> Precedence:
        return Precedence.USUAL

    def build(self) -> ThinkerLoop:
        """Raises: CheckpointError, ConfigError if the session's window does not fit the model, or slides the cache."""
        check_slide(self.session.slide, self.config.kv_dtype)
        config, session, tokenizer = self.config, self.session, self.source.tokenizer()
        model = _load(self.source, Section.THINKER, self.device, config)
        beside = Beside(self.device, Precedence.FIRST.value)
        senses = Senses(model.thinker, tokenizer.special, model.audio, model.vision, beside)
        num_input_tokens = senses.num_input_tokens(session.max_pictures, session.max_slices, session.max_text_tokens)
        max_unit_tokens = num_input_tokens + session.duplex.max_output_tokens
        check_window(session.window, max_unit_tokens, model.config.thinker.max_position_tokens)
        window_tokens = session.window.peak_tokens(config.max_prompt_tokens, max_unit_tokens)
        one = replace(CacheConfig.for_tokens(window_tokens, NUM_SEGMENTS), dtype=config.kv_dtype)
        cache = _times(config.max_calls, one)
        limits = PromptLimits(config.max_prompt_tokens, config.shares_prompts, config.max_stored_prompt_bytes)
        decider = Decider(model.thinker, tokenizer, cache)
        recorders = _recorders(self.device, self.precedence)
        max_tokens = model.config.thinker.max_position_tokens
        for recorder in recorders:
            _record("the thinker's steps", decider.decoder.capture(config.max_calls, max_tokens, recorder))
            _record("the thinker's draws", decider.chooser.capture(config.max_calls, recorder))
        # They run beside the steps, so that the memory of what is recorded is their own.
        of_senses = _recorders(self.device, Precedence.FIRST)
        for recorder in of_senses:
            _record("the ears", senses.capture(recorded_numbers(config.max_calls), recorder))
            if session.max_pictures:
                _record("the eyes", senses.capture_eyes(EYES_SIZES, recorder))
        stage = ThinkerStage(senses, decider, tokenizer, limits)
        return StageLoop(stage, Interruption.KEEPS_WORK, partial(_forget, (*recorders, *of_senses)))


@dataclass(frozen=True, slots=True)
class TalkerBuilder:
    source: ModelSource
    config: EngineConfig

    @property
    def device(self) -> torch.device:
        return resolve_device(self.config.stages.talker.device)

    @property
    def precedence(self) -> Precedence:
        return Precedence.FIRST

    def build(self) -> TalkerLoop:
        """Raises: CheckpointError."""
        network = _load(self.source, Section.TALKER, self.device, self.config).talker
        cache = _times(self.config.max_speaking, turn_cache(network.config.max_position_tokens))
        recorders = _recorders(self.device, self.precedence)
        stage = TalkerStage(network, cache, self.config.max_speaking_chats, CHAIN_STEPS if recorders else 1)
        for recorder in recorders:
            _record("the talker", stage.speaker.capture(self.config.max_speaking, recorder))
        return StageLoop(stage, Interruption.VOIDS_WORK, partial(_forget, recorders))


@dataclass(frozen=True, slots=True, eq=False)
class Code2WavBuilder:
    """noise: [M, N] float32 on the host, what the flow starts from."""

    source: ModelSource
    config: EngineConfig
    noise: Tensor

    @property
    def device(self) -> torch.device:
        return resolve_device(self.config.stages.code2wav.device)

    @property
    def precedence(self) -> Precedence:
        return Precedence.FIRST

    def build(self) -> Code2WavLoop:
        """Raises: CheckpointError."""
        device = self.device
        if device.type == "cuda":
            # The vocoder sums up a sine's phase in float32; TF32 convolutions before it would be heard.
            torch.backends.cudnn.allow_tf32 = False
        model = _load(self.source, Section.VOCODER, device, self.config)
        config, grid = self.config.code2wav, grid_on(device, self.config.code2wav.grid)
        if device.type == "cuda" and (doubt := grid.doubt(self.config.max_speaking)):
            logger.warning("code2wav: %s", doubt)
        voice_frames = math.ceil(config.voice_s * MEL_FRAME_RATE_HZ)
        size = ArenaSize.for_turns(config.retention, voice_frames, self.config.max_speaking, grid.largest)
        arena = SpeechArena(
            FlowShape(model.config.flow, NUM_FLOW_STEPS), config.retention, size, DTYPES[config.dtype], device
        )
        synthesizer = model.synthesizer(self.noise.to(device), arena, config.compute)
        voices = VoiceStore(synthesizer, self.config.max_stored_voice_bytes)
        renderer = Renderer(synthesizer, model.vocoder(config.compute), grid)
        recorders = _recorders(device, self.precedence)
        for recorder in recorders:
            if doubt := config.chunk_tokens.doubt(CHUNK_TOKENS, LONGEST_CHUNK_TOKENS):
                logger.warning("code2wav: %s", doubt)
            _record("code2wav", renderer.capture(config.chunk_tokens.sizes, voice_frames, recorder))
        stage = Code2WavStage(renderer, voices, device)
        return StageLoop(stage, Interruption.VOIDS_WORK, partial(_forget, recorders))


@dataclass(frozen=True, slots=True)
class FromThinker:
    answer: ThinkerAnswer | Died


@dataclass(frozen=True, slots=True)
class FromTalker:
    answer: TalkerAnswer | Died


@dataclass(frozen=True, slots=True)
class FromCode2Wav:
    answer: Code2WavAnswer | Died


Inbox = SimpleQueue[FromThinker | FromTalker | FromCode2Wav | Callable[[], None]]
"""Of an engine: what its stages answer and what other threads want its thread to do."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The three stages, each in its place."""

    thinker: Placed[ThinkerMessage]
    talker: Placed[TalkerMessage]
    code2wav: Placed[Code2WavMessage]

    @property
    def all(self) -> tuple[Placed[ThinkerMessage], Placed[TalkerMessage], Placed[Code2WavMessage]]:
        return self.thinker, self.talker, self.code2wav

    @property
    def are_idle(self) -> bool:
        return all(stage.is_idle for stage in self.all)

    def step(self) -> None:
        for stage in self.all:
            stage.step()

    def stop(self) -> None:
        for stage in self.all:
            stage.stop()


def assemble(
    source: ModelSource, config: EngineConfig, session: SessionConfig, flow_noise: Tensor, inbox: Inbox
) -> Stages:
    """Build the stages of an engine and start them.

    session: whose need the caches are sized for.
    flow_noise: [M, N] float32 on the host, what all speech is made from.
    Raises: CheckpointError, ConfigError.
    """
    thinker, talker = ThinkerBuilder(source, config, session), TalkerBuilder(source, config)
    code2wav, placed = Code2WavBuilder(source, config, flow_noise), config.stages
    stages = Stages(
        place("thinker", placed.thinker, thinker, lambda answer: inbox.put(FromThinker(answer))),
        place("talker", placed.talker, talker, lambda answer: inbox.put(FromTalker(answer))),
        place("code2wav", placed.code2wav, code2wav, lambda answer: inbox.put(FromCode2Wav(answer))),
    )
    try:
        for stage in stages.all:
            stage.start()
    except BaseException:
        stages.stop()
        raise
    return stages


@dataclass(frozen=True, slots=True)
class StageSettings:
    """What each stage has to know of a session."""

    thinker: ThinkerSession
    talker: TalkerSession
    code2wav: Code2WavSession


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What each stage has to know of a chat. Talker and code2wav are told only if it is spoken."""

    thinker: ChatSession
    talker: TalkerSession
    code2wav: Code2WavSession


def stage_settings(
    key: str, session: SessionConfig, reference: Tensor, voice: VoicePrompt, deadline_s: float
) -> StageSettings:
    """key: the session's name in messages. reference, voice: as in `Engine.begin`. deadline_s: to be ready."""
    thinker = ThinkerSession(
        session_id=key,
        prompt=session.prompt,
        reference=reference,
        window=session.window,
        slide=session.slide,
        max_pictures=session.max_pictures,
        max_slices=session.max_slices,
        max_text_tokens=session.max_text_tokens,
        duplex=session.duplex,
        sampling=session.text,
        draws=session.draws,
        seed=_stream_seed(session.seed, _Stream.TEXT),
        keeps_inputs=session.keeps_inputs,
        deadline_s=deadline_s,
        script=session.script,
    )
    talker = TalkerSession(key, session.codec, session.draws, _stream_seed(session.seed, _Stream.CODEC))
    code2wav = Code2WavSession(key, voice, session.draws, _stream_seed(session.seed, _Stream.SOURCE))
    return StageSettings(thinker, talker, code2wav)


def chat_settings(
    key: str, chat: ChatConfig, prompt: ChatPrompt, voice: VoicePrompt, deadline_s: float
) -> ChatSettings:
    """As `stage_settings`. deadline_s: of all that is done for the chat."""
    thinker = ChatSession(
        session_id=key,
        prompt=prompt,
        answer=chat.answer,
        sampling=chat.text,
        draws=chat.draws,
        seed=_stream_seed(chat.seed, _Stream.TEXT),
        deadline_s=deadline_s,
    )
    talker = TalkerSession(key, chat.codec, Draws.SAMPLED, _stream_seed(chat.seed, _Stream.CODEC), is_chat=True)
    return ChatSettings(
        thinker, talker, Code2WavSession(key, voice, Draws.SAMPLED, _stream_seed(chat.seed, _Stream.SOURCE))
    )


def place(
    name: str,
    config: StageConfig,
    builder: Builder[MessageT, AnswerT],
    emit: Callable[[AnswerT | Died], None],
) -> Placed[MessageT]:
    """Put a stage where it shall run; emit: is called with its answers, in whichever thread. Raises: as it is built."""
    match config.placement:
        case Placement.HERE:
            return Here(builder.build(), emit)
        case Placement.THREAD:
            return Threaded(name, builder.build(), builder.device, builder.precedence, emit)
        case Placement.PROCESS:
            return Separate(name, builder, emit)
        case never:
            assert_never(never)


def _load(source: ModelSource, section: Section, device: torch.device, config: EngineConfig) -> Model:
    return source.load(section, device, DTYPES[config.dtype])


def _recorders(device: torch.device, precedence: Precedence) -> tuple[GraphRecorder, ...]:
    """One where steps are recorded, which is on a GPU, else none."""
    return (GraphRecorder.on(device, precedence.value),) if device.type == "cuda" else ()


def _forget(recorders: Iterable[GraphRecorder]) -> None:
    for recorder in recorders:
        recorder.forget()


def _record(what: str, captures: Iterator[int]) -> None:
    """Record all graphs of a kind."""
    with torch.inference_mode():
        follow(f"recording {what}", captures, Console(stderr=True))


def _times(number: int, one: CacheConfig) -> CacheConfig:
    return replace(one, num_blocks=number * one.num_blocks)


class _Stream(Enum):
    """Independent random streams of one session."""

    TEXT = 0
    CODEC = 1
    SOURCE = 2


def _stream_seed(seed: int, stream: _Stream) -> int:
    return len(_Stream) * seed + stream.value
