"""Conditioned voices, each built once for all sessions that speak with it. Keys are digests of what defines a voice.

A voice is built piece by piece, so that those who speak wait for one piece at most. It stays while it is used, pinned,
or among the last used that fit into the store. Shown by tests/stages/test_voices.py.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from antiphon.errors import AntiphonError, as_ours
from antiphon.models.minicpmo.flow import MelSynthesizer, VoiceBuild
from antiphon.models.minicpmo.flow_cache import Voice
from antiphon.models.minicpmo.voice_prompt import VoicePrompt


@dataclass(frozen=True, slots=True)
class VoiceCounts:
    """What the store did so far, and what it holds now.

    num_hits: sessions that found their voice, or found it being built. num_misses: builds that sessions caused.
    num_evictions: voices forgotten for want of room. num_failures: builds that failed.
    num_voices, num_building: there and on their way. num_bytes: of those that are there.
    num_users: sessions of each voice that is there, least recently asked for first.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0
    num_failures: int = 0
    num_voices: int = 0
    num_building: int = 0
    num_bytes: int = 0
    num_users: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Stored:
    """users: in the order in which they asked."""

    voice: Voice
    users: dict[str, None]
    is_pinned: bool


@dataclass(slots=True, eq=False)
class _Ordered:
    """A voice that is to be built. build: its pieces; None until it is its turn."""

    prompt: VoicePrompt
    users: dict[str, None] = field(default_factory=dict)
    is_pinned: bool = False
    build: VoiceBuild | None = None


class VoiceStore:
    """Owns the voices, and who uses them. max_bytes: beyond them, voices without a user or pin are forgotten."""

    def __init__(self, synthesizer: MelSynthesizer, max_bytes: int) -> None:
        self._synthesizer = synthesizer
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, _Stored] = OrderedDict()  # least recently asked for first
        self._ordered: OrderedDict[str, _Ordered] = OrderedDict()  # in the order in which they are built
        self._told: dict[str, Voice | AntiphonError] = {}
        self._counts = VoiceCounts()

    def ask(self, prompt: VoicePrompt, user: str) -> None:
        """Want a voice; `answers` brings it. `leave` gives it back.

        Raises: AudioError if the prompt does not fit the model; nothing is asked then.
        """
        self._synthesizer.check_prompt(prompt)
        key = _digest(prompt)
        if key in self._stored or key in self._ordered:
            self._counts = replace(self._counts, num_hits=self._counts.num_hits + 1)
        else:
            self._counts = replace(self._counts, num_misses=self._counts.num_misses + 1)
        if key in self._stored:
            self._stored.move_to_end(key)
            self._stored[key].users[user] = None
            self._told[user] = self._stored[key].voice
        else:
            self._ordered.setdefault(key, _Ordered(prompt)).users[user] = None

    def pin(self, prompt: VoicePrompt) -> None:
        """Keep a voice for good, from when it is built. Raises: AudioError if the prompt does not fit the model."""
        self._synthesizer.check_prompt(prompt)
        key = _digest(prompt)
        if key in self._stored:
            self._stored[key].is_pinned = True
        else:
            self._ordered.setdefault(key, _Ordered(prompt)).is_pinned = True

    def leave(self, user: str) -> None:
        """A session needs its voice no more, or never got it; idempotent. What nobody waits for is not built on."""
        self._told.pop(user, None)
        for stored in self._stored.values():
            stored.users.pop(user, None)
        for key, ordered in [*self._ordered.items()]:
            ordered.users.pop(user, None)
            if not ordered.users and not ordered.is_pinned:
                del self._ordered[key]
        self._trim()

    @property
    def is_idle(self) -> bool:
        """Nothing is to be built or told."""
        return not self._ordered and not self._told

    def advance(self) -> None:
        """Build one piece of one voice, if there is one to build. If that fails, it is for those who wait for it."""
        if not self._ordered:
            return
        key, ordered = next(iter(self._ordered.items()))
        try:
            ordered.build = ordered.build or VoiceBuild(self._synthesizer, ordered.prompt)
            ordered.build.advance()
        except Exception as error:  # noqa: BLE001 - whatever one voice breaks must not reach those of others
            del self._ordered[key]
            self._counts = replace(self._counts, num_failures=self._counts.num_failures + 1)
            self._told |= dict.fromkeys(ordered.users, as_ours(error, "the voice was not built"))
            return
        if ordered.build.is_done:
            del self._ordered[key]
            voice = ordered.build.voice
            self._stored[key] = _Stored(voice, ordered.users, ordered.is_pinned)
            self._told |= dict.fromkeys(ordered.users, voice)
            self._trim()

    def answers(self) -> dict[str, Voice | AntiphonError]:
        """What has come of what was asked since the last call, by user."""
        told, self._told = self._told, {}
        return told

    @property
    def counts(self) -> VoiceCounts:
        return replace(
            self._counts,
            num_voices=len(self._stored),
            num_building=len(self._ordered),
            num_bytes=self._num_bytes,
            num_users=tuple(len(stored.users) for stored in self._stored.values()),
        )

    @property
    def _num_bytes(self) -> int:
        return sum(stored.voice.num_bytes for stored in self._stored.values())

    def _trim(self) -> None:
        unused = [key for key, stored in self._stored.items() if not stored.users and not stored.is_pinned]
        for key in unused:
            if self._num_bytes <= self._max_bytes:
                return
            del self._stored[key]
            self._counts = replace(self._counts, num_evictions=self._counts.num_evictions + 1)


def _digest(prompt: VoicePrompt) -> str:
    content = hashlib.sha256()
    for part in (repr(prompt.tokens).encode(), prompt.mel.numpy().tobytes(), prompt.speaker.numpy().tobytes()):
        content.update(hashlib.sha256(part).digest())
    return content.hexdigest()
