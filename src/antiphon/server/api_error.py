"""Why an HTTP request is not answered, in the form of OpenAI's errors. Shown by tests/server/test_chat_errors.py."""

from __future__ import annotations

import json

from fastapi.responses import JSONResponse
from pydantic import JsonValue

from antiphon.errors import (
    AntiphonError,
    AudioError,
    ContextLengthExceeded,
    EngineStopped,
    ImageError,
    InputError,
    PromptTooLong,
    ResourceExhausted,
)

RETRY_AFTER_S = 5

_CLIENTS_FAULTS = (InputError, AudioError, ImageError, PromptTooLong, ContextLengthExceeded)
_STATUS_BY_CODE = {error.code: 400 for error in _CLIENTS_FAULTS}
_STATUS_BY_CODE |= {error.code: 503 for error in (ResourceExhausted, EngineStopped)}


class ApiError(Exception):
    """status: HTTP. code: stable, for programs. param: the place in the request, such as `messages[0].content`."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    @staticmethod
    def by_code(code: str, message: str, param: str | None = None) -> ApiError:
        """code: of the error that a session ended with."""
        return ApiError(_STATUS_BY_CODE.get(code, 500), code, message, param)

    @staticmethod
    def of(error: AntiphonError, param: str | None = None) -> ApiError:
        return ApiError.by_code(error.code, str(error), param)

    @property
    def body(self) -> dict[str, JsonValue]:
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def json(self) -> str:
        return json.dumps(self.body)

    def response(self) -> JSONResponse:
        retry = {"Retry-After": str(RETRY_AFTER_S)}
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: retry, 503: retry}
        return JSONResponse(self.body, self.status, headers.get(self.status, {}))
