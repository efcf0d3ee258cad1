"""Any messages, in any order, over real sockets: all are answered, nothing is left, and a neighbour hears the same.

`pytest tests/server/abuse/test_fuzz.py -n 0 -rP --fuzz-messages=10000` says that many.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from server.abuse.conftest import KEY, NEIGHBOUR_KEY, StartWatched
from server.abuse.messages import DEMO, MIB, REALTIME, BadText, Binary, Frame, Text, Until, frames
from server.abuse.neighbour import undisturbed_neighbour
from server.abuse.speaking import converse

logger = logging.getLogger(__name__)

CORPUS = Path(__file__).parent / "corpus.json"
FRAMES_PER_SESSION = 20


@dataclass(frozen=True, slots=True)
class Kept:
    """A conversation that once found a fault, or reaches what random ones hardly do."""

    why: str
    address: str
    steps: tuple[Frame | Until, ...]


def corpus() -> list[Kept]:
    entries: list[dict[str, object]] = json.loads(CORPUS.read_text(encoding="utf-8"))
    found = []
    for entry in entries:
        match entry:
            case {"why": str(why), "address": str(address), "steps": list(steps)}:
                found.append(Kept(why, address, tuple(map(step, steps))))
    assert len(found) == len(entries)
    return found


def step(written: object) -> Frame | Until:
    """As it stands in the corpus: a text as it is, an object as its JSON, or what a `$` name says."""
    match written:
        case str(text):
            return Text(text)
        case {"$binary": str(digits)}:
            return Binary(bytes.fromhex(digits))
        case {"$bad_text": str(digits)}:
            return BadText(bytes.fromhex(digits))
        case {"$until": str(kind)}:
            return Until(kind)
        case {"$long": [str(head), str(repeated), int(num_bytes), str(tail)]}:
            num_times = (num_bytes - len(head) - len(tail)) // len(repeated.encode())
            return Text(f"{head}{repeated * num_times}{tail}")
    return Text(json.dumps(written))


SHARES = {"/v1/realtime": 50, "/v1/realtime?vendor_events=1": 30, "/v1/realtime?resume=1": 5, "/ws/duplex/a": 15}
"""How many messages of a hundred go where."""


def conversations(address: str) -> st.SearchStrategy[list[Frame]]:
    said = frames(DEMO if "duplex/" in address else REALTIME, MIB)
    # A socket that resumes has hardly anything to say.
    num_frames = 2 if "resume" in address else FRAMES_PER_SESSION
    return st.lists(said, min_size=num_frames, max_size=num_frames)


def test_every_conversation_of_the_corpus_goes_well(start_watched: StartWatched) -> None:
    async def converse_one(url: str, kept: Kept, room: asyncio.Semaphore) -> str | None:
        async with room:
            try:
                await converse(url + kept.address, KEY, kept.steps)
            except (AssertionError, TimeoutError) as error:
                return f"{kept.why}: {error!r}"
            return None

    async def converse_all(url: str) -> list[str]:
        room = asyncio.Semaphore(4)
        ends = await asyncio.gather(*(converse_one(url, kept, room) for kept in corpus()))
        return [complaint for complaint in ends if complaint is not None]

    with start_watched(max_message_bytes=str(MIB), resume_s="0.2") as watched:
        complaints = asyncio.run(converse_all(watched.server.websocket_url))
        assert not complaints, "\n".join(complaints)


def test_random_messages_are_answered_and_leave_nothing(
    start_watched: StartWatched, two_keys: str, pytestconfig: pytest.Config
) -> None:
    num_messages: int = pytestconfig.getoption("--fuzz-messages")
    said: Counter[str] = Counter()

    def fuzz(url: str, address: str, num_wanted: int) -> None:
        @settings(
            # Some conversations end before all of their frames were said.
            max_examples=1 + 3 * num_wanted // (2 if "resume" in address else FRAMES_PER_SESSION),
            suppress_health_check=list(HealthCheck),
            database=None,
            phases=(Phase.generate,),
        )
        @given(conversations(address))
        def say(steps: list[Frame]) -> None:
            if said[address] < num_wanted:
                said[address] += asyncio.run(converse(url + address, KEY, steps))

        say()

    limits = {"max_message_bytes": str(MIB), "resume_s": "0.2", "max_calls_per_key": "3", "api_keys_file": two_keys}
    with start_watched(**limits) as watched, undisturbed_neighbour(watched.url, NEIGHBOUR_KEY):
        for address, share in SHARES.items():
            fuzz(watched.server.websocket_url, address, num_messages * share // 100)
    assert said.total() >= num_messages, said
    logger.info("%d messages: %s", said.total(), dict(said))
