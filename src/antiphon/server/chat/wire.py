"""What a client is answered: a whole completion, or chunks of one. Shown by tests/server/test_chat_completions.py."""

from __future__ import annotations

from typing import Literal

from antiphon.server.events.wire import Count, Maybe, Row, Wire

End = Literal["stop", "length"]


class PromptDetails(Wire):
    """cached_tokens: no chat's conversation is kept."""

    cached_tokens: Count = 0
    text_tokens: Count
    audio_tokens: Count
    image_tokens: Count


class AnswerDetails(Wire):
    text_tokens: Count
    audio_tokens: Count
    reasoning_tokens: Count = 0
    accepted_prediction_tokens: Count = 0
    rejected_prediction_tokens: Count = 0


class Usage(Wire):
    """completion_tokens: of text and speech together, as in details; a limit of tokens is one of text."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails
    completion_tokens_details: AnswerDetails


class Audio(Wire):
    """data: base64. expires_at: when it was made, since it is not kept."""

    id: str
    data: str
    transcript: str
    expires_at: Count


class AnswerMessage(Wire):
    """content: null if it is spoken; then the words are the transcript."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: Row[None] = ()
    audio: Maybe[Audio] = None


class Choice(Wire):
    index: Count = 0
    message: AnswerMessage
    logprobs: None = None
    finish_reason: End


class Completion(Wire):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: Count
    model: str
    choices: Row[Choice]
    usage: Usage


class AudioDelta(Wire):
    id: str
    data: Maybe[str] = None
    transcript: Maybe[str] = None
    expires_at: Maybe[Count] = None


class Delta(Wire):
    role: Maybe[Literal["assistant"]] = None
    content: Maybe[str] = None
    audio: Maybe[AudioDelta] = None


class ChunkChoice(Wire):
    index: Count = 0
    delta: Delta
    logprobs: None = None
    finish_reason: End | None = None


class Chunk(Wire):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: Count
    model: str
    choices: Row[ChunkChoice]


class ChunkWithUsage(Chunk):
    """usage: null in all but the last one."""

    usage: Usage | None = None


class ModelCard(Wire):
    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: str = "antiphon"


class ModelList(Wire):
    object: Literal["list"] = "list"
    data: Row[ModelCard]
