"""What pydantic finds wrong with a request, as the client would say where it is.

Shown by tests/server/test_chat_request.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue, ValidationError
from pydantic_core import ErrorDetails

from antiphon.server.api_error import ApiError

MAX_QUOTED = 64
"""Characters of a client's own words that an error repeats."""


def fault_of(error: ValidationError, request: JsonValue) -> ApiError:
    """Of all that is wrong, what lies deepest: of a union's branches, that one was meant."""
    faults = error.errors(include_url=False, include_input=False)
    located = [(_place(request, fault["loc"], is_missing=fault["type"] == "missing"), fault) for fault in faults]
    place, fault = max(located, key=lambda found: found[0].count(".") + found[0].count("["))
    name = place[:MAX_QUOTED]
    match fault["type"]:
        case "missing":
            return ApiError(400, "missing_required_parameter", f"{name} is missing", name)
        case "extra_forbidden":
            return ApiError(400, "unknown_parameter", f"{name} is not known here; leave it out", name)
        case _:
            return ApiError(400, "invalid_value", f"{name}: {_sentence(fault)}", name)


def _place(value: JsonValue, location: Sequence[int | str], *, is_missing: bool) -> str:
    """Pydantic's location names the branches of unions too, which are no keys of the request."""
    path, is_branch_known = "", False
    for place, key in enumerate(location):
        is_last = place == len(location) - 1
        match value, key:
            case {"type": kind}, str() if kind == key and not is_branch_known:
                is_branch_known = True  # a text part has a text, too
                continue
            case list(), int() if key < len(value):
                path, value = f"{path}[{key}]", value[key]
            case dict(), str() if key in value:
                path, value = f"{path}.{key}", value[key]
            case dict(), str() if is_last and is_missing:
                path = f"{path}.{key}"
        is_branch_known = False
    return path.removeprefix(".")


def _sentence(fault: ErrorDetails) -> str:
    """Without the client's words: pydantic quotes an unknown tag and nothing else."""
    match fault["type"]:
        case "union_tag_invalid":
            return f"the kind is none of {fault['ctx']['expected_tags']}"
        case "union_tag_not_found":
            return f"{fault['ctx']['discriminator']} is missing"
        case _:
            return fault["msg"][:1].lower() + fault["msg"][1:].removesuffix(".")
