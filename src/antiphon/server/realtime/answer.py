"""One response from its creation to its end, as events. Sound that waits is the pacer's.

    response.created · item added · part added · deltas · part done · item done · response.done

Shown by tests/server/test_realtime.py.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from antiphon.server.audio import Encoder, Samples, WireFormat
from antiphon.server.events.ids import Ids
from antiphon.server.events.items import AssistantMessage, AudioPart, OutputAudio, OutputText, TextPart
from antiphon.server.events.server import (
    AudioDelta,
    AudioDone,
    CachedTokens,
    ContentPartAdded,
    ContentPartDone,
    ItemAdded,
    ItemDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTokens,
    Response,
    ResponseCreated,
    ResponseDone,
    ServerEvent,
    StatusDetails,
    StatusError,
    TextDelta,
    TextDone,
    TranscriptDelta,
    TranscriptDone,
    Usage,
)
from antiphon.server.events.session import Modalities
from antiphon.server.realtime.conversation import Conversation
from antiphon.units import OUTPUT_RATE_HZ

MS_PER_INPUT_TOKEN = 100
MS_PER_OUTPUT_TOKEN = 50
"""How the official service counts sound (WIRE B4)."""

End = Literal["completed", "cancelled", "failed", "incomplete"]


class _Place(TypedDict):
    """What every event about a part has."""

    event_id: str
    response_id: str
    item_id: str
    output_index: int
    content_index: int


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """What a response is made with. modalities: one of them. metadata: the client's."""

    conversation_id: str
    modalities: Modalities
    format: WireFormat
    metadata: dict[str, str] | None


@dataclass(slots=True)
class Answer:
    """A response that is not done. turn: of the engine's, once the model speaks. num_*: so far."""

    ids: Ids
    settings: AnswerSettings
    conversation: Conversation
    num_input_ms: int
    response_id: str
    item_id: str
    encoder: Encoder
    turn: int | None = None
    words: list[str] = field(default_factory=list)
    num_text_tokens: int = 0
    num_sent_samples: int = 0

    @staticmethod
    def begin(ids: Ids, settings: AnswerSettings, conversation: Conversation, num_input_ms: int) -> Answer:
        """num_input_ms: of sound that it answers."""
        encoder = Encoder(settings.format)
        return Answer(ids, settings, conversation, num_input_ms, ids.response(), ids.item(), encoder)

    @property
    def is_audio(self) -> bool:
        return "audio" in self.settings.modalities

    @property
    def num_audio_ms(self) -> int:
        return 1000 * self.num_sent_samples // OUTPUT_RATE_HZ

    def created(self) -> ServerEvent:
        return ResponseCreated(event_id=self.ids.event(), response=self._response("in_progress", None, ()))

    def speak(self, turn: int) -> Iterator[ServerEvent]:
        """The model begins to answer."""
        self.turn = turn
        item = self._item("in_progress")
        previous = self.conversation.append(item)
        yield OutputItemAdded(event_id=self.ids.event(), response_id=self.response_id, output_index=0, item=item)
        yield ItemAdded(event_id=self.ids.event(), previous_item_id=previous, item=item)
        yield ContentPartAdded(**self._place(), part=self._part(""))

    def say(self, words: str) -> Iterator[ServerEvent]:
        """Words of the answer."""
        if words:
            self.words.append(words)
            if self.is_audio:
                yield TranscriptDelta(**self._place(), delta=words)
            else:
                yield TextDelta(**self._place(), delta=words)

    def sound(self, samples: Samples) -> Iterator[ServerEvent]:
        """Sound that leaves now."""
        self.num_sent_samples += len(samples)
        yield from self._delta(self.encoder.encode(samples))

    def end(self, status: End, details: StatusDetails) -> Iterator[ServerEvent]:
        """Everything that closes a response, whatever it came to."""
        output: tuple[AssistantMessage, ...] = ()
        if self.turn is not None:
            text = "".join(self.words)
            if self.is_audio:
                yield from self._delta(self.encoder.flush() if status == "completed" else b"")
                yield AudioDone(**self._place())
                yield TranscriptDone(**self._place(), transcript=text)
            else:
                yield TextDone(**self._place(), text=text)
            yield ContentPartDone(**self._place(), part=self._part(text))
            item = self._item("completed" if status == "completed" else "incomplete")
            self.conversation.replace(item)
            previous = self.conversation.before(self.item_id)
            yield OutputItemDone(event_id=self.ids.event(), response_id=self.response_id, output_index=0, item=item)
            yield ItemDone(event_id=self.ids.event(), previous_item_id=previous, item=item)
            output = (item,)
        yield ResponseDone(event_id=self.ids.event(), response=self._response(status, details, output))

    def fail(self, code: str, message: str) -> Iterator[ServerEvent]:
        error = StatusError(type="server_error", code=code, message=message)
        yield from self.end("failed", StatusDetails(type="failed", error=error))

    def _delta(self, payload: bytes) -> Iterator[ServerEvent]:
        if payload:
            yield AudioDelta(**self._place(), delta=base64.b64encode(payload).decode())

    def _place(self) -> _Place:
        return {
            "event_id": self.ids.event(),
            "response_id": self.response_id,
            "item_id": self.item_id,
            "output_index": 0,
            "content_index": 0,
        }

    def _part(self, text: str) -> AudioPart | TextPart:
        return AudioPart(transcript=text) if self.is_audio else TextPart(text=text)

    def _item(self, status: Literal["in_progress", "completed", "incomplete"]) -> AssistantMessage:
        text = "".join(self.words)
        part = OutputAudio(transcript=text) if self.is_audio else OutputText(text=text)
        return AssistantMessage(id=self.item_id, status=status, content=() if status == "in_progress" else (part,))

    def _response(
        self,
        status: Literal["in_progress", "completed", "cancelled", "failed", "incomplete"],
        details: StatusDetails | None,
        output: tuple[AssistantMessage, ...],
    ) -> Response:
        return Response(
            id=self.response_id,
            status=status,
            status_details=details,
            output=output,
            conversation_id=self.settings.conversation_id,
            output_modalities=self.settings.modalities,
            max_output_tokens="inf",
            usage=None if status == "in_progress" else self._usage(),
            metadata=self.settings.metadata,
        )

    def _usage(self) -> Usage:
        taken = CachedTokens(audio_tokens=self.num_input_ms // MS_PER_INPUT_TOKEN)
        given = OutputTokens(text_tokens=self.num_text_tokens, audio_tokens=self.num_audio_ms // MS_PER_OUTPUT_TOKEN)
        return Usage.count(taken, CachedTokens(), given)
