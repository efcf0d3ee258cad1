"""What all objects on the realtime socket share: strictness, and what their fields are made of.

A field of type `Maybe` is left out of the JSON when there is none; one of type `X | None` is written as null. A client
may send null for either. Whether a key was there at all is in pydantic's `model_fields_set`.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, StringConstraints

T = TypeVar("T")


class Wire(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


def _is_none(value: object) -> bool:
    return value is None


Maybe = Annotated[T | None, Field(exclude_if=_is_none)]
Row = Annotated[tuple[T, ...], Strict(False)]
"""A list; strict only in what it holds, because JSON knows no tuple."""

MAX_NAME_CHARACTERS = 512
Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_CHARACTERS)]
"""An id, a model or a voice."""
Count = Annotated[int, Field(ge=0, le=2**53)]
"""Tokens, samples, milliseconds or a place in a list; as large as every JSON reader keeps exactly."""
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=16),
]
"""The client's own words, echoed unchanged."""
