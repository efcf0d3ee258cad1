"""Keys, origins and limits, without a network."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from antiphon.errors import ConfigError
from antiphon.server.auth import (
    ANYBODY,
    FOREIGN_ORIGIN,
    KEY_IS_BUSY,
    KEY_PROTOCOL,
    NO_KEY,
    REFUSALS,
    Access,
    KeyLimits,
    Refusal,
    presented_key,
    read_api_keys,
)


def access(tmp_path: Path, text: str, *origins: str) -> Access:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    return Access(read_api_keys(file), origins)


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


def test_a_key_opens_in_the_clear_or_as_a_digest(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"hashed key").hexdigest()
    door = access(tmp_path, f"# ours\n\n  plain key \nsha256:{digest.upper()}\n")
    names = [door.identify(bearer(key)) for key in ("plain key", "hashed key")]
    assert all(isinstance(name, str) and name not in ("plain key", "hashed key") for name in names)
    assert len(set(names)) == 2


@pytest.mark.parametrize("key", ["", "wrong", "plain", "plain key2", "PLAIN KEY", "# ours", "schlüssel"])
def test_anything_else_does_not(tmp_path: Path, key: str) -> None:
    assert access(tmp_path, "# ours\nplain key\n").identify(bearer(key)) is NO_KEY


def test_a_digest_is_no_key_itself(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"key").hexdigest()
    door = access(tmp_path, f"sha256:{digest}")
    assert door.identify(bearer(digest)) is NO_KEY
    assert door.identify(bearer(f"sha256:{digest}")) is NO_KEY


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, ""),
        ({"authorization": "bearer k"}, "k"),
        ({"authorization": "Basic k"}, ""),
        ({"authorization": "k"}, ""),
        ({"sec-websocket-protocol": f"realtime, {KEY_PROTOCOL}k, openai-beta.realtime-v1"}, "k"),
        ({"sec-websocket-protocol": "realtime"}, ""),
        ({"authorization": "Bearer a", "sec-websocket-protocol": f"{KEY_PROTOCOL}b"}, "a"),
    ],
)
def test_a_key_is_shown_as_a_header_or_a_subprotocol(headers: dict[str, str], key: str) -> None:
    assert presented_key(Headers(headers)) == key


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("# none\n", "no key in"), ("a\nsha256:12\n", "line 2"), (f"sha256:{'g' * 64}", "no sha256 digest")],
)
def test_a_file_without_proper_keys_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        access(tmp_path, text)


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        ("https://good.example", True),
        ("https://GOOD.example", True),
        ("http://good.example", False),
        ("https://good.example.bad.example", False),
        ("http://here:8000", True),
        ("https://here:8000", True),
        ("http://here:9000", False),
        ("null", False),
        ("", False),
    ],
)
def test_pages_of_our_own_and_of_allowed_origins_may_call(origin: str, is_allowed: bool) -> None:  # noqa: FBT001
    door = Access(None, ("https://good.example/",))
    found = door.identify(Headers({"origin": origin, "host": "here:8000"}))
    assert found == (ANYBODY if is_allowed else FOREIGN_ORIGIN)
    assert Access(None, ("*",)).identify(Headers({"origin": origin})) == ANYBODY
    assert door.identify(Headers({"host": "here:8000"})) == ANYBODY


def test_calls_are_counted_by_key_and_given_back() -> None:
    limits = KeyLimits(max_calls=1)
    with limits.one_call("a") as first, limits.one_call("a") as second, limits.one_call("b") as other:
        assert (first, second, other) == (None, KEY_IS_BUSY, None)
    with pytest.raises(KeyError), limits.one_call("a"):
        raise KeyError
    with limits.one_call("a") as again:
        assert again is None


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.code)
def test_a_refusal_has_the_form_of_openais_errors(refusal: Refusal) -> None:
    response = refusal.response()
    error = json.loads(bytes(response.body))["error"]
    assert error["code"] == refusal.code
    assert set(error) == {"message", "type", "param", "code"}
    assert (refusal.status, refusal.close_code) in ((401, 1008), (403, 1008), (503, 1013))
    assert ("retry-after" in response.headers) == (refusal.status == 503)
