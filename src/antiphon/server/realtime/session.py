"""A realtime session without its socket: what a client asks and what happens in its call, as events to send.

Who decides that the model answers is the client's choice (`AnswersWhen`); a response that is asked for is a wish. While
the client sends nothing and an answer is due or under way, the call hears silence instead. What only vendors' clients
know is in `vendor.py`. Shown by tests/server/test_realtime.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import assert_never

from antiphon.aio import AsyncSession, Picture
from antiphon.core.duplex import Wish
from antiphon.core.events import (
    ChangeRefused,
    InputRefused,
    SessionEnded,
    SessionOpened,
    SettingsChanged,
    SpeechLost,
    TurnInterrupted,
    UnitDecided,
    UnitFinished,
    WindowSlid,
)
from antiphon.errors import InputError
from antiphon.happenings import Happening, Speech
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
    OutputClear,
    ResponseCancel,
    ResponseCreate,
    ResponseOptions,
    SessionUpdateEvent,
    TextAppend,
)
from antiphon.server.events.ids import Ids
from antiphon.server.events.items import (
    InputAudio,
    Item,
    UserMessage,
)
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
    SpeechStarted,
    SpeechStopped,
    TimeoutTriggered,
)
from antiphon.server.events.session import ServerVad, Session
from antiphon.server.events.vendor import OutputCleared
from antiphon.server.pacing import PacingConfig
from antiphon.server.realtime import item_content
from antiphon.server.realtime.answer import AnswerSettings, Vendor
from antiphon.server.realtime.answering import Answering, CancelReason
from antiphon.server.realtime.codes import RequestCode
from antiphon.server.realtime.conversation import Conversation, RequestError
from antiphon.server.realtime.hearing import Hearing
from antiphon.server.realtime.incoming import Incoming
from antiphon.server.realtime.session_call import Opener, SessionCall
from antiphon.server.realtime.settings import AnswersWhen, Offer, changed, check_tool_choice, first_choices
from antiphon.server.realtime.vendor import Reported, VendorSide
from antiphon.server.vad.detector import IdleTimeout, Started, Stopped, TurnEvent

Events = Iterator[ServerEvent]

NO_SUCH_ITEM: dict[str, RequestCode] = {
    "conversation.item.retrieve": "item_retrieve_invalid_item_id",
    "conversation.item.delete": "item_delete_invalid_item_id",
    "conversation.item.truncate": "item_truncate_invalid_item_id",
}
"""The official codes. Pipecat goes on after the first of them and stops at any that it does not know."""


class RealtimeSession:
    """Owns what the client sees: settings, items, the response under way. Used by one task.

    model: what it is called. has_vendor_events: the client asked for them already. now_s: on the clock of all methods.
    """

    def __init__(
        self,
        ids: Ids,
        model: str,
        offer: Offer,
        opener: Opener,
        *,
        has_vendor_events: bool,
        now_s: float,
    ) -> None:
        self._ids = ids
        self._offer = offer
        self._call = SessionCall(opener)
        session = Session(id=ids.session(), model=model)
        self._choices = first_choices(session, offer, has_vendor_events=has_vendor_events)
        self._conversation = Conversation()
        self._conversation_id = ids.conversation()
        form = self._choices.input_format.wire_format()
        self._hearing = Hearing(form, offer.max_input_samples, offer.speech_models, now_s)
        self._answering = Answering(
            ids, self._conversation, PacingConfig(), self._answer_settings, self._hearing.take, self._call.interrupt
        )
        self._vendor = VendorSide(ids, session.id, self._answering)
        self._next_item_id = ids.item()
        self._was_answering = False
        self._update_id: str | None = None  # of the client's last `session.update`, if it has one
        self.end: str | None = None
        """Why the session is over: the code of the error, or `completed`; None while it goes on."""

    @property
    def session(self) -> Session:
        """As the client sees it."""
        return self._choices.session

    @property
    def has_vendor_events(self) -> bool:
        return self._choices.has_vendor_events

    @property
    def idle_s(self) -> float:
        """The client may say nothing for so long."""
        return self._choices.idle_s

    @property
    def num_received(self) -> int:
        """Messages of the client that were taken, over all its sockets."""
        return self._vendor.num_received

    def count_message(self) -> None:
        """One more came, whatever it was."""
        self._vendor.num_received += 1

    def greet(self) -> Events:
        yield SessionCreated(event_id=self._ids.event(), session=self.session)

    def obey(self, incoming: Incoming, now_s: float) -> Events:
        """Answer a client's event; what cannot be done is answered with an error, and the session goes on."""
        try:
            yield from self._obey(incoming, now_s)
        except InputError as error:
            yield self.error(error, incoming.event.event_id)
        try:
            self._feed()
        except InputError as error:  # the words that the call begins with
            yield self.error(error, incoming.event.event_id)
            self._feed()

    def error(self, error: InputError, event_id: str | None) -> ServerEvent:
        """event_id: of the client's event, if it has one."""
        param = error.param if isinstance(error, RequestError | EventError) else None
        return self._fault(error.code, str(error), param, event_id)

    def happened(self, happening: Happening, now_s: float) -> Events:
        """Tell the client what it should know of what happened in its call."""
        match happening:
            case UnitDecided():
                self._hearing.decided()
                if self.has_vendor_events:
                    yield from self._vendor.decided(happening)
                yield from self._report(happening)
                yield from self._answering.decide(happening, now_s)
            case Speech():
                yield from self._answering.hear(happening, now_s)
            case TurnInterrupted(turn=turn):
                self._vendor.epoch += 1
                yield from self._answering.was_stopped(turn, now_s)
            case SpeechLost(turn=turn):
                yield from self._answering.was_stopped(turn, now_s)
            case InputRefused():
                yield from self._lose(happening)
            case SettingsChanged() | ChangeRefused():
                yield from self._settle(happening)
            case SessionOpened() | UnitFinished() | WindowSlid():
                yield from self._report(happening)
            case SessionEnded():
                yield from self._end(happening)
            case _:
                pass  # costs are for the metrics
        self._expect_speech(now_s)
        self._feed()

    def due(self, now_s: float) -> Events:
        """Do what is to be done at this time: sound that leaves, an answer that has left, silence to be heard."""
        yield from self._answering.due(now_s)
        self._expect_speech(now_s)
        if self._answering.is_under_way and self._hearing.is_silence_due(now_s):
            self._hearing.hear_silence(now_s)
            self._feed()

    def next_due_s(self, now_s: float) -> float:
        """When `due` may have something to do; infinite if not before the next event."""
        silence_s = self._hearing.silence_due_s() if self._answering.is_under_way else float("inf")
        return min(self._answering.next_due_s(now_s), max(now_s, silence_s))

    def leave(self) -> None:
        """The client has gone for good."""
        self._call.close()

    def _obey(self, incoming: Incoming, now_s: float) -> Events:
        match incoming.event:
            case SessionUpdateEvent() as event:
                yield from self._update(event, incoming)
            case ResponseCreate(response=options):
                yield from self._hear_rest(now_s)
                yield from self._create_response(options or ResponseOptions(), now_s)
            case ResponseCancel(response_id=response_id):
                if not self._answering.is_present(response_id):
                    raise RequestError("response_cancel_not_active", "Cancellation failed: no active response found")
                yield from self._stop("client_cancelled", now_s)
            case OutputClear(response_id=response_id):
                yield from self._clear_output(response_id, now_s)
            case ItemCreate() as event:
                yield from self._create_item(event, incoming.pictures, now_s)
            case ItemRetrieve() | ItemDelete() | ItemTruncate() as event:
                yield from self._obey_about_item(event, now_s)
            case AudioAppend() | AudioCommit() | AudioClear() | TextAppend() as event:
                yield from self._obey_about_input(event, incoming.pictures, now_s)
            case event:
                yield from self._obey_vendor(event, now_s)

    def _obey_about_input(
        self, event: AudioAppend | AudioCommit | AudioClear | TextAppend, pictures: tuple[Picture, ...], now_s: float
    ) -> Events:
        match event:
            case AudioAppend():
                self._check_format(event)
                samples = self._hearing.decode(event.audio)
                self._show(pictures)
                if event.force_listen:
                    self._hearing.want(Wish.LISTEN)
                self._hearing.hear(samples, now_s)
            case AudioCommit():
                yield from self._hear_rest(now_s)
                self._hearing.commit()
                yield from self._commit()
                if event.asks_for_response:
                    yield from self._create_response(ResponseOptions(), now_s)
            case AudioClear():
                self._hearing.clear()
                yield AudioCleared(event_id=self._ids.event())
            case TextAppend(text=text):
                self._open().send_text(text)
            case never:
                assert_never(never)

    def _obey_about_item(self, event: ItemRetrieve | ItemDelete | ItemTruncate, now_s: float) -> Events:
        self._conversation.check_there(event.item_id, NO_SUCH_ITEM[event.type])
        match event:
            case ItemRetrieve(item_id=item_id):
                yield ItemRetrieved(event_id=self._ids.event(), item=self._conversation.get(item_id))
            case ItemDelete(item_id=item_id):
                yield from self._answering.stop_item(item_id, now_s)
                self._conversation.delete(item_id)
                yield ItemDeleted(event_id=self._ids.event(), item_id=item_id)
            case ItemTruncate(item_id=item_id, content_index=content_index, audio_end_ms=audio_end_ms):
                yield from self._answering.truncate(item_id, content_index, audio_end_ms, now_s)
                yield ItemTruncated(
                    event_id=self._ids.event(),
                    item_id=item_id,
                    content_index=content_index,
                    audio_end_ms=audio_end_ms,
                )
            case never:
                assert_never(never)

    def _obey_vendor(self, event: ClientEvent, now_s: float) -> Events:
        if self._vendor.is_drop(event):
            self._hearing.clear()
        elif self._vendor.is_barge_in(event):
            if self._answering.is_under_way:
                yield from self._stop("client_cancelled", now_s)
        else:
            yield from self._vendor.obey(event, self._choices, now_s)
            self.end = self._vendor.end

    def _open(self) -> AsyncSession:
        return self._call.open(self._choices)

    @property
    def is_behind(self) -> bool:
        """`catch_up` has something to do, which comes before all else."""
        return self._hearing.is_behind

    def catch_up(self, now_s: float) -> Events:
        """Detect turns in a part of the sound that came."""
        for found in self._hearing.detect():
            yield from self._detect(found, now_s)

    def _hear_rest(self, now_s: float) -> Events:
        """Of the client's sound, which ends here."""
        self._hearing.hear(self._hearing.rest(), now_s)
        yield from self.catch_up(now_s)

    def _detect(self, found: TurnEvent, now_s: float) -> Events:
        vad = self._choices.turn_detection
        assert isinstance(vad, ServerVad), "only then turns are detected"
        item_id = self._next_item_id
        match found:
            case Started(audio_start_ms=start_ms):
                yield SpeechStarted(event_id=self._ids.event(), audio_start_ms=start_ms, item_id=item_id)
                if vad.interrupt_response and self._answering.is_under_way:
                    yield from self._stop("turn_detected", now_s)
                return
            case Stopped(audio_end_ms=end_ms):
                yield SpeechStopped(event_id=self._ids.event(), audio_end_ms=end_ms, item_id=item_id)
            case IdleTimeout(audio_start_ms=start_ms, audio_end_ms=end_ms):
                yield TimeoutTriggered(
                    event_id=self._ids.event(), audio_start_ms=start_ms, audio_end_ms=end_ms, item_id=item_id
                )
            case never:
                assert_never(never)
        self._hearing.end_turn()
        yield from self._commit()
        if vad.create_response and not self._answering.is_under_way:
            yield from self._create_response(ResponseOptions(), now_s)

    def _feed(self) -> None:
        if not self._hearing.is_ready:
            return
        call = self._open()
        for piece in self._hearing.ready():
            if isinstance(piece, Wish):
                call.wish(piece)
            else:
                call.send_audio(piece)

    def _show(self, pictures: tuple[Picture, ...]) -> None:
        """Let the model see pictures with the present second."""
        for picture in pictures:
            self._open().send_picture(picture)
            self._hearing.see()

    def _check_format(self, append: AudioAppend) -> None:
        """Raises: RequestError if the piece says that it is in another format than the session's."""
        for form in (append.format, append.input_audio_format):
            if form is not None and form.wire_format() != self._choices.input_format.wire_format():
                raise RequestError("unsupported_audio_format", "the format is the session's; update that", "format")
        rate_hz = self._choices.input_format.wire_format().rate_hz
        if append.sample_rate_hz not in (None, rate_hz):
            raise RequestError(
                "unsupported_sample_rate", f"the session's rate is {rate_hz} Hz; update that", "sample_rate_hz"
            )

    def _update(self, event: SessionUpdateEvent, incoming: Incoming) -> Events:
        self._choices = changed(self._choices, event.session, incoming.voice, self._offer, is_open=self._call.is_open)
        self._hearing.change_format(self._choices.input_format.wire_format())
        self._hearing.wish = Wish.FREE if self._choices.answers_when is AnswersWhen.MODEL else Wish.HOLD
        vad = self._choices.turn_detection
        self._hearing.watch(vad if isinstance(vad, ServerVad) else None)
        self._update_id = event.event_id
        self._call.follow(self._choices)
        yield SessionUpdated(event_id=self._ids.event(), session=self.session)

    def _settle(self, outcome: SettingsChanged | ChangeRefused) -> Events:
        """The call is as the client wanted it, or what it was promised with `session.updated` cannot be had."""
        if isinstance(outcome, SettingsChanged):
            self._call.has_changed(self._choices)
            yield from self._report(outcome)
            return
        self._choices = self._call.was_refused(self._choices)
        yield self._fault(outcome.code, f"the call goes on as it was: {outcome.message}", "session", self._update_id)
        yield SessionUpdated(event_id=self._ids.event(), session=self.session)

    def _report(self, happening: Reported | WindowSlid) -> Events:
        """What clients are told that want to see the call from inside; slides, all that asked for vendors' events."""
        if not self.has_vendor_events:
            return
        if isinstance(happening, WindowSlid):
            yield from self._vendor.slid(happening)
        elif self._choices.reports_units:
            yield self._vendor.report(happening)

    def _commit(self) -> Events:
        """What was said until now is an item."""
        item_id, self._next_item_id = self._next_item_id, self._ids.item()
        item = UserMessage(id=item_id, content=(InputAudio(),))
        previous = self._conversation.append(item)
        yield AudioCommitted(event_id=self._ids.event(), previous_item_id=previous, item_id=item_id)
        yield from self._tell_item(item, previous)

    def _create_item(self, event: ItemCreate, pictures: tuple[Picture, ...], now_s: float) -> Events:
        item_id = self._ids.item() if event.item.id is None else event.item.id
        item = event.item.model_copy(update={"id": item_id})
        item_content.check(item)
        sounds = [*map(self._hearing.decode, item_content.sounds_of(item))]
        self._hearing.check_room(sum(map(len, sounds)))
        kept = item_content.kept_of(item)
        previous = self._conversation.insert(kept, event.previous_item_id)
        try:
            if words := item_content.words_of(item):
                self._open().send_text(words)
            self._show(pictures)
        except InputError:
            self._conversation.delete(item_id)
            raise
        yield from self._tell_item(kept, previous)
        for sound in sounds:
            self._hearing.hear(sound, now_s)

    def _tell_item(self, item: Item, previous: str | None) -> Events:
        yield ItemAdded(event_id=self._ids.event(), previous_item_id=previous, item=item)
        yield ItemDone(event_id=self._ids.event(), previous_item_id=previous, item=item)

    def _create_response(self, options: ResponseOptions, now_s: float) -> Events:
        self._answering.check_free()
        check_tool_choice(options.tool_choice, "response.tool_choice")
        if options.conversation == "none" or options.input is not None or options.prompt is not None:
            raise RequestError(
                "response_option_unsupported",
                "a response answers what was said in the session; conversation, input and prompt cannot change that",
                "response",
            )
        if options.instructions:
            self._open().send_text(options.instructions)
        settings = self._answer_settings()
        output = options.audio.output if options.audio is not None else None
        if output is not None and output.format is not None:
            settings = replace(settings, format=output.format.wire_format())
        if options.output_modalities is not None:
            settings = replace(settings, modalities=("audio",) if "audio" in options.output_modalities else ("text",))
        if options.max_output_tokens is not None:
            settings = replace(settings, max_tokens=options.max_output_tokens)
        yield from self._answering.request(replace(settings, metadata=options.metadata))
        self._hearing.expect_no_speech()
        # What is left of the second is silence: who asks for an answer has said what there was to say.
        self._hearing.want(Wish.SPEAK)
        self._hearing.hear_silence(now_s)

    def _clear_output(self, response_id: str | None, now_s: float) -> Events:
        """Nothing more of the answer is sent, as if the client's loudspeaker were the server's."""
        playback = self._answering.playback(None, response_id)
        if self._answering.is_present(response_id):
            yield from self._stop("client_cancelled", now_s)
        yield OutputCleared(event_id=self._ids.event(), response_id=playback.response_id)

    def _stop(self, reason: CancelReason, now_s: float) -> Events:
        yield from self._answering.stop(reason, now_s)

    def _lose(self, refused: InputRefused) -> Events:
        """A second was not heard; an answer to it will not come."""
        self._hearing.decided()
        if self._answering.is_awaited:
            yield from self._answering.fail(refused.code, refused.message)
        else:
            yield self._fault(refused.code, refused.message, None, None)

    def _fault(self, code: str, message: str, param: str | None, event_id: str | None) -> ServerEvent:
        """Of the client's, here or in its call."""
        details = ErrorDetails(type="invalid_request_error", code=code, message=message, param=param, event_id=event_id)
        return ErrorEvent(event_id=self._ids.event(), error=details)

    def _expect_speech(self, now_s: float) -> None:
        """When an answer is over, the time of nobody speaking begins."""
        if self._was_answering and not self._answering.is_under_way:
            self._hearing.expect_speech(self._answering.unplayed_ms(now_s))
        self._was_answering = self._answering.is_under_way

    def _end(self, ended: SessionEnded) -> Events:
        self.end = ended.code
        yield from self._answering.fail(ended.code, ended.message)
        if ended.code != "completed":
            details = ErrorDetails(type="server_error", code=ended.code, message=ended.message)
            yield ErrorEvent(event_id=self._ids.event(), error=details)

    def _answer_settings(self) -> AnswerSettings:
        session = self.session
        return AnswerSettings(
            conversation_id=self._conversation_id,
            modalities=session.output_modalities,
            format=self._choices.output_format.wire_format(),
            max_tokens=session.max_output_tokens,
            metadata=None,
            vendor=Vendor(session.id, self._vendor.epoch) if self.has_vendor_events else None,
        )
