"""The session object: formats, turn detection, tools, and what vLLM-Omni's clients add.

One class for what a client changes (`SessionUpdate`: only what it names counts) and one for what the server says
(`Session`: all of it). `Wire.model_fields_set` tells what was named; null switches turn detection and the like off.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, JsonValue, StringConstraints, Tag

from antiphon.errors import AudioError
from antiphon.server.audio import FORMATS, MAX_RATE_HZ, MIN_RATE_HZ, Encoding, WireFormat, named_format
from antiphon.server.events.wire import Count, Maybe, Name, Row, Wire
from antiphon.units import OUTPUT_RATE_HZ

RateHz = Annotated[int, Field(ge=MIN_RATE_HZ, le=MAX_RATE_HZ)]
Modality = Literal["text", "audio"]
Modalities = Annotated[Row[Modality], Field(min_length=1, max_length=2)]
MaxTokens = Annotated[int, Field(ge=1, le=4096)] | Literal["inf"]
Speed = Annotated[float, Field(ge=0.25, le=1.5)]
Instructions = Annotated[str, StringConstraints(max_length=2**16)]
"""Far more than any prompt may have, and small enough for a message that repeats it."""
Probability = Annotated[float, Field(ge=0, le=1)]
Eagerness = Literal["low", "medium", "high", "auto"]
Effort = Literal["minimal", "low", "medium", "high", "xhigh"]

OFFICIAL_NAMES = {
    Encoding.PCM16: "audio/pcm",
    Encoding.ULAW: "audio/pcmu",
    Encoding.ALAW: "audio/pcma",
    Encoding.FLOAT32: "pcm_f32le",
}
"""How the server calls a format; for float samples the official protocol has no name."""


def _known(name: str) -> str:
    try:
        named_format(name)
    except AudioError as error:
        raise ValueError(str(error)) from error
    return name


class AudioFormat(Wire):
    """type: any spelling of `FORMATS`. rate: in hertz; where it is left out, the spelling's own."""

    type: Annotated[str, AfterValidator(_known)] = "audio/pcm"
    rate: Maybe[RateHz] = None

    def wire_format(self) -> WireFormat:
        form = named_format(self.type)
        return form if self.rate is None else form.at(self.rate)

    @staticmethod
    def of(form: WireFormat) -> AudioFormat:
        """In the official spelling where there is one; there, telephone audio names no rate."""
        name = OFFICIAL_NAMES[form.encoding]
        is_telephone = name in ("audio/pcmu", "audio/pcma") and form == FORMATS[name]
        return AudioFormat(type=name, rate=None if is_telephone else form.rate_hz)


def _spelled_out(value: JsonValue | AudioFormat) -> JsonValue | AudioFormat:
    """Older clients write a format as its name alone."""
    return {"type": value} if isinstance(value, str) else value


Format = Annotated[AudioFormat, BeforeValidator(_spelled_out)]


class Transcription(Wire):
    """Left-out fields stay left out: a Pipecat client fails on one that it does not know."""

    model: Maybe[Name] = None
    language: Maybe[str] = None
    prompt: Maybe[str] = None
    delay: Maybe[Effort] = None
    keywords: Maybe[Row[str]] = None
    languages: Maybe[Row[str]] = None


class NoiseReduction(Wire):
    type: Maybe[Literal["near_field", "far_field"]] = None
    strength: Maybe[float] = None


class ServerVad(Wire):
    """min_speech_duration_ms: vLLM-Omni's."""

    type: Literal["server_vad"] = "server_vad"
    threshold: Maybe[Probability] = None
    prefix_padding_ms: Maybe[Count] = None
    silence_duration_ms: Maybe[Count] = None
    min_speech_duration_ms: Maybe[Count] = None
    idle_timeout_ms: Annotated[int, Field(ge=5000, le=30000)] | None = None
    create_response: Maybe[bool] = None
    interrupt_response: Maybe[bool] = None


class SemanticVad(Wire):
    type: Literal["semantic_vad"] = "semantic_vad"
    eagerness: Maybe[Eagerness] = None
    create_response: Maybe[bool] = None
    interrupt_response: Maybe[bool] = None


BY_MEANING = SemanticVad(eagerness="auto", create_response=True, interrupt_response=True)
"""What the model does by itself: it decides every second whether to answer."""

TurnDetection = Annotated[ServerVad | SemanticVad, Discriminator("type")]


class VoiceId(Wire):
    id: Name


def _shape(value: JsonValue | Wire) -> str:
    """Which branch of a union is meant, so that a mistake in it is reported and not one of another branch."""
    match value:
        case {"type": str(kind)}:
            return kind
        case Wire() | dict() | list():
            return "object"
    return "word"


Voice = Annotated[Annotated[Name, Tag("word")] | Annotated[VoiceId, Tag("object")], Discriminator(_shape)]


class AudioInput(Wire):
    format: Maybe[Format] = None
    sample_rate_hz: Maybe[RateHz] = None
    transcription: Transcription | None = None
    noise_reduction: NoiseReduction | None = None
    turn_detection: TurnDetection | None = None


class AudioOutput(Wire):
    format: Maybe[Format] = None
    sample_rate_hz: Maybe[RateHz] = None
    voice: Maybe[Voice] = None
    speed: Maybe[Speed] = None


class Audio(Wire):
    """sample_rate_hz inside: vLLM-Omni's clients write it beside a format that is a name alone."""

    input: Maybe[AudioInput] = None
    output: Maybe[AudioOutput] = None


class FunctionTool(Wire):
    """parameters: a JSON schema."""

    type: Literal["function"] = "function"
    name: Maybe[Name] = None
    description: Maybe[str] = None
    parameters: Maybe[JsonValue] = None


class McpTool(Wire):
    type: Literal["mcp"] = "mcp"
    server_label: str
    server_url: Maybe[str] = None
    server_description: Maybe[str] = None
    connector_id: Maybe[str] = None
    tunnel_id: Maybe[str] = None
    authorization: Maybe[str] = None
    headers: Maybe[dict[str, str]] = None
    allowed_tools: Maybe[JsonValue] = None
    allowed_callers: Maybe[Row[Literal["direct", "programmatic"]]] = None
    require_approval: Maybe[JsonValue] = None
    defer_loading: Maybe[bool] = None


Tool = Annotated[FunctionTool | McpTool, Discriminator("type")]


class FunctionChoice(Wire):
    type: Literal["function"] = "function"
    name: Name


class McpChoice(Wire):
    type: Literal["mcp"] = "mcp"
    server_label: str
    name: Maybe[str] = None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[FunctionChoice, Tag("function")]
    | Annotated[McpChoice, Tag("mcp")],
    Discriminator(lambda value: value.type if isinstance(value, FunctionChoice | McpChoice) else _shape(value)),
]


class Reasoning(Wire):
    effort: Maybe[Effort] = None


class TokenLimits(Wire):
    post_instructions: Maybe[Count] = None


class RetentionRatio(Wire):
    type: Literal["retention_ratio"] = "retention_ratio"
    retention_ratio: Probability
    token_limits: Maybe[TokenLimits] = None


class TracingLabels(Wire):
    workflow_name: Maybe[str] = None
    group_id: Maybe[str] = None
    metadata: Maybe[JsonValue] = None


class Prompt(Wire):
    """variables: text, or parts as the vendor's other interfaces write them."""

    id: Name
    version: Maybe[str] = None
    variables: Maybe[dict[str, JsonValue]] = None


Truncation = Literal["auto", "disabled"] | RetentionRatio
Tracing = Literal["auto"] | TracingLabels
Include = Literal["item.input_audio_transcription.logprobs"]


class ExtraBody(Wire):
    """vLLM-Omni's place for what the model decides on; the names of its windows. The last three are ours.

    listen_scale: by what the score of listening is multiplied. seed: of all that the call draws.
    report_units: tell what every second came to and took.
    """

    auto_response: Maybe[bool] = None
    force_listen_count: Maybe[Count] = None
    sliding_window_mode: Maybe[Literal["off", "basic", "context"]] = None
    basic_window_high_tokens: Maybe[Count] = None
    basic_window_low_tokens: Maybe[Count] = None
    context_max_units: Maybe[Count] = None
    context_previous_max_tokens: Maybe[Count] = None
    duplex_initial_user_text: Maybe[str] = None
    listen_scale: Maybe[Annotated[float, Field(ge=0.1, le=10)]] = None
    seed: Maybe[Annotated[int, Field(ge=0, lt=2**53)]] = None
    report_units: Maybe[bool] = None


class SessionUpdate(Wire):
    """What a client changes. The fields below the blank line are vendors'."""

    type: Literal["realtime"] | None = "realtime"
    model: Maybe[Name] = None
    output_modalities: Maybe[Modalities] = None
    instructions: Maybe[Instructions] = None
    audio: Maybe[Audio] = None
    tools: Maybe[Row[Tool]] = None
    tool_choice: Maybe[ToolChoice] = None
    parallel_tool_calls: Maybe[bool] = None
    reasoning: Maybe[Reasoning] = None
    max_output_tokens: Maybe[MaxTokens] = None
    truncation: Maybe[Truncation] = None
    prompt: Prompt | None = None
    tracing: Tracing | None = None
    include: Maybe[Row[Include]] = None

    vendor_events: Maybe[bool] = None
    modalities: Maybe[Modalities] = None
    voice: Maybe[Name] = None
    ref_audio: Maybe[str] = None
    speed: Maybe[Speed] = None
    temperature: Maybe[Annotated[float, Field(ge=0, le=2)]] = None
    max_response_output_tokens: Maybe[MaxTokens] = None
    input_audio_format: Maybe[Format] = None
    output_audio_format: Maybe[Format] = None
    sample_rate_hz: Maybe[RateHz] = None
    turn_detection: TurnDetection | None = None
    initial_user_text: Maybe[str] = None
    force_listen_count: Maybe[Count] = None
    idle_timeout_s: Maybe[Annotated[float, Field(gt=0)]] = None
    overlap_policy: Maybe[Literal["listen_only", "barge_in_on_speech"]] = None
    playback_commit_policy: Maybe[Literal["ack_only", "commit_all_on_done"]] = None
    extra_body: Maybe[ExtraBody] = None


class Session(Wire):
    """What the server says: every official field, decided. expires_at: Unix seconds.

    Turn detection by meaning is what the model does when nothing else is asked for.
    """

    type: Literal["realtime"] = "realtime"
    object: Literal["realtime.session"] = "realtime.session"
    id: Name
    model: Name
    output_modalities: Modalities = ("audio",)
    instructions: str = ""
    audio: Audio = Audio(
        input=AudioInput(format=AudioFormat(rate=OUTPUT_RATE_HZ), turn_detection=BY_MEANING),
        output=AudioOutput(format=AudioFormat(rate=OUTPUT_RATE_HZ)),
    )
    tools: Row[Tool] = ()
    tool_choice: ToolChoice = "auto"
    max_output_tokens: MaxTokens = "inf"
    truncation: Truncation = "auto"
    prompt: Prompt | None = None
    tracing: Tracing | None = None
    include: Row[Include] | None = None
    expires_at: Maybe[Count] = None
    reasoning: Maybe[Reasoning] = None
    parallel_tool_calls: Maybe[bool] = None
