"""The page that a browser shows: its files under a strict policy, and what this server offers it.

The files are in `page`, and are all that it loads. Not the calls: it makes them over `/v1/realtime` as any client.
Shown by tests/page.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from antiphon.config import WindowLimits, WindowMode
from antiphon.server.door import Door

FOLDER = Path(__file__).parents[1] / "page"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' blob:",
        "media-src 'self' blob:",
        "worker-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Nothing from elsewhere, nothing inline. blob: is for pictures, voices and calls that the page itself holds."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "Permissions-Policy": "microphone=(self), camera=(self), display-capture=(self)",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # A new server has a new page at once; an unchanged one costs a question.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageOffer:
    """What a call on this server may be, for a form. has_random_weights: what it says is noise.

    limits: of windows, none of which may be larger. temperature, listen_scale: of a call that asks for nothing.
    is_changeable: instructions, voice and window may change during a call. resume_s: who was cut off has so long.
    """

    model: str
    has_random_weights: bool
    instructions: str
    mode: WindowMode
    limits: WindowLimits
    temperature: float
    listen_scale: float
    is_changeable: bool
    takes_pictures: bool
    resume_s: float

    def response(self) -> JSONResponse:
        window = {
            "mode": self.mode.value,
            "max_tokens": self.limits.max_tokens,
            "high_tokens": self.limits.high_tokens,
            "low_tokens": self.limits.low_tokens,
            "max_units": self.limits.max_units,
            "previous_max_tokens": self.limits.previous_max_tokens,
        }
        return JSONResponse(
            {
                "model": self.model,
                "has_random_weights": self.has_random_weights,
                "instructions": self.instructions,
                "window": window,
                "temperature": self.temperature,
                "listen_scale": self.listen_scale,
                "is_changeable": self.is_changeable,
                "takes_pictures": self.takes_pictures,
                "resume_s": self.resume_s,
            },
            headers={"Cache-Control": "no-store"},
        )


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    media_type: str
    tag: str

    async def answer(self, request: Request) -> Response:
        headers = {**HEADERS, "ETag": self.tag}
        if "if-none-match" in request.headers and self.tag in request.headers["if-none-match"]:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def router(offer: PageOffer, door: Door) -> APIRouter:
    """The page at `/`, the operator's at `/ops`, and the answer to whether this caller would come in."""
    routes = files_router()

    async def offered(request: Request) -> Response:
        # A page is not told why its WebSocket was refused, so it asks here before.
        with door.enter(request.headers) as refusal:
            return offer.response() if refusal is None else refusal.response()

    routes.add_api_route("/page/offer", offered, response_class=Response)
    return routes


def files_router() -> APIRouter:
    """The files alone, for a server that has no engine yet."""
    routes = APIRouter()
    for address, file in _files():
        routes.add_route(address, file.answer, methods=["GET"])
    return routes


def _files() -> Iterator[tuple[str, PageFile]]:
    """Read once; a file that is not there at the start is none."""
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix not in MEDIA_TYPES:
            continue
        content = path.read_bytes()
        file = PageFile(content, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')
        yield f"/page/{path.relative_to(FOLDER).as_posix()}", file
        if path.name == "index.html":
            yield "/", file
        elif path.name == "ops.html":
            yield "/ops", file
