"""Sessions and who is attached to them: a session outlives a cut socket if its client can come back to it.

    socket ── Attachment ──> Hosted ── RealtimeSession ── call
                  ^             │
                  └── outbox <──┴── journal, for the next attachment

Everything of a session is done by its one task, one thing at a time. Shown by tests/server/test_resume.py and
tests/server/test_realtime_socket.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from antiphon.aio import AsyncSession
from antiphon.happenings import Happening
from antiphon.server.auth import INTERNAL_ERROR, NORMAL_CLOSURE, POLICY_VIOLATION, SERVICE_RESTART, TRY_AGAIN_LATER
from antiphon.server.events.client import EventAck, SessionResume
from antiphon.server.events.ids import Ids
from antiphon.server.events.server import ServerEvent
from antiphon.server.events.vendor import (
    ResumableSessionCreated,
    SessionExpired,
    SessionReplaced,
    SessionResumed,
    SessionResyncRequired,
)
from antiphon.server.journal import Journal, ResumeToken
from antiphon.server.outbox import Outbox, SlowReaderError
from antiphon.server.realtime.conversation import RequestError
from antiphon.server.realtime.incoming import Incoming, Rejected
from antiphon.server.realtime.session import RealtimeSession
from antiphon.server.realtime.settings import Choices, Offer
from antiphon.server.service import Service

LAST_WORD_S = 10.0
"""A call that was closed says that it has ended by then."""
MAX_UNREAD = 32
"""Messages of one socket that are read and wait for their turn; more stay in the network."""

CLOSE_CODES = {
    "completed": NORMAL_CLOSURE,
    "context_length_exceeded": NORMAL_CLOSURE,
    "idle_timeout": NORMAL_CLOSURE,
    "slow_reader": POLICY_VIOLATION,
    "prompt_too_long": POLICY_VIOLATION,
    "engine_stopped": SERVICE_RESTART,
    "resource_exhausted": TRY_AGAIN_LATER,
}
"""Of a session's end; every other end is a fault of ours."""

logger = logging.getLogger(__name__)


class Attachment:
    """One socket of a session, as the session sees it. generation: counts a session's sockets."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.generation = 1
        self.room = asyncio.Semaphore(MAX_UNREAD)
        self.closed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """With which code the session wants the socket to be closed, once it does."""

    def close(self, code: int) -> None:
        """After everything that waits for the client; idempotent."""
        if not self.closed.done():
            self.closed.set_result(code)


@dataclass(frozen=True, slots=True, eq=False)
class _Said:
    attachment: Attachment
    incoming: Incoming | Rejected


@dataclass(frozen=True, slots=True, eq=False)
class _Left:
    attachment: Attachment


@dataclass(frozen=True, slots=True, eq=False)
class _CameBack:
    attachment: Attachment
    last_seq: int


class Hosted:
    """Owns a session from its first socket to its end. owner: who may come back. place: left at the end."""

    def __init__(
        self, service: Service, owner: str, place: ExitStack, attachment: Attachment, *, is_resumable: bool
    ) -> None:
        self._service = service
        self.owner = owner
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[_Said | _Left | _CameBack | Happening] = asyncio.Queue()
        self._attachment: Attachment | None = attachment
        self._is_resumable = is_resumable
        self._journal = Journal(service.limits.journal)
        self._token = ResumeToken()
        self._num_attachments = 1
        self._follower: asyncio.Task[None] | None = None
        now_s = self._loop.time()
        # When the client is given up: it said nothing, or did not come back.
        self._patience_ends_s = 0.0
        self._ids = Ids()
        offer = Offer(
            config=service.seeded(),
            voice=service.voice,
            mode=service.mode,
            limits=service.window_limits,
            marker=service.marker,
            speech_models=service.speech,
            max_input_samples=service.limits.max_input_samples,
            idle_s=service.limits.idle_s,
        )
        self._session = RealtimeSession(
            self._ids, service.model, offer, self._open, has_vendor_events=is_resumable, now_s=now_s
        )
        self._heard_from_client(now_s)

    @property
    def session_id(self) -> str:
        return self._session.session.id

    def said(self, attachment: Attachment, incoming: Incoming | Rejected) -> None:
        """A message came in over a socket."""
        self._inbox.put_nowait(_Said(attachment, incoming))

    def left(self, attachment: Attachment) -> None:
        """A socket is gone."""
        self._inbox.put_nowait(_Left(attachment))

    def check(self, resume: SessionResume, owner: str) -> None:
        """Raises: RequestError if the client may not come back like that."""
        if owner != self.owner or not self._token.fits(resume.resume_token):
            raise RequestError("invalid_resume_token", "the token is not the session's newest one", "resume_token")

    def come_back(self, attachment: Attachment, resume: SessionResume) -> None:
        """The session's client has a new socket; the one before it, if there is one still, is closed."""
        self._inbox.put_nowait(_CameBack(attachment, resume.last_received_server_event_seq))

    async def run(self) -> None:
        """Live until the session is over, or whoever could come back to it does not."""
        end = "internal_error"
        try:
            self._greet()
            while self._session.end is None:
                await self._handle_next()
            end = self._session.end
        except SlowReaderError as error:
            end = error.code
            self._service.metrics.count_error(end)
        except Exception:
            logger.exception("a realtime session failed")
            self._service.metrics.count_error(end)
        finally:
            self._session.leave()
            if self._attachment is not None:
                self._attachment.close(CLOSE_CODES.get(end, INTERNAL_ERROR))
            self._turn_away()
            await self._hear_out()
            self._place.close()

    async def _hear_out(self) -> None:
        """Until the call has ended too, which is counted and logged then."""
        if self._follower is None:
            return
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await self._follower
        except TimeoutError:
            logger.warning("a call did not end when its session did")

    def _turn_away(self) -> None:
        """Who came back while the session ended is told what somebody who comes later is."""
        while not self._inbox.empty():
            came = self._inbox.get_nowait()
            if isinstance(came, _CameBack):
                came.attachment.outbox.put(self._session.error(_unknown_session(), None).to_json(), self._loop.time())
                came.attachment.close(POLICY_VIOLATION)

    def _greet(self) -> None:
        if not self._is_resumable:
            self._tell(self._session.greet())
            return
        self._tell(
            [
                ResumableSessionCreated(
                    event_id=self._ids.event(),
                    session=self._session.session,
                    attachment_generation=self._num_attachments,
                    resume_token=self._token.rotate(),
                )
            ]
        )

    async def _handle_next(self) -> None:
        """Wait for the next thing and handle it, or do what is due until then."""
        now_s = self._loop.time()
        if self._session.is_behind:
            self._tell(self._session.catch_up(now_s))
            await asyncio.sleep(0)  # the others' turn
            return
        # Nobody listens while nobody is attached: sound waits where it is, for whoever comes back.
        due_s = self._session.next_due_s(now_s) if self._attachment is not None else float("inf")
        try:
            async with asyncio.timeout_at(min(due_s, self._patience_ends_s)):
                came = await self._inbox.get()
        except TimeoutError:
            now_s = self._loop.time()
            if now_s >= self._patience_ends_s:
                self._give_up()
            elif self._attachment is not None:
                self._tell(self._session.due(now_s))
            return
        now_s = self._loop.time()
        match came:
            case _Said(attachment=attachment, incoming=incoming):
                attachment.room.release()
                if attachment is self._attachment:
                    self._obey(incoming, now_s)
            case _Left(attachment=attachment):
                if attachment is self._attachment:
                    self._detach()
            case _CameBack(attachment=attachment, last_seq=last_seq):
                self._attach(attachment, last_seq)
            case happening:
                self._tell(self._session.happened(happening, now_s))

    def _obey(self, incoming: Incoming | Rejected, now_s: float) -> None:
        self._heard_from_client(now_s)
        self._session.count_message()
        match incoming:
            case Rejected(error=error, event_id=event_id):
                self._tell([self._session.error(error, event_id)])
            case Incoming(event=EventAck(server_event_seq=seq)) if self._is_resumable:
                self._journal.forget(seq)
            case _:
                self._tell(self._session.obey(incoming, now_s))
                self._heard_from_client(now_s)  # it may have changed how long it may be silent

    def _heard_from_client(self, now_s: float) -> None:
        self._patience_ends_s = now_s + self._session.idle_s

    def _give_up(self) -> None:
        """The client said nothing for too long, or did not come back."""
        if self._attachment is None:
            self._session.end = "completed"
            return
        if self._session.has_vendor_events:
            self._tell(
                [SessionExpired(event_id=self._ids.event(), session_id=self.session_id, reason="idle_ttl_expired")]
            )
        else:
            waited_s = self._session.idle_s
            error = RequestError("idle_timeout", f"nothing came for {waited_s} s; the session is over")
            self._tell([self._session.error(error, None)])
        self._session.end = "idle_timeout"

    def _detach(self) -> None:
        self._attachment = None
        if not self._is_resumable or self._service.door.closed.is_set():
            self._session.end = "completed"
        self._patience_ends_s = self._loop.time() + self._service.limits.resume_s

    def _attach(self, attachment: Attachment, last_seq: int) -> None:
        now_s = self._loop.time()
        self._num_attachments += 1
        attachment.generation = self._num_attachments
        replaced = self._attachment
        if replaced is not None:
            event = SessionReplaced(
                event_id=self._ids.event(),
                session_id=self.session_id,
                attachment_generation=attachment.generation,
            )
            # The last on its socket, and nothing that the next one has missed.
            replaced.outbox.put(event.to_json(), now_s)
            replaced.close(NORMAL_CLOSURE)
        self._attachment = attachment
        self._heard_from_client(now_s)
        missed = self._journal.after(last_seq)
        if missed is None:
            self._require_resync(last_seq)
            self._session.end = "completed"
            return
        resumed = SessionResumed(
            event_id=self._ids.event(),
            session_id=self.session_id,
            session=self._session.session,
            attachment_generation=attachment.generation,
            resume_token=self._token.rotate(),
            received_client_events=self._session.num_received,
        )
        # Not one of the numbered: it is about the socket, and the missed ones come behind it.
        attachment.outbox.put(resumed.to_json(), now_s)
        for told in missed:
            attachment.outbox.put(told.text, now_s)

    def _require_resync(self, last_seq: int) -> None:
        is_gap = last_seq > self._journal.last_seq
        self._tell(
            [
                SessionResyncRequired(
                    event_id=self._ids.event(),
                    session_id=self.session_id,
                    reason="journal_gap" if is_gap else "journal_overflow",
                )
            ]
        )

    def _open(self, choices: Choices) -> AsyncSession:
        call = self._service.open(choices.config, choices.voice)
        self._follower = asyncio.create_task(self._follow(call))
        return call

    async def _follow(self, call: AsyncSession) -> None:
        async for happening in self._service.happenings(call):
            self._inbox.put_nowait(happening)

    def _tell(self, events: Iterable[ServerEvent]) -> None:
        for event in events:
            now_s = self._loop.time()
            if not self._session.has_vendor_events:
                text = event.to_json()
            else:
                text = event.to_numbered_json(self._journal.next_seq())
                self._journal.tell(text, now_s)
            if self._attachment is not None:
                self._attachment.outbox.put(text, now_s)


class Sessions:
    """Owns the sessions of a server, and their tasks."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._hosted: dict[str, Hosted] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, owner: str, place: ExitStack, attachment: Attachment, *, is_resumable: bool) -> Hosted:
        """A session for a socket that came in; it leaves the place at its end."""
        hosted = Hosted(self._service, owner, place, attachment, is_resumable=is_resumable)
        self._hosted[hosted.session_id] = hosted
        task = asyncio.create_task(self._run(hosted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return hosted

    def resume(self, resume: SessionResume, owner: str, attachment: Attachment) -> Hosted:
        """Go on with a session on another socket. Raises: RequestError if there is none that this client may resume."""
        hosted = self._hosted.get(resume.session_id)
        if hosted is None:
            raise _unknown_session()
        hosted.check(resume, owner)
        hosted.come_back(attachment, resume)
        return hosted

    async def _run(self, hosted: Hosted) -> None:
        try:
            await hosted.run()
        finally:
            del self._hosted[hosted.session_id]


def _unknown_session() -> RequestError:
    return RequestError(
        "unknown_session", "no such session goes on here; it ended, or was away for too long", "session_id"
    )
