"""An answer on its way to a client: what happens in a chat, as chunks or as one completion. Pure.

Shown by tests/server/test_chat_completions.py.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from antiphon.core.chat import ConversationSize
from antiphon.core.events import AnswerGrew
from antiphon.happenings import Happening, Speech
from antiphon.server.chat.speech import SpeechFormat, pcm16, sound
from antiphon.server.chat.wire import (
    AnswerDetails,
    AnswerMessage,
    Audio,
    AudioDelta,
    Choice,
    Chunk,
    ChunkChoice,
    ChunkWithUsage,
    Completion,
    Delta,
    End,
    PromptDetails,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Heading:
    """What all objects of one answer say. created: seconds since 1970. audio_id: empty if it is written only."""

    id: str
    created: int
    model: str
    audio_id: str


@dataclass(slots=True, eq=False)
class Answer:
    """Owned by whoever tells it. asked: what it answers."""

    heading: Heading
    asked: ConversationSize
    num_text_tokens: int = 0
    num_codec_tokens: int = 0
    end: End = "stop"

    @property
    def is_spoken(self) -> bool:
        return bool(self.heading.audio_id)

    def take(self, happening: Happening) -> str | bytes:
        """What comes with it: words, in whole characters, or speech as `pcm16`; empty for nothing."""
        match happening:
            case AnswerGrew(text=text, num_tokens=num_tokens, end=end):
                self.num_text_tokens = num_tokens
                self.end = "length" if end == "length" else "stop"
                return text
            case Speech(chunk=chunk, samples=samples):
                self.num_codec_tokens += len(chunk.codec_tokens)
                return pcm16(samples.numpy())
        return ""

    @property
    def usage(self) -> Usage:
        asked, num_tokens = self.asked, self.num_text_tokens + self.num_codec_tokens
        return Usage(
            prompt_tokens=asked.num_tokens,
            completion_tokens=num_tokens,
            total_tokens=asked.num_tokens + num_tokens,
            prompt_tokens_details=PromptDetails(
                text_tokens=asked.num_tokens - asked.num_sound_tokens - asked.num_picture_tokens,
                audio_tokens=asked.num_sound_tokens,
                image_tokens=asked.num_picture_tokens,
            ),
            completion_tokens_details=AnswerDetails(
                text_tokens=self.num_text_tokens, audio_tokens=self.num_codec_tokens
            ),
        )

    def completion(self, pieces: Sequence[str | bytes], form: SpeechFormat) -> Completion:
        """All of it, when it is over. pieces: what was taken. form: of its speech."""
        text, heading = "".join(piece for piece in pieces if isinstance(piece, str)), self.heading
        message = AnswerMessage(content=text)
        if self.is_spoken:
            pcm = [piece for piece in pieces if isinstance(piece, bytes)]
            data = base64.b64encode(sound(pcm, form)).decode()
            audio = Audio(id=heading.audio_id, data=data, transcript=text, expires_at=heading.created)
            message = AnswerMessage(content=None, audio=audio)
        return Completion(
            id=heading.id,
            created=heading.created,
            model=heading.model,
            choices=(Choice(message=message, finish_reason=self.end),),
            usage=self.usage,
        )

    def first_delta(self) -> Delta:
        if self.is_spoken:
            return Delta(role="assistant", audio=AudioDelta(id=self.heading.audio_id))
        return Delta(role="assistant", content="")

    def delta(self, piece: str | bytes) -> Delta:
        if isinstance(piece, bytes):
            return self._audio(data=base64.b64encode(piece).decode())
        return self._audio(transcript=piece) if self.is_spoken else Delta(content=piece)

    def last_deltas(self) -> Iterator[Delta]:
        """When it is over. The very last one comes with the reason."""
        if self.is_spoken:
            yield self._audio(expires_at=self.heading.created)
        yield Delta()

    def chunk(self, delta: Delta, end: End | None, *, has_usage: bool) -> str:
        """JSON of a delta. has_usage: the client is told the usage at the end."""
        kind, heading = ChunkWithUsage if has_usage else Chunk, self.heading
        choices = (ChunkChoice(delta=delta, finish_reason=end),)
        return kind(id=heading.id, created=heading.created, model=heading.model, choices=choices).model_dump_json()

    def usage_chunk(self) -> str:
        heading, usage = self.heading, self.usage
        return ChunkWithUsage(
            id=heading.id, created=heading.created, model=heading.model, choices=(), usage=usage
        ).model_dump_json()

    def _audio(self, *, data: str | None = None, transcript: str | None = None, expires_at: int | None = None) -> Delta:
        audio_id = self.heading.audio_id
        return Delta(audio=AudioDelta(id=audio_id, data=data, transcript=transcript, expires_at=expires_at))
