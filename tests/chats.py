"""Chats on an engine, and all that came of each."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from antiphon.config import ChatConfig
from antiphon.core.chat import AnswerConfig, ChatMessage, PictureFile, Role, Sound
from antiphon.core.events import AnswerGrew, SessionEnded
from antiphon.engine import Chat, Engine
from antiphon.happenings import Happening, Speech
from antiphon.models.minicpmo.chat_prompt import ChatModel, ChatPrompt, chat_prompt
from antiphon.models.minicpmo.voice_prompt import VoicePrompt

WRITTEN = ChatConfig(AnswerConfig(max_tokens=40, max_context_tokens=400))
SPOKEN = replace(WRITTEN, answer=replace(WRITTEN.answer, is_spoken=True))


@dataclass(slots=True, eq=False)
class Talk:
    """One chat and what happened in it."""

    happened: list[Happening] = field(default_factory=list)

    @property
    def grown(self) -> list[AnswerGrew]:
        return [one for one in self.happened if isinstance(one, AnswerGrew)]

    @property
    def text(self) -> str:
        return "".join(one.text for one in self.grown)

    @property
    def codec_tokens(self) -> list[tuple[int, ...]]:
        return [one.chunk.codec_tokens for one in self.happened if isinstance(one, Speech)]

    @property
    def samples(self) -> Tensor:
        return torch.cat([torch.empty(0), *(one.samples for one in self.happened if isinstance(one, Speech))])

    @property
    def code(self) -> str:
        """What it ended with; empty as long as it goes on."""
        last = self.happened[-1] if self.happened else None
        return last.code if isinstance(last, SessionEnded) else ""

    def said(self) -> tuple[list[AnswerGrew], list[tuple[int, ...]], list[float], str]:
        """All that a client is told, comparable to the last bit."""
        return self.grown, self.codec_tokens, self.samples.tolist(), self.code


def prompt(engine: Engine, *parts: str | PictureFile | Sound[Tensor], is_spoken: bool = False) -> ChatPrompt:
    """Somebody's question."""
    model = ChatModel(engine.tokenizer, engine.model.vision, engine.model.audio)
    return chat_prompt([ChatMessage(Role.USER, parts)], model, is_spoken=is_spoken, max_tokens=10_000)


def begin(engine: Engine, name: str, config: ChatConfig, asked: ChatPrompt, voice: VoicePrompt) -> tuple[Chat, Talk]:
    talk = Talk()
    return engine.begin_chat(name, config, asked, voice, talk.happened.append), talk


def run_down(engine: Engine) -> None:
    """Let the engine work until there is nothing to do."""
    while not engine.is_idle:
        engine.advance()


def picture(seed: int) -> PictureFile:
    pixels = np.random.default_rng(seed).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(pixels).save(file, "PNG")
        return PictureFile(file.getvalue(), 1)


def noise(seed: int, num_samples: int = 24_000) -> Sound[Tensor]:
    return Sound(0.1 * torch.randn(num_samples, generator=torch.Generator().manual_seed(seed)))
