"""The items of a session: their order, their ids, and what is left of an answer that was cut."""

from __future__ import annotations

import pytest

from antiphon.server.events.items import AssistantMessage, InputText, OutputAudio, OutputText, UserMessage
from antiphon.server.realtime.conversation import MAX_ITEMS, ROOT, Conversation, RequestError


def said(item_id: str) -> UserMessage:
    return UserMessage(id=item_id, content=(InputText(text=item_id),))


def spoken(item_id: str, words: str) -> AssistantMessage:
    return AssistantMessage(id=item_id, content=(OutputAudio(transcript=words),))


def conversation(*ids: str) -> Conversation:
    made = Conversation()
    for item_id in ids:
        made.append(said(item_id))
    return made


def ids(made: Conversation) -> list[str | None]:
    return [item.id for item in made.items]


@pytest.mark.parametrize(
    ("place", "order", "previous"),
    [
        (None, ["a", "b", "c", "new"], "c"),
        (ROOT, ["new", "a", "b", "c"], None),
        ("a", ["a", "new", "b", "c"], "a"),
        ("c", ["a", "b", "c", "new"], "c"),
    ],
)
def test_an_item_comes_behind_the_one_that_is_named(place: str | None, order: list[str], previous: str | None) -> None:
    made = conversation("a", "b", "c")
    assert made.insert(said("new"), place) == previous
    assert ids(made) == order
    assert made.before("new") == previous


def test_the_first_item_has_none_before_it() -> None:
    made = Conversation()
    assert made.append(said("a")) is None
    assert made.append(said("b")) == "a"
    assert len(made) == 2


def test_what_is_refused_changes_nothing() -> None:
    made = conversation("a", "b")
    with pytest.raises(RequestError) as twice:
        made.insert(said("a"), None)
    with pytest.raises(RequestError) as nowhere:
        made.insert(said("c"), "no")
    with pytest.raises(RequestError) as missing:
        made.delete("no")
    refused = [(error.value.code, error.value.param) for error in (twice, nowhere, missing)]
    assert refused == [
        ("item_create_duplicate_item_id", "item.id"),
        ("item_not_found", "previous_item_id"),
        ("item_not_found", "item_id"),
    ]
    assert ids(made) == ["a", "b"]


def test_a_deleted_item_is_gone_and_its_name_is_free() -> None:
    made = conversation("a", "b", "c")
    made.delete("b")
    with pytest.raises(RequestError):
        made.get("b")
    assert made.before("c") == "a"
    made.insert(said("b"), "a")
    assert ids(made) == ["a", "b", "c"]


def test_a_new_version_stands_in_the_place_of_the_old_one() -> None:
    made = conversation("a", "b", "c")
    new = UserMessage(id="b", content=())
    made.replace(new)
    assert made.get("b") is new
    assert ids(made) == ["a", "b", "c"]


def test_of_very_many_items_the_oldest_are_forgotten() -> None:
    made = conversation(*map(str, range(MAX_ITEMS + 3)))
    assert len(made) == MAX_ITEMS
    assert ids(made)[0] == "3"
    with pytest.raises(RequestError):
        made.get("2")


def test_a_cut_answer_has_the_words_that_were_heard() -> None:
    made = conversation("a")
    made.append(spoken("b", "It is a cat."))
    made.cut("b", 0, "It is")
    assert made.get("b") == AssistantMessage(id="b", status="incomplete", content=(OutputAudio(transcript="It is"),))


@pytest.mark.parametrize(
    ("item_id", "content_index", "code"),
    [
        ("no", 0, "item_not_found"),
        ("typed", 0, "item_not_truncatable"),
        ("spoken", 1, "content_not_found"),
        ("written", 0, "content_not_found"),
    ],
)
def test_only_the_sound_of_an_answer_can_be_cut(item_id: str, content_index: int, code: str) -> None:
    made = conversation("typed")
    made.append(spoken("spoken", "It is a cat."))
    made.append(AssistantMessage(id="written", content=(OutputText(text="It is a cat."),)))
    before = made.items
    with pytest.raises(RequestError) as refused:
        made.cut(item_id, content_index, "")
    assert refused.value.code == code
    assert made.items == before
