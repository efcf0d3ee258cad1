"""One response from its creation to its end, as events. Sound that waits is the pacer's.

    response.created · item added · part added · deltas · part done · item done · response.done

Shown by tests/server/test_realtime.py.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypedDict

from antiphon.server.audio import Encoder, Encoding, Samples, WireFormat
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
from antiphon.server.events.session import MaxTokens, Modalities
from antiphon.server.events.vendor import DeltaMetadata, ResponseSpeak, TextMark, TimedAudioDelta
from antiphon.server.realtime.conversation import Conversation
from antiphon.server.realtime.playback import Ledger, Playback
from antiphon.units import OUTPUT_RATE_HZ

MS_PER_INPUT_TOKEN = 100
MS_PER_OUTPUT_TOKEN = 50
"""How the official service counts sound (WIRE B4)."""
TOKENS_PER_PICTURE = 64
"""What the model makes of a picture that is not cut (REFERENCE 2)."""

End = Literal["completed", "cancelled", "failed", "incomplete"]

VENDOR_FORMATS: dict[Encoding, Literal["pcm16", "pcm_f32le", "g711_ulaw", "g711_alaw"]] = {
    Encoding.PCM16: "pcm16",
    Encoding.FLOAT32: "pcm_f32le",
    Encoding.ULAW: "g711_ulaw",
    Encoding.ALAW: "g711_alaw",
}


class _Place(TypedDict):
    """What every event about a part has."""

    event_id: str
    response_id: str
    item_id: str
    output_index: int
    content_index: int


@dataclass(frozen=True, slots=True)
class Vendor:
    """What only clients that asked for vendors' events are told. epoch: counts interruptions."""

    session_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """What a response is made with. modalities: one of them. metadata: the client's. vendor: None for the others."""

    conversation_id: str
    modalities: Modalities
    format: WireFormat
    max_tokens: MaxTokens
    metadata: dict[str, str] | None
    vendor: Vendor | None


@dataclass(frozen=True, slots=True)
class Taken:
    """What a response answers: sound and pictures since the last one."""

    audio_ms: int
    num_pictures: int


@dataclass(slots=True)
class Answer:
    """A response that is not done. turn: of the engine's, once the model speaks. is_decided: it has all its words."""

    ids: Ids
    settings: AnswerSettings
    conversation: Conversation
    taken: Taken
    playback: Playback
    encoder: Encoder
    turn: int | None = None
    is_decided: bool = False
    num_text_tokens: int = 0
    num_marks_told: int = 0

    @staticmethod
    def begin(ids: Ids, settings: AnswerSettings, conversation: Conversation, taken: Taken, ledger: Ledger) -> Answer:
        playback = ledger.begin(ids.response(), ids.item())
        return Answer(ids, settings, conversation, taken, playback, Encoder(settings.format))

    @property
    def response_id(self) -> str:
        return self.playback.response_id

    @property
    def item_id(self) -> str:
        return self.playback.item_id

    @property
    def is_audio(self) -> bool:
        return "audio" in self.settings.modalities

    @property
    def is_too_long(self) -> bool:
        """It has more tokens than it may have, or all of them and is not at its end."""
        num_wanted = self.num_text_tokens if self.is_decided else self.num_text_tokens + 1
        return self.settings.max_tokens != "inf" and num_wanted > self.settings.max_tokens

    def created(self) -> ServerEvent:
        return ResponseCreated(event_id=self.ids.event(), response=self._response("in_progress", None, ()))

    def speak(self, turn: int) -> Iterator[ServerEvent]:
        """The model begins to answer."""
        self.turn = turn
        item = self._item("in_progress")
        # The record has its part from the start, so that it can be cut while it is spoken.
        previous = self.conversation.append(item.model_copy(update={"content": (self._content(),)}))
        yield OutputItemAdded(event_id=self.ids.event(), response_id=self.response_id, output_index=0, item=item)
        yield ItemAdded(event_id=self.ids.event(), previous_item_id=previous, item=item)
        yield ContentPartAdded(**self._place(), part=self._part(""))
        if self.settings.vendor is not None:
            yield ResponseSpeak(**self._place())

    def say(self, words: str) -> Iterator[ServerEvent]:
        """Words of the answer."""
        if words:
            self.playback.words += words
            if self.is_audio:
                yield TranscriptDelta(**self._place(), delta=words)
            else:
                yield TextDelta(**self._place(), delta=words)

    def sound(self, samples: Samples, *, is_last: bool) -> Iterator[ServerEvent]:
        """Sound that leaves now."""
        self.playback.num_sent += len(samples)
        payload = self.encoder.encode(samples)
        if is_last:
            payload += self.encoder.flush()
        if payload:
            yield self._delta(base64.b64encode(payload).decode(), len(samples), is_last=is_last)

    def end(self, status: End, details: StatusDetails) -> Iterator[ServerEvent]:
        """Everything that closes a response, whatever it came to."""
        self.playback.is_over, self.playback.is_whole = True, status == "completed"
        output: tuple[AssistantMessage, ...] = ()
        if self.turn is not None:
            text = self.playback.words
            if self.is_audio:
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

    def _delta(self, delta: str, num_samples: int, *, is_last: bool) -> AudioDelta:
        vendor = self.settings.vendor
        if vendor is None:
            return AudioDelta(**self._place(), delta=delta)
        marks = [mark for mark in self.playback.marks[self.num_marks_told :] if mark.audio_ms <= self.playback.sent_ms]
        self.num_marks_told += len(marks)
        return TimedAudioDelta(
            **self._place(),
            delta=delta,
            format=VENDOR_FORMATS[self.settings.format.encoding],
            sample_rate_hz=self.settings.format.rate_hz,
            metadata=DeltaMetadata(
                session_id=vendor.session_id,
                epoch=vendor.epoch,
                end_of_turn=is_last,
                audio_duration_ms=1000 * num_samples // OUTPUT_RATE_HZ,
                audio_text_marks=tuple(
                    TextMark(text_chars=mark.num_chars, audio_end_ms=mark.audio_ms) for mark in marks
                ),
            ),
        )

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
        content = () if status == "in_progress" else (self._content(),)
        return AssistantMessage(id=self.item_id, status=status, content=content)

    def _content(self) -> OutputAudio | OutputText:
        text = self.playback.words
        return OutputAudio(transcript=text) if self.is_audio else OutputText(text=text)

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
            max_output_tokens=self.settings.max_tokens,
            usage=None if status == "in_progress" else self._usage(),
            metadata=self.settings.metadata,
        )

    def _usage(self) -> Usage:
        taken = CachedTokens(
            audio_tokens=self.taken.audio_ms // MS_PER_INPUT_TOKEN,
            image_tokens=self.taken.num_pictures * TOKENS_PER_PICTURE,
        )
        num_audio_tokens = self.playback.sent_ms // MS_PER_OUTPUT_TOKEN
        given = OutputTokens(text_tokens=self.num_text_tokens, audio_tokens=num_audio_tokens)
        return Usage.count(taken, CachedTokens(), given)
