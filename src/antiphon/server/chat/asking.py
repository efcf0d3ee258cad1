"""A request as the engine takes it: files decoded, limits filled in. Shown by tests/server/test_chat_completions.py."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from antiphon.config import ChatConfig
from antiphon.core.chat import AnswerConfig, ChatMessage, PictureFile, Role, Sound
from antiphon.core.sampling import CHAT_TEXT, Draws
from antiphon.errors import ImageError, InputError
from antiphon.server.api_error import ApiError
from antiphon.server.audio_file import decode_file, read_heard
from antiphon.server.chat.request import (
    AskingMessage,
    AssistantMessage,
    AudioPart,
    ChatRequest,
    ImagePart,
    Message,
    RefusalPart,
    TextPart,
)

MAX_SOUND_S = 900.0
"""Of one sound; a longer one has more tokens than the model was trained with."""

MIN_TEMPERATURE = 0.01
"""Below it only the likeliest token is ever drawn, and logits grow beyond what float32 can hold."""

Samples = NDArray[np.float32]
Heard = ChatMessage[Samples]


@dataclass(frozen=True, slots=True)
class ChatOffer:
    """What the operator offers.

    max_context_tokens: of conversation and answer together. answer_tokens: if a client says none.
    max_slices: of a picture that is not asked for in low detail. max_body_bytes: of a request.
    """

    max_context_tokens: int
    answer_tokens: int
    max_slices: int
    max_body_bytes: int


def chat_config(request: ChatRequest, offer: ChatOffer, seed: int) -> ChatConfig:
    """seed: if the request names none."""
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    stop = (request.stop,) if isinstance(request.stop, str) else request.stop
    temperature = CHAT_TEXT.temperature if request.temperature is None else request.temperature
    top_p = CHAT_TEXT.top_p if request.top_p is None else request.top_p
    is_certain = temperature < MIN_TEMPERATURE or top_p == 0
    return ChatConfig(
        answer=AnswerConfig(
            max_tokens=offer.answer_tokens if max_tokens is None else max_tokens,
            max_context_tokens=offer.max_context_tokens,
            is_spoken=request.is_spoken,
            stop=stop or (),
        ),
        text=CHAT_TEXT if is_certain else replace(CHAT_TEXT, temperature=temperature, top_p=top_p),
        draws=Draws.MOST_LIKELY if is_certain else Draws.SAMPLED,
        # Each session makes several seeds of its own; all of them are 64 bits long.
        seed=(seed if request.seed is None else request.seed) % 2**60,
    )


def conversation(request: ChatRequest, offer: ChatOffer) -> tuple[Heard, ...]:
    """Decodes sounds, which takes a while, and pictures only from base64. Raises: ApiError."""
    return tuple(_heard(message, f"messages[{at}]", offer) for at, message in enumerate(request.messages))


def _heard(message: Message, place: str, offer: ChatOffer) -> Heard:
    if isinstance(message, AssistantMessage):
        return ChatMessage(Role.ASSISTANT, (_said(message, place),))
    role = Role.USER if message.role == "user" else Role.SYSTEM
    return ChatMessage(role, _parts(message, place, offer))


def _said(message: AssistantMessage, place: str) -> str:
    """Raises: ApiError if only the name of a spoken answer is left."""
    match message.content:
        case str(text):
            return text
        case tuple(parts):
            return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in parts)
    if message.audio is None:
        return message.refusal or ""
    if message.audio.transcript is None:
        raise ApiError(
            400,
            "unsupported_parameter",
            "spoken answers are not kept here; send the transcript of this one as the message's content",
            f"{place}.audio",
        )
    return message.audio.transcript


def _parts(message: AskingMessage, place: str, offer: ChatOffer) -> tuple[str | PictureFile | Sound[Samples], ...]:
    if isinstance(message.content, str):
        return (message.content,)
    parts: list[str | PictureFile | Sound[Samples]] = []
    for at, part in enumerate(message.content):
        try:
            parts.append(_part(part, offer))
        except InputError as error:
            raise ApiError.of(error, f"{place}.content[{at}]") from error
    return tuple(parts)


def _part(part: TextPart | ImagePart | AudioPart, offer: ChatOffer) -> str | PictureFile | Sound[Samples]:
    """Raises: ImageError, AudioError."""
    match part:
        case TextPart():
            return part.text
        case ImagePart(image_url=image):
            return PictureFile(_decode_picture(image.url), 1 if image.detail == "low" else offer.max_slices)
        case AudioPart(input_audio=audio):
            return Sound(read_heard(decode_file(audio.data), MAX_SOUND_S))


def _decode_picture(url: str) -> bytes:
    """Raises: ImageError."""
    head, comma, body = url.partition(",")
    if not url.startswith("data:"):
        raise ImageError("pictures are not fetched from the network; send the file itself: data:image/png;base64,...")
    if not comma or not head.endswith(";base64"):
        raise ImageError("a picture's data URL is in base64: data:image/png;base64,...")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the picture is not base64: {error}") from error
