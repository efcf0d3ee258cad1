"""Who may call: bearer keys, the origins of web pages, how many calls a key has. What refusals look like on the wire.

A refused WebSocket gets an HTTP status before it is accepted; the close code is for one that was accepted already.
Keys are kept as digests only. Shown by tests/server/test_auth.py.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.websockets import WebSocket

from antiphon.errors import ConfigError
from antiphon.server.api_error import ApiError

NORMAL_CLOSURE = 1000
POLICY_VIOLATION = 1008
INTERNAL_ERROR = 1011
SERVICE_RESTART = 1012
TRY_AGAIN_LATER = 1013
"""Close codes of RFC 6455 and its registry; clients take the last three as a reason to come again."""

KEY_PROTOCOL = "openai-insecure-api-key."
"""Starts a subprotocol that carries a key: a web page cannot set headers of its WebSocket."""

ANYBODY = "anybody"
"""The caller's name where nobody is asked for a key."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why somebody does not come in. status: HTTP, before a WebSocket is accepted. close_code: afterwards."""

    status: int
    close_code: int
    code: str
    message: str

    def response(self) -> JSONResponse:
        """In the form of OpenAI's errors."""
        return ApiError(self.status, self.code, self.message).response()

    async def deny(self, websocket: WebSocket) -> None:
        """Answer a handshake that was not accepted."""
        await websocket.send_denial_response(self.response())


NO_KEY = Refusal(401, POLICY_VIOLATION, "invalid_api_key", "a valid key is needed: Authorization: Bearer KEY")
FOREIGN_ORIGIN = Refusal(403, POLICY_VIOLATION, "origin_not_allowed", "pages of this origin may not call this server")
KEY_IS_BUSY = Refusal(503, TRY_AGAIN_LATER, "too_many_calls", "this key has all the calls that it may have; end one")
ENGINE_IS_FULL = Refusal(503, TRY_AGAIN_LATER, "resource_exhausted", "all calls are taken; try again later")
DRAINING = Refusal(503, TRY_AGAIN_LATER, "draining", "this server is stopping; connect again to reach another one")
LOADING = Refusal(503, TRY_AGAIN_LATER, "loading", "the model is loading; connect again in a moment")
REFUSALS = (NO_KEY, FOREIGN_ORIGIN, KEY_IS_BUSY, ENGINE_IS_FULL, DRAINING, LOADING)


class ApiKeys:
    """Keys that may call, by digest; none of them is kept in the clear."""

    def __init__(self, digests: frozenset[bytes]) -> None:
        self._digests = tuple(digests)

    def name(self, key: str) -> str | None:
        """A name for the owner of a key, fit for logs; None if it is no key. Every stored one is compared."""
        digest = hashlib.sha256(key.encode()).digest()
        is_known = False
        for stored in self._digests:
            is_known |= hmac.compare_digest(stored, digest)
        return digest.hex()[:12] if is_known else None


def read_api_keys(path: Path) -> ApiKeys:
    """A file with a key a line, in the clear or as `sha256:` and 64 hexadecimal digits; `#` starts a comment.

    Raises: ConfigError if it cannot be read, a digest is none, or there is no key in it.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the keys in {path} cannot be read: {error}") from error
    digests = set()
    for number, line in enumerate(lines, start=1):
        if not line or line.startswith("#"):
            continue
        if not line.startswith("sha256:"):
            digests.add(hashlib.sha256(line.encode()).digest())
        elif re.fullmatch(r"[0-9a-fA-F]{64}", line.removeprefix("sha256:")):
            digests.add(bytes.fromhex(line.removeprefix("sha256:")))
        else:
            raise ConfigError(f"line {number} of {path} is no sha256 digest; it must be sha256: and 64 hex digits")
    if not digests:
        raise ConfigError(f"there is no key in {path}; add one, or leave the file out to let anybody call")
    return ApiKeys(frozenset(digests))


class Access:
    """Decides who a caller is, from headers alone. keys: None lets anybody call. origins: as in the settings."""

    def __init__(self, keys: ApiKeys | None, origins: tuple[str, ...]) -> None:
        self._keys = keys
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    def identify(self, headers: Headers) -> str | Refusal:
        """The caller's name, or why it may not call."""
        if not self._is_origin_allowed(headers):
            return FOREIGN_ORIGIN
        if self._keys is None:
            return ANYBODY
        name = self._keys.name(presented_key(headers))
        return NO_KEY if name is None else name

    def _is_origin_allowed(self, headers: Headers) -> bool:
        """Only browsers send an origin. The server's own pages may always call."""
        if "origin" not in headers or "*" in self._origins:
            return True
        origin = headers["origin"].lower()
        is_own = "host" in headers and urlsplit(origin).netloc == headers["host"].lower()
        return is_own or origin in self._origins


def presented_key(headers: Headers) -> str:
    """What a caller shows as its key, in the header or, as web pages do, as a subprotocol; empty for nothing."""
    if "authorization" in headers:
        scheme, _, key = headers["authorization"].partition(" ")
        return key.strip() if scheme.lower() == "bearer" else ""
    protocols = ",".join(headers.getlist("sec-websocket-protocol")).split(",")
    keys = [name.strip().removeprefix(KEY_PROTOCOL) for name in protocols if name.strip().startswith(KEY_PROTOCOL)]
    return keys[0] if keys else ""


class KeyLimits:
    """Owns the count of each caller's calls. For one event loop."""

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._num_calls: Counter[str] = Counter()

    @contextmanager
    def one_call(self, name: str) -> Iterator[Refusal | None]:
        """Count a call as long as the context lasts, unless that would be too many."""
        if self._num_calls[name] >= self._max_calls:
            yield KEY_IS_BUSY
            return
        self._num_calls[name] += 1
        try:
            yield None
        finally:
            self._num_calls[name] -= 1
            if not self._num_calls[name]:
                del self._num_calls[name]
