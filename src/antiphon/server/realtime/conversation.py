"""The items of one session in order: what the client put there, what was heard of it, and what was said.

A record for the client; what the model remembers is its own context. Shown by tests/server/test_conversation.py.
"""

from __future__ import annotations

from antiphon.errors import InputError
from antiphon.server.events.items import AssistantMessage, Item, OutputAudio
from antiphon.server.realtime.codes import RequestCode

ROOT = "root"
"""Stands for the place in front of the first item."""
MAX_ITEMS = 2048
"""Of a call that goes on for days the oldest ones are forgotten."""
MAX_CHARACTERS = 2**22
"""Of all items together, as JSON; the newest one stays, however long it is."""


class RequestError(InputError):
    """A request that cannot be done; the session goes on. code, param: for the client."""

    def __init__(self, code: RequestCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Conversation:
    """Owns the items of one session; all of them have an id."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._num_characters: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(self._items)

    def append(self, item: Item) -> str | None:
        """Returns the id of the item before it, if there is one."""
        return self.insert(item, self._id(len(self._items) - 1))

    def insert(self, item: Item, previous_item_id: str | None) -> str | None:
        """Put an item behind another one, `ROOT` for the front, None for the end. Returns the id before it.

        Raises: RequestError if there is no such item, or one of this id is there.
        """
        assert item.id is not None, "an item comes with its id"
        if any(one.id == item.id for one in self._items):
            # LiveKit, which sends an item again when it does not know whether it came, goes by this code.
            raise RequestError("item_create_duplicate_item_id", f"an item {item.id!r} is there already", "item.id")
        match previous_item_id:
            case None:
                index = len(self._items)
            case "root":
                index = 0
            case _:
                index = self._index(previous_item_id, "previous_item_id") + 1
        self._items.insert(index, item)
        previous = self._id(index - 1)
        self._num_characters[item.id] = len(item.model_dump_json())
        while len(self._items) > MAX_ITEMS or sum(self._num_characters.values()) > MAX_CHARACTERS:
            if len(self._items) == 1:
                break
            self._forget(0)
        return previous

    def get(self, item_id: str) -> Item:
        """Raises: RequestError if there is no such item."""
        return self._items[self._index(item_id, "item_id")]

    def check_there(self, item_id: str, code: RequestCode) -> None:
        """Raises: RequestError of this code if there is no such item."""
        if all(item.id != item_id for item in self._items):
            raise RequestError(code, f"there is no item {item_id!r}", "item_id")

    def before(self, item_id: str) -> str | None:
        """The id of the item in front of one; of one that was deleted, none."""
        for index, item in enumerate(self._items):
            if item.id == item_id:
                return self._id(index - 1)
        return None

    def replace(self, item: Item) -> None:
        """Put a new version in the place of an item, unless that was deleted."""
        self._items = [item if one.id == item.id else one for one in self._items]

    def delete(self, item_id: str) -> None:
        """Raises: RequestError if there is no such item."""
        self._forget(self._index(item_id, "item_id"))

    def check_spoken(self, item_id: str, content_index: int) -> None:
        """Raises: RequestError if there is no such item, or no sound of an answer there."""
        item = self.get(item_id)
        if not isinstance(item, AssistantMessage):
            raise RequestError("item_not_truncatable", f"{item_id!r} is no answer; only answers are cut", "item_id")
        if content_index >= len(item.content) or not isinstance(item.content[content_index], OutputAudio):
            raise RequestError("content_not_found", f"{item_id!r} has no sound at {content_index}", "content_index")

    def cut(self, item_id: str, content_index: int, heard: str) -> None:
        """Leave of an answer's words those that were heard. Raises: as `check_spoken`."""
        self.check_spoken(item_id, content_index)
        item = self.get(item_id)
        assert isinstance(item, AssistantMessage), "it was checked"
        content = list(item.content)
        content[content_index] = OutputAudio(transcript=heard)
        self.replace(item.model_copy(update={"content": tuple(content), "status": "incomplete"}))

    def _forget(self, index: int) -> None:
        item_id = self._items.pop(index).id
        assert item_id is not None, "an item comes with its id"
        del self._num_characters[item_id]

    def _index(self, item_id: str, param: str) -> int:
        for index, item in enumerate(self._items):
            if item.id == item_id:
                return index
        raise RequestError("item_not_found", f"there is no item {item_id!r}", param)

    def _id(self, index: int) -> str | None:
        return self._items[index].id if index >= 0 else None
