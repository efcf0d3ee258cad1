"""Items of a session on a real socket: shown, told, read again, cut, deleted; and sound that is taken back."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from antiphon.server.events.server import AudioCommitted, ItemRetrieved, ResponseDone
from server.lifecycle import Answer, Told, check, session
from server.raw_client import RawClient, sound, talk

TEXT: dict[str, object] = {"type": "input_text", "text": "What is this?"}


def picture_file(width: int, height: int, kind: str = "PNG") -> bytes:
    shades = np.linspace(0, 255, width * height * 3).reshape(height, width, 3)
    file = io.BytesIO()
    Image.fromarray(shades.astype(np.uint8)).save(file, kind)
    return file.getvalue()


def bomb() -> bytes:
    """20 000 by 20 000 pixels in a few kilobytes."""
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG")
    return file.getvalue()


def url(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def user(item_id: str, *content: dict[str, object]) -> dict[str, object]:
    return {"type": "message", "role": "user", "id": item_id, "content": list(content)}


def image(file: bytes, kind: str = "png") -> dict[str, object]:
    return {"type": "input_image", "image_url": url(file, kind)}


async def create(client: RawClient, item: dict[str, object], **place: object) -> None:
    await client.send("conversation.item.create", item=item, **place)
    await client.until("conversation.item.done")


async def retrieve(client: RawClient, item_id: str) -> dict[str, object]:
    await client.send("conversation.item.retrieve", item_id=item_id)
    retrieved = await client.until("conversation.item.retrieved")
    item = retrieved.fields["item"]
    assert isinstance(item, dict)
    return dict(item)


async def spoken(client: RawClient, num_deltas: int) -> Answer:
    """An answer under way of which so many pieces came."""
    await client.says(1)
    await client.asks()
    for _ in range(num_deltas):
        await client.until("response.output_audio.delta")
    return check(client.got).answers[-1]


def num_image_tokens(told: Told) -> int:
    usage = told.all(ResponseDone)[-1].response.usage
    assert usage is not None
    return usage.input_token_details.image_tokens


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_picture_in_an_item_is_seen_and_not_repeated(realtime: str, kind: str) -> None:
    async def conversation() -> None:
        async with session(realtime, output_modalities=["text"]) as client:
            await create(client, user("seen", TEXT, image(picture_file(80, 60, kind), kind.lower())))
            kept = await retrieve(client, "seen")
            assert kept["content"] == [TEXT, {"type": "input_image"}]
            await client.asks()
            await client.until("response.done")
        assert num_image_tokens(check(client.got)) == 64

    talk(conversation)


@pytest.mark.parametrize("frame", ["data URL", "base64"])
def test_pictures_beside_sound_are_seen_with_it(realtime: str, frame: str) -> None:
    async def conversation() -> None:
        file = picture_file(64, 64)
        text = url(file) if frame == "data URL" else base64.b64encode(file).decode()
        async with session(realtime, output_modalities=["text"]) as client:
            await client.send("input_audio_buffer.append", audio=sound(1), video_frames=[text, text])
            await client.asks()
            await client.until("response.done")
        assert num_image_tokens(check(client.got)) == 128

    talk(conversation)


@pytest.mark.parametrize("file", [bomb(), picture_file(3000, 2), b"not a picture", picture_file(64, 64)[:100]])
def test_a_picture_that_cannot_be_seen_is_refused_and_leaves_nothing_behind(realtime: str, file: bytes) -> None:
    async def conversation() -> None:
        async with session(realtime, output_modalities=["text"]) as client:
            await client.send("conversation.item.create", item=user("bad", TEXT, image(file)), event_id="mine")
            error = await client.error()
            assert (error.code, error.text("error", "event_id")) == ("invalid_image", "mine")
            await client.send("input_audio_buffer.append", audio=sound(1), video_frames=[url(file)])
            assert (await client.error()).code == "invalid_image"
            # The name is free: the item was not made.
            await create(client, user("bad", TEXT))
            await client.asks()
            await client.until("response.done")
        told = check(client.got)
        assert num_image_tokens(told) == 0
        assert told.answers[0].status == "completed"

    talk(conversation)


def test_items_stand_where_they_were_put(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime) as client:
            await create(client, user("b", TEXT))
            await create(client, user("a", TEXT), previous_item_id="root")
            await create(client, user("d", TEXT))
            await create(client, user("c", TEXT), previous_item_id="b")
            await client.send("conversation.item.delete", item_id="b")
            await client.until("conversation.item.deleted")
            await client.says(1)
            await client.send("input_audio_buffer.commit")
            await client.until("conversation.item.done")
        told = check(client.got)
        assert told.items == ["a", "c", "d", told.one(AudioCommitted).item_id]
        assert told.one(AudioCommitted).previous_item_id == "d"

    talk(conversation)


def test_words_said_before_the_session_began_may_be_told_as_items(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, output_modalities=["text"]) as client:
            answer: dict[str, object] = {
                "type": "message",
                "role": "assistant",
                "id": "before",
                "content": [{"type": "output_text", "text": "It is a cat."}],
            }
            await create(client, answer)
            assert (await retrieve(client, "before"))["content"] == answer["content"]
            await create(client, user("sound", {"type": "input_audio", "audio": sound(1)}))
            assert (await retrieve(client, "sound"))["content"] == [{"type": "input_audio", "transcript": None}]
            await client.asks()
            await client.until("response.done")
        assert check(client.got).answers[0].status == "completed"

    talk(conversation)


def test_of_a_truncated_answer_the_words_that_were_heard_are_kept(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime) as client:
            answer = await spoken(client, 5)
            assert (await retrieve(client, answer.item_id))["status"] == "in_progress"
            await client.send("conversation.item.truncate", item_id=answer.item_id, content_index=0, audio_end_ms=500)
            await client.until("conversation.item.truncated")
            half = await retrieve(client, answer.item_id)
            await client.send("conversation.item.truncate", item_id=answer.item_id, content_index=0, audio_end_ms=0)
            await client.until("conversation.item.truncated")
            nothing = await retrieve(client, answer.item_id)
        told = check(client.got)
        (answer,) = told.answers
        assert (answer.status, answer.reason) == ("cancelled", "client_cancelled")
        first, _, last = told.all(ItemRetrieved)
        assert first.item != last.item
        heard = heard_of(half)
        assert heard
        assert answer.words.startswith(heard)
        assert heard != answer.words
        assert heard_of(nothing) == ""
        assert half["status"] == nothing["status"] == "incomplete"

    talk(conversation)


def test_of_an_answer_that_ended_before_it_was_heard_no_word_is_kept(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, max_output_tokens=4) as client:
            await client.says(1)
            await client.asks()
            await client.until("response.done")
            answer = check(client.got).answers[-1]
            assert answer.words
            assert not answer.audio
            assert heard_of(await retrieve(client, answer.item_id)) == ""

    talk(conversation)


def heard_of(item: dict[str, object]) -> str:
    match item["content"]:
        case [{"type": "output_audio", "transcript": str(words)}]:
            return words
    raise AssertionError(f"no answer: {item}")


def test_an_answer_that_is_deleted_while_it_is_spoken_ends_there(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime) as client:
            answer = await spoken(client, 1)
            await client.send("conversation.item.delete", item_id=answer.item_id)
            await client.until("conversation.item.deleted")
            await spoken(client, 1)
            await client.send("response.cancel")
            await client.until("response.done")
        told = check(client.got)
        assert [answer.status for answer in told.answers] == ["cancelled", "cancelled"]
        assert told.items == [told.answers[1].item_id]

    talk(conversation)


def test_sound_that_is_cleared_is_neither_committed_nor_answered(realtime: str) -> None:
    async def conversation() -> None:
        async with session(realtime, audio={"input": {"turn_detection": None}}) as client:
            await client.send("input_audio_buffer.append", audio=sound(1, seconds=0.4))
            await client.send("input_audio_buffer.clear")
            await client.until("input_audio_buffer.cleared")
            await client.send("input_audio_buffer.commit")
            assert (await client.error()).code == "input_audio_buffer_commit_empty"

    talk(conversation)


@pytest.mark.parametrize(
    ("kind", "asked", "num_answers"),
    [
        ("input_audio_buffer.commit", {}, 0),
        ("input_audio_buffer.commit", {"response_create": True}, 1),
        ("input_audio_buffer.commit", {"create_response": True}, 1),
        ("input.commit", {}, 1),
        ("input.commit", {"response_create": False}, 0),
        ("input.commit", {"create_response": False}, 0),
    ],
)
def test_a_commit_asks_for_an_answer_if_it_says_so(
    realtime: str, kind: str, asked: dict[str, object], num_answers: int
) -> None:
    async def conversation() -> None:
        async with session(realtime, audio={"input": {"turn_detection": None}}) as client:
            await client.says(1)
            await client.send(kind, **asked)
            await client.send("session.heartbeat")
            await client.until("session.heartbeat_ack")
        assert len(check(client.got).answers) == num_answers

    talk(conversation)
