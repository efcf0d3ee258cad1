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

MAX_KEPT_BYTES = 2**19
"""Items are told back, and clients take messages below 1 MiB."""


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


def kept_of(item: Item) -> Item:
    """As it is kept and told: neither sound nor pictures. Raises: RequestError if it is too long to be told."""
    kept = _without_files(item)
    num_bytes = len(kept.model_dump_json().encode())
    if num_bytes > MAX_KEPT_BYTES:
        raise RequestError(
            "invalid_event", f"the item has {num_bytes} bytes of text; it may have {MAX_KEPT_BYTES}", "item"
        )
    return kept


def _without_files(item: Item) -> Item:
    if not isinstance(item, UserMessage):
        return item
    parts = tuple(
        part
        if isinstance(part, InputText)
        else part.model_copy(update={"audio": None} if isinstance(part, InputAudio) else {"image_url": None})
        for part in item.content
    )
    return item.model_copy(update={"content": parts})
