"""What became of the sound of answers: made, sent, played; and which words of them were heard by then.

Nothing says when a word is spoken but the seconds that words and sound belong to; in between, words take equal time.
Shown by tests/server/test_playback.py.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from antiphon.server.realtime.conversation import MAX_ITEMS, RequestError
from antiphon.units import OUTPUT_RATE_HZ


@dataclass(frozen=True, slots=True)
class Mark:
    """By `audio_ms` of an answer's sound, `num_chars` of its words are said."""

    num_chars: int
    audio_ms: int


@dataclass(slots=True)
class Playback:
    """One answer. words: so far. num_made, num_sent: samples. played_ms: that the listener is known to have heard.

    is_over: nothing more of it comes. is_whole: and all of it has come.
    """

    response_id: str
    item_id: str
    words: str = ""
    marks: list[Mark] = field(default_factory=list)
    num_made: int = 0
    num_sent: int = 0
    played_ms: int = 0
    is_over: bool = False
    is_whole: bool = False

    @property
    def made_ms(self) -> int:
        return 1000 * self.num_made // OUTPUT_RATE_HZ

    @property
    def sent_ms(self) -> int:
        return 1000 * self.num_sent // OUTPUT_RATE_HZ

    def make(self, num_samples: int) -> None:
        """Sound of all words so far was made."""
        self.num_made += num_samples
        self.marks.append(Mark(len(self.words), self.made_ms))

    def words_by(self, audio_ms: int) -> str:
        """What was said of the words in the first `audio_ms` of the sound."""
        before = Mark(0, 0)
        for mark in self.marks:
            if mark.audio_ms > audio_ms:
                share = (audio_ms - before.audio_ms) / (mark.audio_ms - before.audio_ms)
                return self.words[: before.num_chars + round(share * (mark.num_chars - before.num_chars))]
            before = mark
        return self.words if self.is_whole else self.words[: before.num_chars]

    def check_sent(self, audio_ms: int, param: str) -> None:
        """Raises: RequestError if so much was never sent."""
        if audio_ms > self.sent_ms:
            raise RequestError(
                "audio_end_ms_too_large",
                f"{self.sent_ms} ms of the sound of {self.item_id!r} were sent, not {audio_ms}",
                param,
            )


class Ledger:
    """Owns what is known of the answers of one session, as many as it has items."""

    def __init__(self) -> None:
        self._by_item: OrderedDict[str, Playback] = OrderedDict()

    def begin(self, response_id: str, item_id: str) -> Playback:
        playback = self._by_item[item_id] = Playback(response_id, item_id)
        if len(self._by_item) > MAX_ITEMS:
            self._by_item.popitem(last=False)
        return playback

    def of_item(self, item_id: str) -> Playback:
        """Raises: RequestError if no answer of the engine's is there."""
        try:
            return self._by_item[item_id]
        except KeyError:
            raise RequestError("playback_item_not_found", f"no answer {item_id!r} was spoken", "item_id") from None

    def find(self, item_id: str | None, response_id: str | None) -> Playback:
        """The answer that a client means, the newest if it names none. Raises: RequestError if there is no such one."""
        if item_id is not None:
            playback = self.of_item(item_id)
            if response_id not in (None, playback.response_id):
                raise RequestError(
                    "playback_item_mismatch", f"{item_id!r} is not of response {response_id!r}", "response_id"
                )
            return playback
        for playback in reversed(self._by_item.values()):
            if response_id in (None, playback.response_id):
                return playback
        raise RequestError("playback_item_not_found", "no such answer was spoken", "response_id")
