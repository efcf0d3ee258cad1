"""A realtime session without its socket: what a client asks and what happens in its call, as events to send.

Sound is heard as it comes and the model decides by itself when to answer; a response that is asked for is the same
with a wish. While the client sends nothing and an answer is due or under way, the call hears silence instead.
Shown by tests/server/test_realtime.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, Protocol, assert_never

import numpy as np

from antiphon.core.duplex import Wish
from antiphon.core.events import (
    InputRefused,
    SessionEnded,
    SpeechLost,
    TurnEnded,
    TurnInterrupted,
    UnitDecided,
)
from antiphon.errors import InputError
from antiphon.happenings import Happening, Speech
from antiphon.server.audio import Decoder, Samples, decode_base64
from antiphon.server.events.client import (
    AudioAppend,
    AudioClear,
    AudioCommit,
    ClientEvent,
    EventError,
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
    ResponseCancel,
    ResponseCreate,
    SessionUpdateEvent,
    TextAppend,
)
from antiphon.server.events.ids import Ids
from antiphon.server.events.items import InputAudio, InputText, Item, SystemMessage, UserMessage
from antiphon.server.events.server import (
    AudioCleared,
    AudioCommitted,
    ErrorDetails,
    ErrorEvent,
    ItemAdded,
    ItemDeleted,
    ItemDone,
    ItemRetrieved,
    ItemTruncated,
    ServerEvent,
    SessionCreated,
    SessionUpdated,
    StatusDetails,
)
from antiphon.server.events.session import AudioFormat, AudioInput, AudioOutput, Session, SessionUpdate
from antiphon.server.pacing import Pacer, PacingConfig
from antiphon.server.realtime.answer import Answer, AnswerSettings
from antiphon.server.realtime.conversation import Conversation, RequestError
from antiphon.server.realtime.feeding import Feeder
from antiphon.units import INPUT_RATE_HZ, UNIT_S

MIN_COMMIT_MS = 100
"""The official service refuses to commit less."""

Events = Iterator[ServerEvent]
CancelReason = Literal["turn_detected", "client_cancelled"]


class Caller(Protocol):
    """The call of a session: `antiphon.aio.AsyncSession`."""

    def send_audio(self, samples: Samples) -> None: ...

    def send_text(self, text: str) -> None: ...

    def wish(self, wish: Wish) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class Opener(Protocol):
    """Starts the call when it is needed first, with the settings of then."""

    def __call__(self, instructions: str) -> Caller: ...


class RealtimeSession:
    """Owns what the client sees: settings, items, the response under way. Used by one task."""

    def __init__(
        self, ids: Ids, session: Session, opener: Opener, pacing: PacingConfig, max_input_samples: int
    ) -> None:
        self._ids = ids
        self._session = session
        self._opener = opener
        self._call: Caller | None = None
        self._conversation = Conversation()
        self._conversation_id = ids.conversation()
        self._decoder = Decoder(_input_format(session).wire_format())
        self._pacer = Pacer(pacing)
        self._answer: Answer | None = None
        self._answers_ms: dict[str, int] = {}  # sound of every answer that is over
        self._void_turn = -1  # words and sound of it and of earlier ones are not wanted any more
        self._num_uncommitted_ms = 0.0
        self._num_unanswered_ms = 0.0
        self._feeder = Feeder(max_input_samples)
        self._quiet_since_s = 0.0  # since when nothing was heard, on the caller's clock
        self.is_over = False

    def greet(self) -> Events:
        yield SessionCreated(event_id=self._ids.event(), session=self._session)

    def obey(self, event: ClientEvent, now_s: float) -> Events:
        """Answer a client's event; what cannot be done is answered with an error, and the session goes on."""
        try:
            yield from self._obey(event, now_s)
        except InputError as error:
            yield self.error(error, event.event_id)

    def error(self, error: InputError, event_id: str | None) -> ServerEvent:
        """event_id: of the client's event, if it has one."""
        param = error.param if isinstance(error, RequestError | EventError) else None
        details = ErrorDetails(
            type="invalid_request_error", code=error.code, message=str(error), param=param, event_id=event_id
        )
        return ErrorEvent(event_id=self._ids.event(), error=details)

    def happened(self, happening: Happening, now_s: float) -> Events:
        """Tell the client what it should know of what happened in its call."""
        match happening:
            case UnitDecided():
                yield from self._decide(happening)
            case Speech():
                yield from self._hear_speech(happening, now_s)
            case TurnEnded(turn=turn) if self._answer is not None and self._answer.turn == turn:
                self._pacer.end(self._answer.response_id)
                yield from self.due(now_s)
            case TurnInterrupted(turn=turn) | SpeechLost(turn=turn) if self._answer and self._answer.turn == turn:
                # Of an answer that the client stopped, this comes when the next one may have begun.
                yield from self._cut("turn_detected", now_s)
            case InputRefused():
                self._feeder.decided()
                self._feed()
                yield self.error(InputError(happening.message), None)
            case SessionEnded():
                yield from self._end(happening)
            case _:
                pass  # costs and slides are for who asked for vendors' events

    def due(self, now_s: float) -> Events:
        """Sound that leaves now, and the end of an answer that has left."""
        for piece in self._pacer.due(now_s):
            answer = self._answer
            if answer is None or answer.response_id != piece.owner:
                continue
            if piece.is_last:
                yield from self._finish(answer)
            elif answer.is_audio:
                yield from answer.sound(piece.samples)

    def next_due_s(self, now_s: float) -> float:
        """When `due` or `keep_going` may have something to do; infinite if not before the next event."""
        silence_s = self._quiet_since_s + UNIT_S if self._answer is not None else float("inf")
        return min(self._pacer.next_due_s(now_s), max(now_s, silence_s))

    def keep_going(self, now_s: float) -> None:
        """Let the call hear silence if the client sends nothing while an answer is due or under way."""
        is_due = now_s - self._quiet_since_s >= UNIT_S and self._feeder.is_empty
        if self._answer is not None and is_due:
            self._hear_silence(now_s)

    def leave(self) -> None:
        """The client has gone."""
        self.is_over = True
        if self._call is not None:
            self._call.close()

    def _obey(self, event: ClientEvent, now_s: float) -> Events:
        match event:
            case SessionUpdateEvent(session=update):
                yield from self._update(update)
            case ResponseCreate():
                yield from self._create_response(event, now_s)
            case ResponseCancel(response_id=response_id):
                yield from self._cancel(response_id, now_s)
            case ItemTruncate():
                yield from self._truncate(event, now_s)
            case ItemCreate() | ItemRetrieve() | ItemDelete():
                yield from self._obey_about_items(event)
            case _:
                yield from self._obey_about_input(event, now_s)

    def _obey_about_input(self, event: ClientEvent, now_s: float) -> Events:
        match event:
            case AudioAppend(audio=audio):
                samples = self._decoder.decode(decode_base64(audio))
                self._num_uncommitted_ms += 1000 * len(samples) / INPUT_RATE_HZ
                self._hear(samples, now_s)
            case AudioCommit():
                yield from self._commit()
            case AudioClear():
                self._num_uncommitted_ms = 0.0
                yield AudioCleared(event_id=self._ids.event())
            case TextAppend(text=text):
                self._open().send_text(text)
            case other:
                raise RequestError("unsupported_event", f"{other.type} is not supported here", "type")

    def _obey_about_items(self, event: ItemCreate | ItemRetrieve | ItemDelete) -> Events:
        match event:
            case ItemCreate(item=item, previous_item_id=previous_item_id):
                yield from self._create_item(item, previous_item_id)
            case ItemRetrieve(item_id=item_id):
                yield ItemRetrieved(event_id=self._ids.event(), item=self._conversation.get(item_id))
            case ItemDelete(item_id=item_id):
                self._conversation.delete(item_id)
                yield ItemDeleted(event_id=self._ids.event(), item_id=item_id)
            case never:
                assert_never(never)

    def _open(self) -> Caller:
        if self._call is None:
            self._call = self._opener(self._session.instructions)
        return self._call

    def _hear(self, samples: Samples, now_s: float) -> None:
        self._feeder.put(samples)
        self._quiet_since_s = now_s
        self._num_unanswered_ms += 1000 * len(samples) / INPUT_RATE_HZ
        self._feed()

    def _hear_silence(self, now_s: float) -> None:
        """What is left of the second that was begun, or a whole one."""
        self._hear(np.zeros(self._feeder.num_missing_samples, np.float32), now_s)

    def _feed(self) -> None:
        call = self._open()
        for piece in self._feeder.ready():
            if isinstance(piece, Wish):
                call.wish(piece)
            else:
                call.send_audio(piece)

    def _update(self, update: SessionUpdate) -> Events:
        is_changed = update.instructions not in (None, self._session.instructions)
        if is_changed and self._call is not None:
            raise RequestError(
                "instructions_update_unsupported",
                "instructions are part of what the model has read; set them before the first sound",
                "session.instructions",
            )
        changes: dict[str, object] = {}
        for name in ("instructions", "output_modalities", "tools", "tool_choice", "max_output_tokens", "tracing"):
            if name in update.model_fields_set:
                changes[name] = dict(update)[name]
        audio = self._session.audio
        if update.audio is not None:
            wanted_in, wanted_out = update.audio.input, update.audio.output
            if wanted_in is not None and audio.input is not None:
                audio = audio.model_copy(update={"input": audio.input.model_copy(update=_given(wanted_in))})
            if wanted_out is not None and audio.output is not None:
                audio = audio.model_copy(update={"output": audio.output.model_copy(update=_given(wanted_out))})
            changes["audio"] = audio
        before = _input_format(self._session)
        self._session = self._session.model_copy(update=changes)
        if _input_format(self._session) != before:
            self._decoder = Decoder(_input_format(self._session).wire_format())
        yield SessionUpdated(event_id=self._ids.event(), session=self._session)

    def _commit(self) -> Events:
        if self._num_uncommitted_ms < MIN_COMMIT_MS:
            raise RequestError(
                "input_audio_buffer_commit_empty",
                f"the buffer holds {self._num_uncommitted_ms:.0f} ms of audio; at least {MIN_COMMIT_MS} are needed",
            )
        self._num_uncommitted_ms = 0.0
        item = UserMessage(id=self._ids.item(), content=(InputAudio(),))
        previous = self._conversation.append(item)
        assert item.id is not None, "an item has an id"
        yield AudioCommitted(event_id=self._ids.event(), previous_item_id=previous, item_id=item.id)
        yield from self._tell_item(item, previous)

    def _create_item(self, item: Item, previous_item_id: str | None) -> Events:
        named = item if item.id is not None else item.model_copy(update={"id": self._ids.item()})
        previous = self._conversation.insert(named, previous_item_id)
        if isinstance(named, UserMessage | SystemMessage):
            words = [part.text for part in named.content if isinstance(part, InputText)]
            try:
                if words:
                    self._open().send_text("\n".join(words))
            except InputError:
                assert named.id is not None, "an item has an id"
                self._conversation.delete(named.id)
                raise
        yield from self._tell_item(named, previous)

    def _tell_item(self, item: Item, previous: str | None) -> Events:
        yield ItemAdded(event_id=self._ids.event(), previous_item_id=previous, item=item)
        yield ItemDone(event_id=self._ids.event(), previous_item_id=previous, item=item)

    def _truncate(self, event: ItemTruncate, now_s: float) -> Events:
        answer = self._answer
        if answer is not None and answer.item_id == event.item_id:
            audio_ms = answer.num_audio_ms
            yield from self._stop("client_cancelled", now_s)
        else:
            audio_ms = self._answers_ms.get(event.item_id, 0)
        self._conversation.truncate(event.item_id, event.content_index, event.audio_end_ms, audio_ms)
        yield ItemTruncated(
            event_id=self._ids.event(),
            item_id=event.item_id,
            content_index=event.content_index,
            audio_end_ms=event.audio_end_ms,
        )

    def _create_response(self, event: ResponseCreate, now_s: float) -> Events:
        if self._answer is not None:
            raise RequestError(
                "conversation_already_has_active_response",
                f"response {self._answer.response_id!r} is under way; wait for it or cancel it",
            )
        options = event.response
        settings = self._answer_settings()
        if options is not None:
            settings = replace(
                settings,
                metadata=options.metadata,
                modalities=options.output_modalities or settings.modalities,
            )
        self._answer = self._begin(settings)
        yield self._answer.created()
        # What is left of the second is silence: who asks for an answer has said what there was to say.
        self._feeder.put_wish(Wish.SPEAK)
        self._hear_silence(now_s)

    def _cancel(self, response_id: str | None, now_s: float) -> Events:
        answer = self._answer
        if answer is None or response_id not in (None, answer.response_id):
            raise RequestError("response_cancel_not_active", "Cancellation failed: no active response found")
        yield from self._stop("client_cancelled", now_s)

    def _stop(self, reason: CancelReason, now_s: float) -> Events:
        """Stop the answer in the call too."""
        if self._call is not None:
            self._call.interrupt()
        yield from self._cut(reason, now_s)

    def _cut(self, reason: CancelReason, now_s: float) -> Events:
        """The answer is over here; what waits of it is dropped."""
        answer, self._answer = self._answer, None
        self._pacer.cut(now_s)
        if answer is None:
            return
        if answer.turn is not None:
            self._void_turn = max(self._void_turn, answer.turn)
        self._answers_ms[answer.item_id] = answer.num_audio_ms
        yield from answer.end("cancelled", StatusDetails(type="cancelled", reason=reason))

    def _decide(self, decided: UnitDecided) -> Events:
        self._feeder.decided()
        self._feed()
        for said in decided.said:
            if said.turn > self._void_turn:
                yield from self._say(said.turn, said.text, len(decided.token_ids))

    def _say(self, turn: int, words: str, num_tokens: int) -> Events:
        if self._answer is not None and self._answer.turn not in (None, turn):
            # The turn before it has been decided to its end, and its sound is on its way: it goes on first.
            self._pacer.end(self._answer.response_id)
            yield from self._finish(self._answer)
        if self._answer is None:
            self._answer = self._begin(self._answer_settings())
            yield self._answer.created()
        if self._answer.turn is None:
            yield from self._answer.speak(turn)
        self._answer.num_text_tokens += num_tokens
        yield from self._answer.say(words)

    def _hear_speech(self, speech: Speech, now_s: float) -> Events:
        answer = self._answer
        if answer is not None and answer.turn == speech.chunk.address.turn and speech.samples.numel():
            self._pacer.queue(answer.response_id, speech.samples.numpy())
            yield from self.due(now_s)

    def _finish(self, answer: Answer) -> Events:
        self._answer = None
        self._answers_ms[answer.item_id] = answer.num_audio_ms
        yield from answer.end("completed", StatusDetails(type="completed"))

    def _end(self, ended: SessionEnded) -> Events:
        self.is_over = True
        if self._answer is not None:
            yield from self._answer.fail(ended.code, ended.message)
            self._answer = None
        if ended.code != "completed":
            details = ErrorDetails(type="server_error", code=ended.code, message=ended.message)
            yield ErrorEvent(event_id=self._ids.event(), error=details)

    def _begin(self, settings: AnswerSettings) -> Answer:
        num_input_ms, self._num_unanswered_ms = round(self._num_unanswered_ms), 0.0
        return Answer.begin(self._ids, settings, self._conversation, num_input_ms)

    def _answer_settings(self) -> AnswerSettings:
        output = self._session.audio.output
        assert output is not None, "a session has its output decided"
        assert output.format is not None, "a session has its output format decided"
        return AnswerSettings(
            self._conversation_id, self._session.output_modalities, output.format.wire_format(), metadata=None
        )


def _input_format(session: Session) -> AudioFormat:
    assert session.audio.input is not None, "a session has its input decided"
    assert session.audio.input.format is not None, "a session has its input format decided"
    return session.audio.input.format


def _given(part: AudioInput | AudioOutput) -> dict[str, object]:
    """The fields that a client wrote."""
    return {name: value for name, value in part if name in part.model_fields_set}
