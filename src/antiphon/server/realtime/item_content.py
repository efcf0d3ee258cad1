"""What is in an item that a client makes: words for the model, sound, pictures; and what of it is kept.

Shown by tests/server/test_realtime_items.py.
"""

from __future__ import annotations

from antiphon.server.events.items import (
    AssistantMessage,
    FunctionCall,
    FunctionCallOutput,
    InputAudio,
    InputImage,
    InputText,
    Item,
    SystemMessage,
    UserMessage,
)
from antiphon.server.realtime.conversation import RequestError


def check(item: Item) -> None:
    """Raises: RequestError if it is of a kind that no client makes here, or a part of it lacks what it is for."""
    if not isinstance(item, UserMessage | SystemMessage | AssistantMessage | FunctionCall | FunctionCallOutput):
        raise RequestError("tools_unsupported", "this model calls no tools of other servers", "item.type")
    if isinstance(item, UserMessage):
        for index, part in enumerate(item.content):
            if isinstance(part, InputImage) and not part.image_url:
                raise RequestError("invalid_event", "a picture has an image_url", f"item.content[{index}].image_url")


def sounds_of(item: Item) -> list[str]:
    """In base64, in the session's format."""
    parts = item.content if isinstance(item, UserMessage) else ()
    return [part.audio for part in parts if isinstance(part, InputAudio) and part.audio]


def words_of(item: Item) -> str:
    """That the model reads. What it said itself it remembers, or never said.

    What a tool found for another model is as good as typed.
    """
    match item:
        case UserMessage(content=parts) | SystemMessage(content=parts):
            return "\n".join(part.text for part in parts if isinstance(part, InputText))
        case FunctionCallOutput(output=words):
            return words
        case _:
            return ""


def without_files(item: Item) -> Item:
    """As it is kept and told: neither sound nor pictures."""
    if not isinstance(item, UserMessage):
        return item
    parts = tuple(
        part
        if isinstance(part, InputText)
        else part.model_copy(update={"audio": None} if isinstance(part, InputAudio) else {"image_url": None})
        for part in item.content
    )
    return item.model_copy(update={"content": parts})
