"""What is sent of an answer, and when sending it ends."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.types import Message

from antiphon.core.chat import ConversationSize
from antiphon.server.api_error import ApiError
from antiphon.server.chat.answer import Answer, Heading
from antiphon.server.chat.stream import AnswerStream, Pieces
from antiphon.server.outbox import SlowReaderError


def answer() -> Answer:
    return Answer(Heading("chatcmpl-1", 1, "m", audio_id=""), ConversationSize(3, 0, 0))


async def pieces(*said: str | ApiError) -> Pieces:
    for piece in said:
        if isinstance(piece, ApiError):
            raise piece
        yield piece


class Client:
    """Reads so many messages, and then no more."""

    def __init__(self, num_read: int = 1000) -> None:
        self.got: list[Message] = []
        self._num_read = num_read

    async def send(self, message: Message) -> None:
        if len(self.got) == self._num_read:
            await asyncio.Event().wait()
        self.got.append(message)

    def events(self) -> list[str]:
        body = b"".join(message["body"] for message in self.got[1:]).decode()
        return [event.removeprefix("data: ") for event in body.split("\n\n") if event]


def told(*said: str | ApiError, has_usage: bool = False) -> list[str]:
    client = Client()
    asyncio.run(AnswerStream(client.send, max_s=60).tell(answer(), pieces(*said), has_usage=has_usage))
    assert [message["more_body"] for message in client.got[1:]] == [True] * (len(client.got) - 2) + [False]
    return client.events()


def test_an_answer_ends_with_its_reason_and_a_mark() -> None:
    *_, last, mark = told("a", "b")
    assert json.loads(last)["choices"][0]["finish_reason"] == "stop"
    assert mark == "[DONE]"


def test_usage_comes_between_the_reason_and_the_mark() -> None:
    *_, last, usage, mark = told("a", has_usage=True)
    assert json.loads(last)["usage"] is None
    assert json.loads(usage)["usage"]["prompt_tokens"] == 3
    assert mark == "[DONE]"


def test_an_answer_that_breaks_off_ends_with_an_error_and_no_mark() -> None:
    error = ApiError(503, "engine_stopped", "stopped")
    *_, said, last = told("a", error)
    assert json.loads(said)["choices"][0]["delta"] == {"content": "a"}
    assert json.loads(last) == error.body


def test_a_client_that_reads_nothing_is_not_waited_for() -> None:
    client = Client(num_read=3)
    with pytest.raises(SlowReaderError):
        asyncio.run(AnswerStream(client.send, max_s=0.01).tell(answer(), pieces(*"abc"), has_usage=False))
    assert len(client.got) == 3
