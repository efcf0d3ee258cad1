"""Says any frames to a server and holds it to its word: each is answered or legal to ignore, ends are documented ones.

Behind each frame a question follows whose answer nothing else looks like; what comes before that answer is the frame's.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pydantic import JsonValue
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from antiphon.server.events.client import ClientEvent, EventError, parse
from server.abuse.messages import MIB, BadText, Binary, Frame, Text, Until
from server.raw_client import sound

LIMIT_S = 60.0
"""Of one session; what takes longer hangs."""

SILENT = (
    "input_audio_buffer.append",
    "input.text.append",
    "input_text.append",
    "push_text",
    "input.cancel",
    "barge_in",
    "turn.signal",
    "signal_turn",
    "session.event_ack",
)
"""Events that need no answer if nothing is wrong."""
ANSWERS = {
    "session.update": "session.updated",
    "input_audio_buffer.commit": "input_audio_buffer.committed",
    "input.commit": "input_audio_buffer.committed",
    "input_audio_buffer.clear": "input_audio_buffer.cleared",
    "output_audio_buffer.clear": "output_audio_buffer.cleared",
    "conversation.item.create": "conversation.item.done",
    "conversation.item.retrieve": "conversation.item.retrieved",
    "conversation.item.delete": "conversation.item.deleted",
    "conversation.item.truncate": "conversation.item.truncated",
    "response.create": "response.created",
    "response.cancel": "response.done",
    "session.heartbeat": "session.heartbeat_ack",
    "session.close": "session.closed",
    "close_session": "session.closed",
    "close": "session.closed",
    "playback.ack": "playback.acknowledged",
    "audio.playback_ack": "playback.acknowledged",
    "session.resume": "error",
}
NORMAL, POLICY, TRY_LATER = 1000, 1008, 1013
BAD_PAYLOAD, TOO_LARGE = (1007, 1006), (1009, 1006)
"""uvicorn closes such a socket at once; if more was on its way to it, TCP resets, and may drop the close frame."""

SECOND = sound(1)

Told = dict[str, JsonValue]


@dataclass(slots=True)
class Spoken:
    """What was said so far, what was told behind each of it, and how it ended. num_answered: questions."""

    address: str
    said: list[Frame] = field(default_factory=list)
    told: list[list[Told]] = field(default_factory=lambda: [[]])
    close_code: int | None = None

    @property
    def num_answered(self) -> int:
        return len(self.told) - 1

    def all_told(self) -> Iterable[Told]:
        return (event for events in self.told for event in events)

    def names(self) -> dict[str, str]:
        """What the newest things are called."""
        found = {"item": "item_none", "response": "resp_none", "session": "sess_none", "token": "none"}
        found |= {"second": SECOND, "words": "words " * 1000}
        for event in self.all_told():
            match event:
                case {"item_id": str(name)} | {"item": {"id": str(name)}}:
                    found["item"] = name
                case {"resume_token": str(token), "session": {"id": str(name)}}:
                    found |= {"token": token, "session": name}
            match event:
                case {"response_id": str(name)} | {"response": {"id": str(name)}}:
                    found["response"] = name
        return found


class Speaker:
    """A client on one socket. marker: a question and how to know its answer are the protocol's."""

    def __init__(self, socket: ClientConnection, address: str) -> None:
        self._socket = socket
        self.spoken = Spoken(address)
        self._came = asyncio.Condition()

    def question(self, number: int) -> str:
        raise NotImplementedError

    def is_answer(self, event: Told, number: int) -> bool:
        raise NotImplementedError

    async def say(self, steps: Sequence[Frame | Until]) -> Spoken:
        """Say all of it as fast as the server takes it, and read until it was answered or the server has closed."""
        reading = asyncio.create_task(self._read())
        try:
            for step in steps:
                if isinstance(step, Until):
                    await self._until(step.kind)
                else:
                    await self._say(step)
            await self._caught_up()
        except ConnectionClosed:
            await reading
        finally:
            reading.cancel()
        return self.spoken

    async def _say(self, frame: Frame) -> None:
        match frame:
            case Text(text=text):
                if "$" in text:
                    await self._caught_up()
                    names = self.spoken.names()
                    text = re.sub(r"\$(\w+)", lambda found: names.get(found[1], found[0]), text)
                frame = Text(text)
        self.spoken.said.append(frame)
        match frame:
            case Text(text=text):
                await self._socket.send(text)
            case Binary(payload=payload):
                await self._socket.send(payload)
            case BadText(payload=payload):
                await self._socket.send(payload, text=True)
        await self._socket.send(self.question(len(self.spoken.said)))

    async def _read(self) -> None:
        try:
            while True:
                event: Told = json.loads(await self._socket.recv())
                async with self._came:
                    if self.is_answer(event, self.spoken.num_answered + 1):
                        self.spoken.told.append([])
                    else:
                        self.spoken.told[-1].append(event)
                    self._came.notify_all()
        except ConnectionClosed:
            async with self._came:
                self.spoken.close_code = self._socket.close_code
                self._came.notify_all()

    async def _caught_up(self) -> None:
        """Everything that was said is answered, or nothing more will be."""
        async with self._came:
            await self._came.wait_for(
                lambda: self.spoken.close_code is not None or self.spoken.num_answered >= len(self.spoken.said)
            )

    async def _until(self, kind: str) -> None:
        def has_come() -> bool:
            is_told = any(event["type"] == kind for event in self.spoken.all_told())
            return is_told or self.spoken.close_code is not None

        async with self._came:
            await self._came.wait_for(has_come)


class RealtimeSpeaker(Speaker):
    def question(self, number: int) -> str:
        name = f"question {number}"
        return json.dumps({"type": "conversation.item.retrieve", "item_id": name, "event_id": name})

    def is_answer(self, event: Told, number: int) -> bool:
        match event:
            case {"type": "error", "error": {"event_id": str(name)}}:
                return name == f"question {number}"
        return False


class DemoSpeaker(Speaker):
    """A question is a message without a type that says which; the error that answers it quotes nothing else so."""

    def question(self, number: int) -> str:
        return json.dumps({"type": f"question {number}."})

    def is_answer(self, event: Told, number: int) -> bool:
        match event:
            case {"type": "error", "error": str(message)}:
                return f"question {number}." in message
        return False


@asynccontextmanager
async def admitted(address: str, key: str) -> AsyncIterator[ClientConnection]:
    """A socket, as soon as the server has room; whoever was there before may be on the way out."""
    headers = {"Authorization": f"Bearer {key}"}
    while True:
        try:
            socket = await connect(address, max_size=2**24, compression=None, additional_headers=headers)
            break
        except InvalidStatus as refused:
            if refused.response.status_code != 503:
                raise
    try:
        yield socket
    finally:
        # Half of the sockets that a server loses are not closed.
        socket.transport.abort()


def check_realtime(spoken: Spoken) -> None:
    """Raises: AssertionError at whatever was not answered as it should be."""
    for frame, told in zip(spoken.said[: spoken.num_answered], spoken.told, strict=False):
        _check_answer(frame, told)
    if spoken.close_code is not None:
        _check_close(spoken, list(spoken.all_told()))
    else:
        assert spoken.num_answered == len(spoken.said), "a question was not answered"


def _check_answer(frame: Frame, told: list[Told]) -> None:
    errors = [event["error"] for event in told if event["type"] == "error"]
    text = frame.text if isinstance(frame, Text) else ""
    try:
        event = parse(text)
    except EventError as error:
        fault = error
    else:
        _check_obeyed(event, text, told)
        return
    assert {"code": fault.code, "event_id": fault.event_id}.items() <= _one_like(errors, fault.code).items()


def _check_obeyed(event: ClientEvent, text: str, told: list[Told]) -> None:
    kinds = [one["type"] for one in told]
    errors = [one["error"] for one in told if one["type"] == "error"]
    is_refused = any(isinstance(error, dict) and error.get("event_id") == event.event_id for error in errors)
    assert event.type in SILENT or ANSWERS[event.type] in kinds or is_refused, f"{text[:500]} -> {told}"


def _one_like(errors: list[JsonValue], code: str) -> Told:
    for error in errors:
        if isinstance(error, dict) and error["code"] == code:
            return {"event_id": None, **error}
    raise AssertionError(f"no error {code} in {errors}")


def _check_close(spoken: Spoken, told: list[Told]) -> None:
    """The code is one that is documented for what was said and told."""
    kinds = {event["type"] for event in told}
    codes = {error["code"] for event in told if isinstance(error := event.get("error"), dict)}
    is_expected = {
        NORMAL: bool(kinds & {"session.closed", "session.expired", "session.replaced"})
        or bool(codes & {"idle_timeout", "context_length_exceeded"}),
        POLICY: "prompt_too_long" in codes or ("resume=1" in spoken.address and bool(codes)),
        TRY_LATER: "resource_exhausted" in codes,
    }
    code = spoken.close_code or 0
    is_well = is_expected.get(code, False) or code in _codes_for_frames(spoken)
    assert is_well, f"closed with {code} after {told[-3:]}"


def _codes_for_frames(spoken: Spoken) -> tuple[int, ...]:
    """Of frames that no session sees."""
    is_bad = any(isinstance(frame, BadText) for frame in spoken.said)
    is_large = any(isinstance(frame, Text) and len(frame.text) > MIB for frame in spoken.said)
    return (BAD_PAYLOAD if is_bad else ()) + (TOO_LARGE if is_large else ())


def check_demo(spoken: Spoken) -> None:
    """The same for the demo's protocol. Every message but a diagnosis is answered, sound once it is a second."""
    for number, frame in enumerate(spoken.said[: spoken.num_answered]):
        is_diagnosis = isinstance(frame, Text) and "client_diagnostic" in frame.text
        is_sound = isinstance(frame, Text) and "audio_chunk" in frame.text
        assert is_diagnosis or is_sound or spoken.told[number], f"{frame} was not answered"
    kinds = {event["type"] for event in spoken.all_told()}
    match spoken.close_code:
        case None:
            assert spoken.num_answered == len(spoken.said), "a question was not answered"
        case 1000:
            assert kinds & {"stopped", "timeout"}, kinds
        case 1008 | 1013:
            assert "error" in kinds, kinds
        case code:
            assert code in _codes_for_frames(spoken), f"closed with {code}"


async def converse(address: str, key: str, steps: Sequence[Frame | Until]) -> int:
    """A session of these steps. Returns how many frames were said. Raises: AssertionError if the server did wrong."""
    is_demo = "/ws/duplex/" in address
    async with asyncio.timeout(LIMIT_S), admitted(address, key) as socket:
        speaker = DemoSpeaker(socket, address) if is_demo else RealtimeSpeaker(socket, address)
        spoken = await speaker.say(steps)
    (check_demo if is_demo else check_realtime)(spoken)
    return len(spoken.said)
