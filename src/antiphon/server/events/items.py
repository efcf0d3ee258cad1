"""Items of a conversation and their parts: what was typed, shown, said or called. The same in both directions.

The server gives every item its id before it sends it on. Which kinds of items a session can use is the session's
matter; here is what may be written.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, JsonValue, Tag, model_validator

from antiphon.server.events.wire import Maybe, Name, Row, Wire

ItemStatus = Literal["completed", "incomplete", "in_progress"]


class _Part(Wire):
    @model_validator(mode="before")
    @classmethod
    def _forget_empty_fields_of_other_parts(cls, value: JsonValue) -> JsonValue:
        """The official types are one class for all parts of a role; a client may write them out whole."""
        if not isinstance(value, dict):
            return value
        return {key: inner for key, inner in value.items() if inner is not None or key in cls.model_fields}


class InputText(_Part):
    type: Literal["input_text"] = "input_text"
    text: str


class InputAudio(_Part):
    """audio: base64, in the session's input format; left out by the server, which keeps no sound."""

    type: Literal["input_audio"] = "input_audio"
    audio: Maybe[str] = None
    transcript: str | None = None


class InputImage(_Part):
    """image_url: a data URL of a picture file; left out by the server, which keeps no pictures."""

    type: Literal["input_image"] = "input_image"
    image_url: Maybe[str] = None
    detail: Maybe[Literal["auto", "low", "high"]] = None


class OutputText(_Part):
    """Pipecat and older clients write `text`, and Pipecat `input_text` in an answer that it adds later."""

    type: Literal["output_text", "text", "input_text"] = "output_text"
    text: str


class OutputAudio(_Part):
    type: Literal["output_audio", "audio"] = "output_audio"
    audio: Maybe[str] = None
    transcript: str | None = None


class _Item(Wire):
    id: Maybe[Name] = None
    object: Literal["realtime.item"] | None = "realtime.item"
    status: ItemStatus | None = "completed"


class _Message(_Item):
    type: Literal["message"] = "message"


class SystemMessage(_Message):
    role: Literal["system"] = "system"
    content: Row[InputText]


class UserMessage(_Message):
    role: Literal["user"] = "user"
    content: Row[Annotated[InputText | InputAudio | InputImage, Discriminator("type")]]


class AssistantMessage(_Message):
    role: Literal["assistant"] = "assistant"
    content: Row[Annotated[OutputText | OutputAudio, Discriminator("type")]]


class FunctionCall(_Item):
    """arguments: JSON, as text."""

    type: Literal["function_call"] = "function_call"
    name: str
    arguments: str
    call_id: Maybe[Name] = None


class FunctionCallOutput(_Item):
    type: Literal["function_call_output"] = "function_call_output"
    call_id: Name
    output: str


class McpListedTool(Wire):
    name: str
    input_schema: JsonValue
    description: Maybe[str] = None
    annotations: Maybe[JsonValue] = None


class McpListTools(Wire):
    type: Literal["mcp_list_tools"] = "mcp_list_tools"
    id: Maybe[Name] = None
    server_label: str
    tools: Row[McpListedTool]


class McpToolError(Wire):
    """code: of the protocol or of HTTP; an error of the tool itself has none."""

    type: Literal["protocol_error", "tool_execution_error", "http_error"]
    message: str
    code: Maybe[int] = None


class McpToolCall(Wire):
    type: Literal["mcp_call"] = "mcp_call"
    id: Name
    server_label: str
    name: str
    arguments: str
    approval_request_id: Maybe[Name] = None
    output: Maybe[str] = None
    error: Maybe[McpToolError] = None


class McpApprovalRequest(Wire):
    type: Literal["mcp_approval_request"] = "mcp_approval_request"
    id: Name
    server_label: str
    name: str
    arguments: str


class McpApprovalResponse(Wire):
    type: Literal["mcp_approval_response"] = "mcp_approval_response"
    id: Name
    approval_request_id: Name
    approve: bool
    reason: Maybe[str] = None


class ItemReference(Wire):
    """An item of the conversation, by its name; only in the input of one response."""

    type: Literal["item_reference"] = "item_reference"
    id: Name


def _kind(value: JsonValue | Wire) -> str | None:
    """A message's kind is its role; every other item's is its type."""
    match value:
        case {"type": "message", "role": str(kind)} | {"type": str(kind)}:
            return kind
        case SystemMessage() | UserMessage() | AssistantMessage():
            return value.role
        case FunctionCall() | FunctionCallOutput() | ItemReference():
            return value.type
        case McpListTools() | McpToolCall() | McpApprovalRequest() | McpApprovalResponse():
            return value.type
    return None


_Shared = (
    Annotated[SystemMessage, Tag("system")]
    | Annotated[UserMessage, Tag("user")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[McpListTools, Tag("mcp_list_tools")]
    | Annotated[McpToolCall, Tag("mcp_call")]
    | Annotated[McpApprovalRequest, Tag("mcp_approval_request")]
    | Annotated[McpApprovalResponse, Tag("mcp_approval_response")]
)
Item = Annotated[_Shared, Discriminator(_kind)]
ItemOrReference = Annotated[_Shared | Annotated[ItemReference, Tag("item_reference")], Discriminator(_kind)]


class TextPart(Wire):
    """A part as the life cycle of a response shows it; without the prefix that items have."""

    type: Literal["text"] = "text"
    text: str


class AudioPart(Wire):
    type: Literal["audio"] = "audio"
    transcript: str


ContentPart = Annotated[TextPart | AudioPart, Discriminator("type")]
