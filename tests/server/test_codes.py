"""The table of codes is complete: one row for each code that an error event may have, and no other."""

from __future__ import annotations

from typing import get_args

from antiphon import errors
from antiphon.server.audio import AudioFault
from antiphon.server.events.client import EventFault
from antiphon.server.realtime.codes import CODES, Ends, RequestCode
from antiphon.server.realtime.hosting import CLOSE_CODES

NEVER_IN_A_SESSION = {
    "error",  # the base of all, never raised
    "invalid_config",  # the start of the server
    "invalid_checkpoint",  # the same
    "completed",  # no fault
    "audio_too_large",  # a message of so much is too large itself
}
NEVER_TOLD = {"completed", "slow_reader"}
"""Ends of sessions without an error event: nothing was wrong, or the client does not read."""


def engine_codes(kind: type[errors.AntiphonError] = errors.AntiphonError) -> set[str]:
    kinds = [one for one in kind.__subclasses__() if one.__module__ == errors.__name__]
    return {kind.code}.union(*map(engine_codes, kinds))


def test_every_code_has_its_row() -> None:
    of_events, of_requests = set(get_args(EventFault)), set(get_args(RequestCode))
    of_audio = {fault.value for fault in AudioFault}
    assert set(CODES) == (of_events | of_requests | of_audio | engine_codes()) - NEVER_IN_A_SESSION


def test_a_code_that_closes_a_session_says_so() -> None:
    told = set(CLOSE_CODES) - NEVER_TOLD
    assert told <= {code for code, one in CODES.items() if one.ends is Ends.SESSION}


def test_codes_are_explained_in_words_of_their_own() -> None:
    for code, one in CODES.items():
        assert one.meaning, code
        assert one.advice, code
        assert not one.meaning.endswith("."), code
