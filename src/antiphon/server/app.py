"""The app: the operator's routes, and every protocol in which calls and chats come in. Shown by tests/server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from antiphon.models.minicpmo.prompt import DEFAULT_INSTRUCTIONS
from antiphon.server import openbmb, page
from antiphon.server.api_error import ApiError
from antiphon.server.chat import routes as chat
from antiphon.server.chat.asking import ChatOffer
from antiphon.server.for_engine import window_limits
from antiphon.server.journal import JournalConfig
from antiphon.server.outbox import OutboxLimits
from antiphon.server.realtime import socket as realtime
from antiphon.server.run import Host, operations_app
from antiphon.server.service import Limits, Service, random_seed
from antiphon.server.settings import ServerSettings
from antiphon.units import INPUT_RATE_HZ


def build_app(host: Host, draw_seed: Callable[[], int] = random_seed) -> FastAPI:
    """draw_seed: of calls that name no seed."""
    app = operations_app(host)
    running = host.running
    service = Service(
        model=model_name(host.settings),
        engine=host.engine,
        book=running.voices,
        session=running.session,
        voice=running.voices.default(),
        mode=host.settings.window,
        window_limits=window_limits(host.settings),
        marker=running.marker,
        speech=host.speech,
        door=host.door,
        metrics=host.metrics,
        limits=limits_of(host.settings),
        draw_seed=draw_seed,
    )
    app.include_router(realtime.router(service))
    app.include_router(openbmb.router(service))
    app.include_router(chat.router(service, offer_of(host.settings)))
    app.include_router(page.router(page_offer(host, service), host.door))
    app.add_exception_handler(HTTPException, _refuse)
    return app


def page_offer(host: Host, service: Service) -> page.PageOffer:
    """What the page lets people choose from."""
    return page.PageOffer(
        model=service.model,
        has_random_weights=host.running.is_tiny,
        instructions=DEFAULT_INSTRUCTIONS,
        mode=service.mode,
        limits=service.window_limits,
        temperature=service.session.text.temperature,
        listen_scale=service.session.text.listen_scale,
        is_changeable=service.session.keeps_inputs,
        takes_pictures=service.session.max_pictures > 0,
        resume_s=host.settings.resume_s,
    )


def offer_of(settings: ServerSettings) -> ChatOffer:
    """What chats may ask for."""
    return ChatOffer(
        max_context_tokens=settings.max_chat_tokens,
        answer_tokens=settings.chat_answer_tokens,
        max_slices=settings.max_chat_slices,
        max_body_bytes=settings.max_message_bytes,
    )


def model_name(settings: ServerSettings) -> str:
    """A checkpoint in a folder goes by the folder's name."""
    is_folder = Path(settings.model).is_dir()
    return Path(settings.model).resolve().name if is_folder else settings.model


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    """What no route takes, in the form of the others' errors."""
    assert isinstance(error, HTTPException), f"{error!r} is handled as a refusal"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    return ApiError(error.status_code, code, error.detail).response()


def limits_of(settings: ServerSettings) -> Limits:
    """What clients may let wait. Sound waits as float32."""
    by_time, by_memory = settings.max_input_queue_s * INPUT_RATE_HZ, settings.max_input_queue_bytes // 4
    outbox = OutboxLimits(settings.max_output_queue_bytes, settings.max_output_queue_s)
    return Limits(
        idle_s=settings.idle_s,
        max_input_samples=min(round(by_time), by_memory),
        outbox=outbox,
        resume_s=settings.resume_s,
        first_message_s=settings.first_message_s,
        journal=JournalConfig(settings.max_journal_bytes, settings.max_journal_s),
    )
