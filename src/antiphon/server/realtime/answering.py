"""The answers of a session, one after the other: from what the engine says to what leaves for the listener, and when.

Shown by tests/server/test_realtime.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Literal

from antiphon.core.events import TurnText, UnitDecided
from antiphon.happenings import Speech
from antiphon.server.events.ids import Ids
from antiphon.server.events.server import ServerEvent, StatusDetails
from antiphon.server.pacing import Pacer, PacingConfig
from antiphon.server.realtime.answer import Answer, AnswerSettings, Taken
from antiphon.server.realtime.conversation import Conversation, RequestError
from antiphon.server.realtime.playback import Ledger, Playback
from antiphon.units import OUTPUT_RATE_HZ

Events = Iterator[ServerEvent]
CancelReason = Literal["turn_detected", "client_cancelled"]


class Answering:
    """Owns the answer under way, the sound of it that waits, and what is known of earlier ones.

    settings: of an answer that begins now. take: what it answers, counted anew from then on. interrupt: stops the
    present answer in the call.
    """

    def __init__(
        self,
        ids: Ids,
        conversation: Conversation,
        pacing: PacingConfig,
        settings: Callable[[], AnswerSettings],
        take: Callable[[], Taken],
        interrupt: Callable[[], None],
    ) -> None:
        self._ids = ids
        self._conversation = conversation
        self._settings = settings
        self._take = take
        self._interrupt = interrupt
        self._pacer = Pacer(pacing)
        self._answer: Answer | None = None
        self._ledger = Ledger()
        self._held: list[tuple[TurnText, int] | Speech] = []  # of the next turn, while sound of this one waits
        self._void_turn = -1  # words and sound of it and of earlier ones are not wanted any more

    @property
    def is_under_way(self) -> bool:
        """An answer was asked for or begun, and has not left as a whole."""
        return self._answer is not None

    @property
    def is_awaited(self) -> bool:
        """An answer was asked for, and the model has not begun it."""
        return self._answer is not None and self._answer.turn is None

    def is_present(self, response_id: str | None) -> bool:
        """Whether the answer under way is the one of this name, or any for None."""
        return self._answer is not None and response_id in (None, self._answer.response_id)

    def request(self, settings: AnswerSettings) -> Events:
        """Begin an answer that the model has not begun. Raises: RequestError if one is under way."""
        self.check_free()
        self._answer = self._begin(settings)
        yield self._answer.created()

    def check_free(self) -> None:
        """Raises: RequestError if an answer is under way."""
        if self._answer is not None:
            raise RequestError(
                "conversation_already_has_active_response",
                f"response {self._answer.response_id!r} is under way; wait for it or cancel it",
            )

    def decide(self, decided: UnitDecided, now_s: float) -> Events:
        """Tell what the model says in a second."""
        for said in decided.said:
            yield from self._read(said, len(decided.token_ids), now_s)

    def hear(self, speech: Speech, now_s: float) -> Events:
        """Sound of an answer is there."""
        answer, chunk = self._answer, speech.chunk
        if answer is None or not answer.is_audio or answer.turn is None or chunk.address.turn < answer.turn:
            return
        if chunk.address.turn > answer.turn:
            self._held.append(speech)
            return
        if speech.samples.numel():
            answer.playback.make(speech.samples.numel())
            self._pacer.queue(answer.response_id, speech.samples.numpy())
        if chunk.ends_turn:
            self._pacer.end(answer.response_id)
        yield from self.due(now_s)

    def due(self, now_s: float) -> Events:
        """Sound that leaves now, and the end of an answer that has left."""
        for piece in self._pacer.due(now_s):
            answer = self._answer
            if answer is None or answer.response_id != piece.owner:
                continue
            yield from answer.sound(piece.samples, is_last=piece.is_last)
            if piece.is_last:
                yield from self._finish(answer, now_s)

    def next_due_s(self, now_s: float) -> float:
        """When `due` may have something to do; infinite if not before the next event."""
        return self._pacer.next_due_s(now_s)

    def unplayed_ms(self, now_s: float) -> float:
        """Of what left, what the listener has still to play."""
        return 1000 * self._pacer.lead_s(now_s)

    def stop(self, reason: CancelReason, now_s: float) -> Events:
        """Stop the answer under way, in the call too."""
        self._interrupt()
        yield from self.cut(reason, now_s)

    def stop_item(self, item_id: str, now_s: float) -> Events:
        """Stop the answer that is being said as this item, if one is."""
        if self._answer is not None and self._answer.item_id == item_id:
            yield from self.stop("client_cancelled", now_s)

    def cut(self, reason: CancelReason, now_s: float) -> Events:
        """The answer under way is over here; what waits of it is dropped."""
        yield from self._stop("cancelled", StatusDetails(type="cancelled", reason=reason), now_s)

    def was_stopped(self, turn: int, now_s: float) -> Events:
        """The engine stopped a turn, and no sound of those before it comes any more; words of them may have.

        Of one that the client stopped, this comes when the next may have begun.
        """
        self._void_turn = max(self._void_turn, turn)
        if self._answer is not None and self._answer.turn is not None and self._answer.turn <= turn:
            yield from self.cut("turn_detected", now_s)

    def fail(self, code: str, message: str) -> Events:
        """The answer under way cannot go on."""
        if self._answer is not None:
            answer, self._answer = self._answer, None
            yield from answer.fail(code, message)

    def playback(self, item_id: str | None, response_id: str | None) -> Playback:
        """Of the answer that a client means. Raises: RequestError."""
        return self._ledger.find(item_id, response_id)

    def truncate(self, item_id: str, content_index: int, audio_end_ms: int, now_s: float) -> Events:
        """Of an answer, only so much of its sound was heard; nothing more of it is sent. Raises: RequestError."""
        self._conversation.check_spoken(item_id, content_index)
        playback = self._ledger.of_item(item_id)
        playback.check_sent(audio_end_ms, "audio_end_ms")
        yield from self.stop_item(item_id, now_s)
        playback.played_ms = audio_end_ms
        self._conversation.cut(item_id, content_index, playback.words_by(audio_end_ms))

    def _stop(self, status: Literal["cancelled", "incomplete"], details: StatusDetails, now_s: float) -> Events:
        answer, self._answer = self._answer, None
        num_unplayed = self._pacer.cut(now_s)
        if answer is None:
            return
        playback = answer.playback
        playback.played_ms = max(0, playback.sent_ms - 1000 * num_unplayed // OUTPUT_RATE_HZ)
        yield from answer.end(status, details)
        held, self._held = self._held, []
        if answer.turn is not None:
            self._void_turn = max(answer.turn, *map(_turn, held), self._void_turn)
            if answer.is_audio:
                # The client may have deleted the item, or put one of its own under that name.
                with suppress(RequestError):
                    self._conversation.cut(answer.item_id, 0, playback.words_by(playback.played_ms))

    def _read(self, said: TurnText, num_tokens: int, now_s: float) -> Events:
        if said.turn <= self._void_turn:
            return
        if self._answer is not None and self._answer.turn not in (None, said.turn):
            self._held.append((said, num_tokens))
            return
        if self._answer is None:
            self._answer = self._begin(self._settings())
            yield self._answer.created()
        answer = self._answer
        if answer.turn is None:
            yield from answer.speak(said.turn)
        answer.num_text_tokens += num_tokens
        answer.is_decided = said.ends_turn
        yield from answer.say(said.text)
        if answer.is_too_long:
            self._interrupt()
            yield from self._stop("incomplete", StatusDetails(type="incomplete", reason="max_output_tokens"), now_s)
        elif answer.is_decided and not answer.is_audio:
            yield from self._finish(answer, now_s)

    def _finish(self, answer: Answer, now_s: float) -> Events:
        self._answer = None
        yield from answer.end("completed", StatusDetails(type="completed"))
        held, self._held = self._held, []
        for waiting in held:
            if isinstance(waiting, Speech):
                yield from self.hear(waiting, now_s)
            else:
                yield from self._read(*waiting, now_s)

    def _begin(self, settings: AnswerSettings) -> Answer:
        return Answer.begin(self._ids, settings, self._conversation, self._take(), self._ledger)


def _turn(waiting: tuple[TurnText, int] | Speech) -> int:
    return waiting.chunk.address.turn if isinstance(waiting, Speech) else waiting[0].turn
