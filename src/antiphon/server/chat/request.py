"""What a client asks for: the body of a chat completion, as far as it is understood; the rest is refused by name.

A parameter that could change the answer and is not implemented may only say what is the case anyway (`UNSUPPORTED`);
one that cannot is ignored (`IGNORED`). Shown by tests/server/test_chat_request.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field, JsonValue, StringConstraints, ValidationError
from pydantic_core import from_json

from antiphon.server.api_error import ApiError
from antiphon.server.chat.faults import fault_of
from antiphon.server.chat.speech import SpeechFormat
from antiphon.server.events.wire import Name, Row, Wire

MAX_STOP_SEQUENCES = 4


class TextPart(Wire):
    type: Literal["text"]
    text: str


class ImageUrl(Wire):
    """detail: low shows the picture as a whole only; else it is shown in slices too, if it is large."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(Wire):
    type: Literal["image_url"]
    image_url: ImageUrl


class InputAudio(Wire):
    """data: a file in base64. format: what it is is seen from the file itself."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg"]


class AudioPart(Wire):
    type: Literal["input_audio"]
    input_audio: InputAudio


class RefusalPart(Wire):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[TextPart | ImagePart | AudioPart, Discriminator("type")]
AssistantPart = Annotated[TextPart | RefusalPart, Discriminator("type")]


class AskingMessage(Wire):
    """name: of who says it; the model is not told."""

    role: Literal["system", "developer", "user"]
    content: str | Row[Part]
    name: str | None = None


class EarlierAudio(Wire):
    """An answer that was spoken; nothing of it is kept here, but a client may send back what it got."""

    id: str
    transcript: str | None = None
    data: str | None = None
    expires_at: int | None = None


class AssistantMessage(Wire):
    """The fields of an answer that a client sends back as it came may all be there."""

    role: Literal["assistant"]
    content: str | Row[AssistantPart] | None = None
    refusal: str | None = None
    name: str | None = None
    audio: EarlierAudio | None = None
    annotations: Annotated[Row[JsonValue], Field(max_length=0)] | None = None
    tool_calls: Annotated[Row[JsonValue], Field(max_length=0)] | None = None
    function_call: None = None


Message = Annotated[AskingMessage | AssistantMessage, Discriminator("role")]


class StreamOptions(Wire):
    """include_obfuscation: chunks have no filling here."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class VoiceId(Wire):
    id: Name


class AudioOutput(Wire):
    """voice: any name is the server's own voice."""

    voice: Name | VoiceId
    format: SpeechFormat


class ChatRequest(Wire):
    """What is done. Each field may be null, which is as if it were not there."""

    model: Name
    messages: Annotated[Row[Message], Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    modalities: Annotated[Row[Literal["text", "audio"]], Field(min_length=1)] | None = None
    audio: AudioOutput | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[str, StringConstraints(min_length=1)]
        | Annotated[Row[Annotated[str, StringConstraints(min_length=1)]], Field(max_length=MAX_STOP_SEQUENCES)]
        | None
    ) = None

    @property
    def is_spoken(self) -> bool:
        return self.modalities is not None and "audio" in self.modalities

    @property
    def has_usage(self) -> bool:
        """A stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


UNSUPPORTED: Mapping[str, tuple[tuple[JsonValue, ...], str]] = {
    "n": ((1,), "one answer is given to a request; send the request again for another one"),
    "tools": (([],), "this model calls no tools; send none"),
    "tool_choice": (("none", "auto"), "this model calls no tools"),
    "functions": (([],), "this model calls no functions; send none"),
    "function_call": (("none", "auto"), "this model calls no functions"),
    "response_format": (({"type": "text"},), "answers are free text; ask for JSON in the words of a message"),
    "logprobs": ((False,), "probabilities are not told"),
    "top_logprobs": ((0,), "probabilities are not told"),
    "logit_bias": (({},), "single tokens cannot be made likelier"),
    "frequency_penalty": ((0,), "repetitions are penalised as the model was made for"),
    "presence_penalty": ((0,), "repetitions are penalised as the model was made for"),
    "reasoning_effort": (("none",), "this model answers without thinking first"),
    "verbosity": (("medium",), "ask for a short or a long answer in the words of a message"),
    "web_search_options": ((), "nothing is searched"),
    "moderation": ((), "nothing is judged"),
}
"""What it may say, and why nothing else."""

IGNORED = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction", "parallel_tool_calls"),
    )
)
"""Who asks, what is kept, how fast it goes: the answer is the same."""


def parse(body: bytes) -> ChatRequest:
    """Raises: ApiError, whatever is wrong with it."""
    try:
        found: JsonValue = from_json(body, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ApiError(400, "invalid_json", "the body is a JSON object")
    for name, (allowed, reason) in UNSUPPORTED.items():
        if name in found and found[name] is not None and found[name] not in allowed:
            raise ApiError(400, "unsupported_parameter", f"{name} is not supported: {reason}", name)
    known = {name: value for name, value in found.items() if name not in UNSUPPORTED and name not in IGNORED}
    try:
        request = ChatRequest.model_validate(known)
    except ValidationError as error:
        raise fault_of(error, known) from error
    _check(request)
    return request


def _check(request: ChatRequest) -> None:
    """Raises: ApiError for parameters that contradict each other."""
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "invalid_value", "stream_options is for a request with stream true", "stream_options")
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise ApiError(400, "invalid_value", "max_tokens is max_completion_tokens; send one of them", "max_tokens")
    if request.modalities is not None and "text" not in request.modalities:
        raise ApiError(400, "invalid_value", 'speech comes with its words: ["text", "audio"]', "modalities")
    if not request.is_spoken:
        return
    if request.audio is None:
        raise ApiError(400, "missing_required_parameter", "speech needs a voice and a format", "audio")
    if request.stream and request.audio.format != "pcm16":
        raise ApiError(400, "unsupported_value", "streamed speech is pcm16; a file is not streamed", "audio.format")
