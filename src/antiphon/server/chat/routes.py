"""`/v1/chat/completions` and `/v1/models`: who may ask, what is sent when, and the end if nobody listens any more.

Shown by tests/server/test_chat_completions.py and tests/server/test_chat_errors.py.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing, suppress
from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from antiphon.core.events import SessionEnded, SessionOpened
from antiphon.errors import AntiphonError, CallEnded, ContextLengthExceeded
from antiphon.server.api_error import ApiError
from antiphon.server.auth import KEY_IS_BUSY, Refusal
from antiphon.server.chat.answer import Answer, Heading
from antiphon.server.chat.asking import ChatOffer, chat_config, conversation
from antiphon.server.chat.request import ChatRequest, parse
from antiphon.server.chat.stream import AnswerStream, Pieces
from antiphon.server.chat.wire import ModelCard, ModelList
from antiphon.server.events.wire import Wire
from antiphon.server.outbox import SlowReaderError
from antiphon.server.service import Service


def router(service: Service, offer: ChatOffer) -> APIRouter:
    routes = APIRouter()
    card = ModelCard(id=service.model, created=_now())

    async def models(request: Request) -> Response:
        refusal = service.door.identify(request.headers)
        return _refused(refusal) if isinstance(refusal, Refusal) else _json(ModelList(data=(card,)))

    async def model(request: Request) -> Response:
        refusal = service.door.identify(request.headers)
        if isinstance(refusal, Refusal):
            return _refused(refusal)
        name = request.path_params["name"]
        return _json(card) if name == service.model else _no_such_model(service).response()

    routes.add_route("/v1/models", models, methods=["GET"])
    routes.add_route("/v1/models/{name:path}", model, methods=["GET"])
    routes.routes.append(Route("/v1/chat/completions", _Completions(service, offer), methods=["POST"]))
    return routes


class _Completions:
    """The route as an ASGI app, so that a client that has gone is noticed whatever is under way."""

    def __init__(self, service: Service, offer: ChatOffer) -> None:
        self._service = service
        self._offer = offer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            caller = self._service.door.identify(request.headers)
            if isinstance(caller, Refusal):
                await _refused(caller)(scope, receive, send)
                return
            body = await self._read(request)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        except ClientDisconnect:
            return
        answering = asyncio.create_task(self._answer(request, body, send), name="chat")
        leaving = asyncio.create_task(_until_gone(receive), name="chat client")
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            with suppress(asyncio.CancelledError):
                await answering

    async def _read(self, request: Request) -> bytes:
        """Raises: ApiError if it is too large or comes too slowly, ClientDisconnect."""
        body, limit = bytearray(), self._offer.max_body_bytes
        try:
            async with asyncio.timeout(self._service.limits.idle_s):
                async for piece in request.stream():
                    body += piece
                    if len(body) > limit:
                        raise ApiError(413, "request_too_large", f"the body has more than {limit} bytes; send less")
        except TimeoutError as error:
            raise ApiError(408, "request_timeout", "the body did not come in time; send it again") from error
        return bytes(body)

    async def _answer(self, request: Request, body: bytes, send: Send) -> None:
        with self._service.door.enter(request.headers) as refusal:
            if refusal is not None:
                await _refused(refusal)(request.scope, request.receive, send)
                return
            try:
                asked = await asyncio.to_thread(parse, body)
                if asked.model != self._service.model:
                    raise _no_such_model(self._service)
                await self._complete(asked, request, send)
            except ApiError as error:
                self._service.metrics.count_error(error.code)
                await error.response()(request.scope, request.receive, send)
            except SlowReaderError as error:
                self._service.metrics.count_error(error.code)

    async def _complete(self, asked: ChatRequest, request: Request, send: Send) -> None:
        """Raises: ApiError as long as nothing was sent."""
        async with aclosing(self._pieces(asked)) as pieces:
            answer = await anext(pieces)
            assert isinstance(answer, Answer), f"a chat begins with {answer!r}"
            if asked.stream:
                stream = AnswerStream(send, self._service.limits.outbox.max_age_s)
                await stream.tell(answer, pieces, has_usage=asked.has_usage)
                return
            said = [piece async for piece in pieces if not isinstance(piece, Answer)]
        form = "pcm16" if asked.audio is None else asked.audio.format
        completion = await asyncio.to_thread(answer.completion, said, form)
        await _json(completion)(request.scope, request.receive, send)

    async def _pieces(self, asked: ChatRequest) -> Pieces:
        """An answer that has begun, then what it says; closed before its end, the chat is over. Raises: ApiError."""
        service, name = self._service, secrets.token_hex(12)
        config = chat_config(asked, self._offer, service.draw_seed())
        messages = await asyncio.to_thread(conversation, asked, self._offer)
        try:
            chat = await service.engine.chat(f"chatcmpl-{name}", messages, config, service.voice.prompt)
        except AntiphonError as error:
            raise ApiError.of(error, "messages") from error
        heading = Heading(chat.session_id, _now(), self._service.model, f"audio_{name}" if asked.is_spoken else "")
        answer = Answer(heading, chat.asked)
        try:
            async with aclosing(service.happenings(chat)) as happenings:
                async for happening in happenings:
                    match happening:
                        case SessionOpened():
                            yield answer
                        case SessionEnded(code=code, message=message) if code != CallEnded.code:
                            place = "messages" if code == ContextLengthExceeded.code else None
                            raise ApiError.by_code(code, message, place)
                        case _:
                            if piece := answer.take(happening):
                                yield piece
        finally:
            chat.close()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _refused(refusal: Refusal) -> JSONResponse:
    """As everywhere, but for a key that asks too much at once: clients know its status as their own fault."""
    status = 429 if refusal is KEY_IS_BUSY else refusal.status
    return ApiError(status, refusal.code, refusal.message).response()


def _no_such_model(service: Service) -> ApiError:
    return ApiError(404, "model_not_found", f"there is no such model here; ask for {service.model}", "model")


def _json(answer: Wire) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


def _now() -> int:
    return int(datetime.now(UTC).timestamp())
