"""`/ws/duplex/{session_id}`: the protocol of OpenBMB's demo, so that its front ends work unchanged (REFERENCE 10).

JSON messages, sound as base64 of float32. One `result` answers each `audio_chunk` of one second, also a silent one.
What the demo's worker accepts and ignores is accepted and ignored here. Shown by tests/server/test_openbmb.py.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Path, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from antiphon.aio import AsyncSession, read_picture
from antiphon.config import SessionConfig
from antiphon.core.duplex import Wish
from antiphon.core.events import InputRefused, SessionEnded, SessionOpened, UnitDecided, UnitFinished
from antiphon.errors import AntiphonError, AudioError, InputError
from antiphon.happenings import Happening, Speech
from antiphon.models.minicpmo.prompt import wrap
from antiphon.server.auth import NORMAL_CLOSURE, POLICY_VIOLATION, TRY_AGAIN_LATER
from antiphon.server.client_socket import ClientSocket
from antiphon.server.events.session import Instructions
from antiphon.server.outbox import SlowReaderError
from antiphon.server.service import Samples, Service
from antiphon.units import INPUT_RATE_HZ, OUTPUT_SAMPLES_PER_UNIT, UNIT_SAMPLES
from antiphon.voices import PreparedVoice

DEFAULT_SYSTEM_PROMPT = "You are a helpful assistant."
DEFAULT_PAUSE_S = 60.0
MAX_UNANSWERED = 30
"""Seconds whose results a client has not read, or that are on their way."""
SESSION_ID = r"^[A-Za-z0-9_-]{1,128}$"


class _Message(BaseModel):
    """The front ends send more than the worker reads."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class PrepareConfig(_Message):
    """Of the many settings that the front ends send, what the worker obeys beside the message itself."""

    max_slice_nums: Annotated[int, Field(ge=1)] | None = None


class Prepare(_Message):
    type: Literal["prepare"]
    system_prompt: Instructions = DEFAULT_SYSTEM_PROMPT
    ref_audio_base64: str | None = None
    tts_ref_audio_base64: str | None = None
    ref_audio_path: str | None = None
    config: PrepareConfig = PrepareConfig()
    max_slice_nums: Annotated[int, Field(ge=1)] | None = None


class AudioChunk(_Message):
    type: Literal["audio_chunk"]
    audio_base64: str | None = None
    frame_base64_list: tuple[str, ...] | None = None
    force_listen: bool = False


class Pause(_Message):
    type: Literal["pause"]
    timeout: Annotated[float, Field(gt=0, le=3600)] = DEFAULT_PAUSE_S


class Simple(_Message):
    type: Literal["resume", "stop", "interrupt", "client_diagnostic"]


ClientMessage = Annotated[Prepare | AudioChunk | Pause | Simple, Field(discriminator="type")]
_CLIENT_MESSAGE: TypeAdapter[Prepare | AudioChunk | Pause | Simple] = TypeAdapter(ClientMessage)


def router(service: Service) -> APIRouter:
    """Both of the demo's addresses."""
    routes = APIRouter()

    async def talk(socket: WebSocket, session_id: Annotated[str, Path(pattern=SESSION_ID)]) -> None:
        with service.door.enter(socket.headers) as refusal:
            if refusal is not None:
                await refusal.deny(socket)
                return
            await socket.accept()
            await _Connection(service, ClientSocket(socket), session_id).run()

    routes.add_api_websocket_route("/ws/duplex/{session_id}", talk)
    return routes


@dataclass(slots=True)
class _Unit:
    """What a second has come to so far. sent_s: on the machine's clock."""

    sent_s: float
    decided: UnitDecided | None = None
    finished: UnitFinished | None = None
    speech: list[Speech] = field(default_factory=list)


class _Connection:
    """One client from its first message to its last. Owns the call."""

    def __init__(self, service: Service, client: ClientSocket, session_id: str) -> None:
        self._service = service
        self._client = client
        self._session_id = session_id
        self._call: AsyncSession | None = None
        self._sent: deque[_Unit] = deque()  # in order; the first of them are decided
        self._happenings: AsyncIterator[Happening] | None = None
        self._pause_ends_s: float | None = None  # on the event loop's clock

    async def run(self) -> None:
        try:
            await self._talk()
        except* WebSocketDisconnect:
            pass  # the client has gone, and its call goes with it
        except* SlowReaderError:
            self._service.metrics.count_error(SlowReaderError.code)
            await self._client.close(POLICY_VIOLATION)
        finally:
            if self._call is not None:
                self._call.close()

    async def _talk(self) -> None:
        await self._tell({"type": "queue_done"})  # nobody queues: who finds no room is told so by `prepare`
        asked = await self._asked()
        call = None if asked is None else await self._prepare(asked)
        if call is not None:
            async with asyncio.TaskGroup() as tasks:
                listening = tasks.create_task(self._listen(call))
                tasks.create_task(self._report(listening))

    async def _asked(self) -> Prepare | None:
        """What call the client wants; None if it does not say so in time, which was told."""
        try:
            async with asyncio.timeout(self._service.limits.idle_s):
                while True:
                    match await self._receive():
                        case Prepare() as asked:
                            return asked
                        case Simple(type="client_diagnostic"):
                            continue
                        case None:
                            continue
                        case other:
                            await self._error(f"{other.type} comes before prepare")
        except TimeoutError:
            await self._tell({"type": "timeout", "reason": "prepare did not come"})
            await self._client.close(NORMAL_CLOSURE)
            return None

    async def _prepare(self, asked: Prepare) -> AsyncSession | None:
        """Open the call that was asked for; None if it could not be opened, which was told."""
        try:
            call = self._call = self._service.open(self._config(asked), await self._voice(asked))
        except AntiphonError as error:
            await self._refuse(error)
            return None
        self._happenings = self._service.happenings(call)
        first = await anext(self._happenings)
        if isinstance(first, SessionEnded):
            await self._error(first.message)
            await self._client.close(TRY_AGAIN_LATER if first.code == "resource_exhausted" else POLICY_VIOLATION)
            return None
        assert isinstance(first, SessionOpened), f"a call begins with {first}"
        await self._tell(
            {
                "type": "prepared",
                "prompt_length": len(asked.system_prompt),
                "recording_session_id": self._session_id,
            }
        )
        return call

    async def _voice(self, asked: Prepare) -> PreparedVoice:
        """The demo knows two recordings: one for the prompt, one to speak with, which is the first if there is none."""
        if asked.ref_audio_path is not None:
            raise InputError("ref_audio_path names a file of the server; send ref_audio_base64")
        spoken = asked.tts_ref_audio_base64 or asked.ref_audio_base64
        if spoken is None:
            return self._service.voice
        voice = await self._service.prepare_voice(_floats(spoken)[None], INPUT_RATE_HZ)
        reference = _floats(asked.ref_audio_base64) if asked.ref_audio_base64 else np.empty(0, np.float32)
        return replace(voice, reference=reference)

    def _config(self, asked: Prepare) -> SessionConfig:
        session = self._service.seeded()
        wanted = asked.max_slice_nums or asked.config.max_slice_nums
        slices = min(wanted, session.max_slices) if wanted is not None else 1
        # This protocol cannot change a call, so nothing has to be kept for that.
        return replace(session, prompt=wrap(asked.system_prompt), max_slices=slices, keeps_inputs=False)

    async def _listen(self, call: AsyncSession) -> None:
        """Obey the client until it stops, or pauses for too long."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                idle_s = loop.time() + self._service.limits.idle_s
                async with asyncio.timeout_at(idle_s if self._pause_ends_s is None else self._pause_ends_s):
                    message = await self._receive()
            except TimeoutError:
                reason = "nothing came" if self._pause_ends_s is None else "paused for too long"
                await self._tell({"type": "timeout", "reason": reason})
                call.close()
                return
            match message:
                case AudioChunk() as chunk:
                    await self._hear(call, chunk)
                case Pause(timeout=timeout_s):
                    self._pause_ends_s = loop.time() + timeout_s
                    await self._tell({"type": "paused", "timeout": timeout_s})
                case Simple(type="resume"):
                    self._pause_ends_s = None
                    await self._tell({"type": "resumed"})
                case Simple(type="interrupt"):
                    call.interrupt()
                    await self._tell({"type": "interrupted"})
                case Simple(type="stop"):
                    await self._tell({"type": "stopped"})
                    call.close()
                    return
                case Prepare():
                    await self._error("the session is prepared already")

    async def _hear(self, call: AsyncSession, chunk: AudioChunk) -> None:
        try:
            if self._pause_ends_s is not None:
                raise InputError("the session is paused; resume it first")
            if chunk.audio_base64 is None:
                raise InputError("audio_chunk has no audio_base64")
            samples = _second(_floats(chunk.audio_base64))
            for picture in (chunk.frame_base64_list or ())[-self._service.session.max_pictures :]:
                call.send_picture(await asyncio.to_thread(read_picture, _bytes(picture)))
            if chunk.force_listen:
                call.wish(Wish.LISTEN)
            if len(self._sent) >= MAX_UNANSWERED:
                raise InputError(f"{len(self._sent)} seconds wait for their results; read them before you send more")
            self._sent.append(_Unit(time.monotonic()))
            try:
                call.send_audio(samples)
            except AudioError:
                self._sent.pop()
                raise
        except InputError as error:
            await self._error(str(error))

    async def _report(self, listening: asyncio.Task[None]) -> None:
        """Tell what each second came to, until the call is over."""
        assert self._happenings is not None, "the call is open"
        async for happening in self._happenings:
            await self._happened(happening)
        listening.cancel()
        await self._client.close(NORMAL_CLOSURE)

    async def _happened(self, happening: Happening) -> None:
        match happening:
            case UnitDecided():
                next(unit for unit in self._sent if unit.decided is None).decided = happening
            case Speech():
                self._unit(happening.chunk.unit).speech.append(happening)
            case UnitFinished():
                self._unit(happening.unit).finished = happening
                while self._sent and self._sent[0].finished is not None:
                    await self._tell(_result(self._sent.popleft()))
            case InputRefused():
                lost = next(unit for unit in self._sent if unit.decided is None)
                self._sent.remove(lost)
                await self._error(happening.message)
            case SessionEnded(code=code, message=message) if code != "completed":
                await self._error(message)

    def _unit(self, number: int) -> _Unit:
        return next(unit for unit in self._sent if unit.decided is not None and unit.decided.unit == number)

    async def _receive(self) -> Prepare | AudioChunk | Pause | Simple | None:
        """The next message, or None if it is none, which was told."""
        try:
            return _CLIENT_MESSAGE.validate_json(await self._client.receive())
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "message"
            await self._error(f"{where}: {first['msg']}")
            return None

    async def _refuse(self, error: AntiphonError) -> None:
        await self._error(str(error))
        await self._client.close(POLICY_VIOLATION)

    async def _error(self, message: str) -> None:
        await self._tell({"type": "error", "error": message})

    async def _tell(self, message: dict[str, JsonValue]) -> None:
        """Raises: SlowReaderError if the client does not read."""
        max_age_s = self._service.limits.outbox.max_age_s
        try:
            async with asyncio.timeout(max_age_s):
                await self._client.send(json.dumps(message))
        except TimeoutError as error:
            raise SlowReaderError(f"a message waits for more than {max_age_s} s") from error


def _result(unit: _Unit) -> dict[str, JsonValue]:
    decided, finished, now_s = unit.decided, unit.finished, time.monotonic()
    assert decided is not None, "the second is not decided"
    assert finished is not None, "the second is on its way"
    pieces = [speech.samples.numpy() for speech in unit.speech if speech.samples.numel()]
    sound = np.concatenate(pieces) if pieces else np.zeros(OUTPUT_SAMPLES_PER_UNIT, np.float32)
    return {
        "type": "result",
        "is_listen": decided.is_listen,
        "text": "".join(said.text for said in decided.said),
        "audio_data": base64.b64encode(sound.astype("<f4").tobytes()).decode(),
        "end_of_turn": any(said.ends_turn for said in decided.said),
        "current_time": decided.unit,
        "cost_llm_ms": finished.thinker_ms,
        "cost_tts_prep_ms": 0.0,
        "cost_tts_ms": finished.talker_ms,
        "cost_token2wav_ms": finished.code2wav_ms,
        "cost_all_ms": finished.thinker_ms + finished.talker_ms + finished.code2wav_ms,
        "n_tokens": len(decided.token_ids),
        "n_tts_tokens": sum(len(speech.chunk.codec_tokens) for speech in unit.speech),
        "server_send_ts": datetime.now(UTC).timestamp(),
        "wall_clock_ms": 1000 * (now_s - unit.sent_s),
        "kv_cache_length": decided.num_context_tokens,
        "vision_slices": 0,
        "vision_tokens": 0,
    }


def _second(samples: Samples) -> Samples:
    """The demo sends whole seconds; a shorter last one is filled with silence."""
    if not 0 < len(samples) <= UNIT_SAMPLES:
        raise AudioError(f"audio_chunk has {len(samples)} samples; send 1 to {UNIT_SAMPLES}, a second at 16 kHz")
    return np.pad(samples, (0, UNIT_SAMPLES - len(samples)))


def _floats(text: str) -> Samples:
    payload = _bytes(text)
    if len(payload) % 4:
        raise AudioError(f"{len(payload)} bytes are no float32 samples")
    return np.frombuffer(payload, "<f4").astype(np.float32)


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"this is no base64: {error}") from error
