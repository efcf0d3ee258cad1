"""What a client of `/v1/realtime` may rely on, checked over everything that one session was told.

Every event is read by its strict class. Ids are new where they have to be, an item's place is after one that is there,
at most one response goes on at a time, and a response that is done is one of the two sentences below. It does not know
what a test wanted to hear. Shown to find what is wrong by tests/server/test_lifecycle.py.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from antiphon.server.events.items import AssistantMessage, AudioPart, Item, OutputAudio, OutputText, TextPart
from antiphon.server.events.server import (
    OFFICIAL_SERVER_EVENTS,
    AudioCleared,
    AudioCommitted,
    AudioDelta,
    AudioDone,
    ContentPartAdded,
    ContentPartDone,
    ErrorDetails,
    ErrorEvent,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemTruncated,
    OutputItemAdded,
    OutputItemDone,
    Response,
    ResponseCreated,
    ResponseDone,
    ServerEvent,
    SessionCreated,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
    TextDone,
    TimeoutTriggered,
    TranscriptDelta,
    TranscriptDone,
)
from antiphon.server.events.vendor import (
    VENDOR_SERVER_EVENTS,
    HeartbeatAck,
    OutputCleared,
    PlaybackAcknowledged,
    ResponseSpeak,
    SessionClosed,
)
from server.raw_client import Event, RawClient, connected

EventT = TypeVar("EventT", bound=ServerEvent)

PartEvent = (
    ContentPartAdded
    | ContentPartDone
    | AudioDelta
    | AudioDone
    | ResponseSpeak
    | TranscriptDelta
    | TranscriptDone
    | TextDelta
    | TextDone
)

LETTERS: dict[type[ServerEvent], str] = {
    ResponseCreated: "C",
    OutputItemAdded: "o",
    ItemAdded: "i",
    ContentPartAdded: "p",
    ResponseSpeak: "s",
    AudioDelta: "a",
    TranscriptDelta: "w",
    TextDelta: "t",
    AudioDone: "A",
    TranscriptDone: "W",
    TextDone: "T",
    ContentPartDone: "P",
    OutputItemDone: "O",
    ItemDone: "I",
    ResponseDone: "D",
}
SENTENCES = {"audio": r"C(oips?[aw]*AWPOI)?D", "text": r"C(oips?t*TPOI)?D"}
REPLIES = (HeartbeatAck, SessionClosed, PlaybackAcknowledged, OutputCleared)
"""Vendors' events that answer a vendor's event, whoever sent it."""


@dataclass(slots=True)
class Answer:
    """One response so far. words, audio: all its deltas. response: as it was told last."""

    response: Response
    sentence: str = "C"
    item_id: str = ""
    words: str = ""
    audio: bytes = b""
    is_done: bool = False

    @property
    def status(self) -> str:
        return self.response.status

    @property
    def reason(self) -> str | None:
        assert self.response.status_details is not None, self.response
        return self.response.status_details.reason


@dataclass(slots=True)
class Told:
    """A session's events, read and found in order. items: ids, as the conversation has them at the end."""

    events: list[ServerEvent] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    _ids: set[str] = field(default_factory=set)
    _turn_id: str | None = None  # of the item that the sound of an open turn will be
    _heard_ms: int = 0

    def all(self, kind: type[EventT]) -> list[EventT]:
        return [event for event in self.events if isinstance(event, kind)]

    def one(self, kind: type[EventT]) -> EventT:
        (event,) = self.all(kind)
        return event

    @property
    def errors(self) -> list[ErrorDetails]:
        return [event.error for event in self.all(ErrorEvent)]

    def take(self, event: ServerEvent) -> None:
        """The next event."""
        assert event.event_id not in self._ids, f"{event} has the id of an earlier one"
        assert isinstance(event, SessionCreated) == (not self.events), f"{event} as number {len(self.events)}"
        self._ids.add(event.event_id)
        self.events.append(event)
        self._turn(event)
        self._pair()
        self._item(event)
        self._answer(event)

    def _turn(self, event: ServerEvent) -> None:
        match event:
            case SpeechStarted(audio_start_ms=start_ms, item_id=item_id):
                assert self._turn_id is None, f"{event} in the turn {self._turn_id}"
                assert start_ms >= self._heard_ms, f"{event} starts before {self._heard_ms} ms"
                self._turn_id, self._heard_ms = item_id, start_ms
            case SpeechStopped(audio_end_ms=end_ms, item_id=item_id):
                assert item_id == self._turn_id, f"{event} is not about {self._turn_id}"
                assert end_ms > self._heard_ms, f"{event} ends before {self._heard_ms} ms"
                self._heard_ms = end_ms
            case TimeoutTriggered(audio_start_ms=start_ms, audio_end_ms=end_ms, item_id=item_id):
                assert self._turn_id is None, f"{event} in the turn {self._turn_id}"
                assert self._heard_ms <= start_ms < end_ms, f"{event} after {self._heard_ms} ms"
                self._turn_id, self._heard_ms = item_id, end_ms
            case AudioCommitted(item_id=item_id):
                assert self._turn_id in (None, item_id), f"{event} is not about {self._turn_id}"
                self._turn_id = None
            case AudioCleared():
                self._turn_id = None

    def _pair(self) -> None:
        """What comes right behind another event, if anything does."""
        match self.events[-2:]:
            case [SpeechStopped() | TimeoutTriggered() as one, other]:
                assert isinstance(other, AudioCommitted), f"{other} after {one}"
            case [AudioCommitted(item_id=item_id, previous_item_id=previous) as one, other]:
                assert isinstance(other, ItemAdded), f"{other} after {one}"
                assert (other.item.id, other.previous_item_id) == (item_id, previous), f"{other} after {one}"
            case [ItemAdded(item=item) as one, other] if item.id not in self._answered:
                assert isinstance(other, ItemDone), f"{other} after {one}"
                assert other.item == item, f"{other} after {one}"

    @property
    def _answered(self) -> set[str]:
        """Items of answers."""
        return {answer.item_id for answer in self.answers}

    def _item(self, event: ServerEvent) -> None:
        match event:
            case ItemAdded(item=item, previous_item_id=previous):
                assert item.id is not None, f"{event} has no id"
                assert item.id not in self.items, f"{event} is there already"
                self.items.insert(0 if previous is None else self.items.index(previous) + 1, item.id)
            case ItemDone(item=item, previous_item_id=previous):
                assert self._before(item) == previous, f"{event} in {self.items}"
            case ItemDeleted(item_id=item_id):
                self.items.remove(item_id)
            case ItemTruncated(item_id=item_id):
                assert item_id in self.items, f"{event} in {self.items}"

    def _before(self, item: Item) -> str | None:
        assert item.id in self.items, f"{item.id} in {self.items}"
        index = self.items.index(item.id)
        return self.items[index - 1] if index else None

    def _answer(self, event: ServerEvent) -> None:
        """An event of a response, in its place."""
        if isinstance(event, ResponseCreated):
            assert not self.answers or self.answers[-1].is_done, f"{event} while another one goes on"
            assert event.response.id not in {answer.response.id for answer in self.answers}, f"{event} once more"
            assert event.response.status == "in_progress", event
            self.answers.append(Answer(event.response))
            return
        letter = next((letter for kind, letter in LETTERS.items() if isinstance(event, kind)), None)
        if letter is None or (isinstance(event, ItemAdded | ItemDone) and event.item.id not in self._answered):
            return
        assert self.answers, f"{event} without a response"
        answer = self.answers[-1]
        assert not answer.is_done, f"{event} after the end of its response"
        answer.sentence += letter
        _read(answer, event)


def check(events: Sequence[Event]) -> Told:
    """events: all that one session was told, from the first on. Raises: AssertionError if it may not be told like that.

    An answer may be open at the end.
    """
    told = Told()
    for event in events:
        told.take(read(event))
    _check_numbers(events, told)
    return told


def read(event: Event) -> ServerEvent:
    """By the class of its name; a vendor's has more fields than the official one of that name."""
    fields = {name: value for name, value in event.fields.items() if name != "server_event_seq"}
    kinds = [
        kind
        for kind in (*OFFICIAL_SERVER_EVENTS, *VENDOR_SERVER_EVENTS)
        if kind.model_fields["type"].default == event.kind
    ]
    assert kinds, f"no event is called {event.kind}"
    return max(kinds, key=lambda kind: len(kind.model_fields.keys() & fields)).model_validate(fields)


def _check_numbers(events: Sequence[Event], told: Told) -> None:
    """Who asked for vendors' events gets numbers with them, who did not gets neither."""
    numbers = [event.fields.get("server_event_seq") for event in events]
    start = next((place for place, number in enumerate(numbers) if number is not None), len(numbers))
    assert numbers[start:] == list(range(1, len(numbers) - start + 1)), f"numbers are {numbers}"
    for event in told.events[:start]:
        assert type(event) in OFFICIAL_SERVER_EVENTS or isinstance(event, REPLIES), f"{event}, and nobody asked for it"


def _read(answer: Answer, event: ServerEvent) -> None:
    """Check an event's names and words against what its response said before."""
    match event:
        case OutputItemAdded(response_id=response_id, item=item):
            assert response_id == answer.response.id, f"{event} is not of {answer.response.id}"
            assert item.id, f"{event} has no id"
            answer.item_id = item.id
            _check_item(item, "in_progress", ())
        case ItemAdded(item=item):
            _check_item(item, "in_progress", ())
        case OutputItemDone(item=item) | ItemDone(item=item):
            assert isinstance(item, AssistantMessage), event
            assert item.status in ("completed", "incomplete"), event
            _check_item(item, item.status, (answer.words,))
        case ResponseDone(response=response):
            _check_done(answer, response)
            answer.response, answer.is_done = response, True
        case ContentPartAdded() | ContentPartDone() | AudioDelta() | AudioDone() | ResponseSpeak():
            _read_part(answer, event)
        case TranscriptDelta() | TranscriptDone() | TextDelta() | TextDone():
            _read_part(answer, event)


def _read_part(answer: Answer, event: PartEvent) -> None:
    match event:
        case ContentPartAdded(part=AudioPart(transcript=words) | TextPart(text=words)):
            assert words == "", event
        case AudioDelta(delta=delta):
            answer.audio += base64.b64decode(delta, validate=True)
        case TranscriptDelta(delta=words) | TextDelta(delta=words):
            assert words, event
            answer.words += words
        case TranscriptDone(transcript=words) | TextDone(text=words):
            assert words == answer.words, f"{event} after {answer.words!r}"
        case ContentPartDone(part=AudioPart(transcript=words) | TextPart(text=words)):
            assert words == answer.words, f"{event} after {answer.words!r}"
    wanted = (answer.response.id, answer.item_id, 0, 0)
    assert (event.response_id, event.item_id, event.output_index, event.content_index) == wanted, event


def _check_item(item: Item, status: str, words: tuple[str, ...]) -> None:
    assert isinstance(item, AssistantMessage), item
    assert item.status == status, item
    said = (part.transcript if isinstance(part, OutputAudio) else part.text for part in item.content)
    assert tuple(said) == words, item


def _check_done(answer: Answer, response: Response) -> None:
    (modality,) = response.output_modalities
    assert re.fullmatch(SENTENCES[modality], answer.sentence), f"{answer.sentence} is no {modality} response"
    created = answer.response
    shared = {"id", "conversation_id", "output_modalities", "max_output_tokens", "metadata"}
    assert response.model_dump(include=shared) == created.model_dump(include=shared), f"{response} of {created}"
    assert response.status_details is not None, response
    assert response.status_details.type == response.status != "in_progress", response
    assert (response.status == "failed") == (response.status_details.error is not None), response
    assert [item.id for item in response.output] == ([answer.item_id] if answer.item_id else []), response
    for item in response.output:
        kind = OutputAudio if modality == "audio" else OutputText
        assert isinstance(item, AssistantMessage), response
        assert all(isinstance(part, kind) for part in item.content), response
        _check_item(item, "completed" if response.status == "completed" else "incomplete", (answer.words,))
    usage = response.usage
    assert usage is not None, response
    taken, given = usage.input_token_details, usage.output_token_details
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens, usage
    assert usage.input_tokens == taken.text_tokens + taken.audio_tokens + taken.image_tokens, usage
    assert usage.output_tokens == given.text_tokens + given.audio_tokens, usage
    assert taken.cached_tokens <= usage.input_tokens, usage
    assert bool(given.audio_tokens) == (len(answer.audio) > 0), f"{usage} for {len(answer.audio)} bytes"


@asynccontextmanager
async def session(
    url: str,
    query: str = "",
    settings: Mapping[str, object] | None = None,
    *,
    model_decides: bool = False,
    **update: object,
) -> AsyncIterator[RawClient]:
    """A session that is checked as a whole at its end. settings, update: what it begins with.

    model_decides: it may answer unasked, also if nothing is said about that.
    """
    update |= settings or {}
    if not model_decides and "turn_detection" not in json.dumps(update):
        extra = update.get("extra_body", {})
        assert isinstance(extra, dict)
        update["extra_body"] = {"auto_response": False, **extra}
    async with connected(url, query) as client:
        await client.until("session.created")
        if update:
            await client.send("session.update", session={"type": "realtime", **update})
            await client.until("session.updated")
        yield client
    check(client.got)
