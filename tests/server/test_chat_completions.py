"""Chat completions for the official Python client, unmodified: whole and streamed, written and spoken."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import soundfile as sf
from numpy.typing import NDArray
from openai import AsyncOpenAI, NotFoundError, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam
from openai.types.chat.chat_completion_audio_param import ChatCompletionAudioParam
from PIL import Image
from pydantic import BaseModel

from antiphon.server.app import build_app
from antiphon.units import INPUT_RATE_HZ, OUTPUT_RATE_HZ
from server.servers import StartServer

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
PCM16: ChatCompletionAudioParam = {"voice": "alloy", "format": "pcm16"}


@pytest.fixture
def url(start_server: StartServer) -> Iterator[str]:
    with start_server(lambda host: build_app(host, draw_seed=lambda: 0)) as running:
        yield f"{running.url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="nobody asks yet", max_retries=0) as client:
        yield client


@pytest.fixture
def model(client: OpenAI) -> str:
    (only,) = client.models.list().data
    return only.id


def unknown_fields(found: BaseModel) -> set[str]:
    """What an official object has that its type does not."""
    inner = [value for _, value in found if isinstance(value, BaseModel)]
    inner += [one for _, value in found if isinstance(value, list) for one in value if isinstance(one, BaseModel)]
    return {*(found.model_extra or {})}.union(*map(unknown_fields, inner))


def text_of(chunks: Sequence[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def transcript_of(chunks: Sequence[ChatCompletionChunk]) -> str:
    deltas = [chunk.choices[0].delta.audio for chunk in chunks if chunk.choices]
    return "".join(audio.transcript or "" for audio in deltas if audio is not None)


def sound_of(chunks: Sequence[ChatCompletionChunk]) -> bytes:
    deltas = [chunk.choices[0].delta.audio for chunk in chunks if chunk.choices]
    return b"".join(base64.b64decode(audio.data or "") for audio in deltas if audio is not None)


def spoken(completion: ChatCompletion) -> tuple[str, bytes]:
    """Its transcript and its file."""
    audio = completion.choices[0].message.audio
    assert audio is not None
    return audio.transcript, base64.b64decode(audio.data)


def picture(seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(pixels).save(file, "PNG")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def noise(seed: int, form: str, rate_hz: int) -> str:
    """A second of two channels."""
    samples = 0.1 * np.random.default_rng(seed).standard_normal((rate_hz, 2))
    with io.BytesIO() as file:
        sf.write(file, samples, rate_hz, format=form)
        return base64.b64encode(file.getvalue()).decode()


def test_the_model_is_there_by_its_name(client: OpenAI, model: str) -> None:
    assert client.models.retrieve(model) == client.models.list().data[0]
    with pytest.raises(NotFoundError) as missing:
        client.models.retrieve("another/one")
    assert missing.value.code == "model_not_found"


def test_a_question_is_answered(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(model=model, messages=HELLO, temperature=0, max_tokens=30)
    (choice,) = completion.choices
    assert completion.object == "chat.completion"
    assert completion.model == model
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.message.audio is None
    assert choice.finish_reason in ("stop", "length")
    assert unknown_fields(completion) == set()
    usage = completion.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 30


def test_an_answer_in_pieces_is_the_answer_as_a_whole(client: OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=HELLO, seed=1)
    with client.chat.completions.create(
        model=model, messages=HELLO, seed=1, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert text_of(chunks) == whole.choices[0].message.content
    *told, last, usage = chunks
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in told] == [None] * len(told)
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert (usage.choices, usage.usage) == ([], whole.usage)
    assert all(chunk.usage is None for chunk in (*told, last))
    assert {(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks} == {
        (chunks[0].id, chunks[0].created, model, "chat.completion.chunk")
    }
    assert set().union(*map(unknown_fields, chunks)) == set()


def test_usage_is_told_in_a_stream_only_if_it_is_asked_for(client: OpenAI, model: str) -> None:
    chunks = list(client.chat.completions.create(model=model, messages=HELLO, seed=1, stream=True))
    assert all(chunk.choices for chunk in chunks)
    assert "usage" not in chunks[0].model_fields_set


def test_the_same_seed_gives_the_same_answer_and_another_one_another(client: OpenAI, model: str) -> None:
    texts = [
        client.chat.completions.create(model=model, messages=HELLO, seed=seed).choices[0].message.content
        for seed in (1, 1, 2, 2**62, -1)
    ]
    assert texts[0] == texts[1]
    assert len({*texts}) == 4


def test_an_answer_ends_at_its_length_and_before_a_stop_sequence(client: OpenAI, model: str) -> None:
    def ask(max_tokens: int, stop: str | list[str] | None) -> tuple[str, str]:
        (choice,) = client.chat.completions.create(
            model=model, messages=HELLO, temperature=0, max_completion_tokens=max_tokens, stop=stop
        ).choices
        return choice.message.content or "", choice.finish_reason

    full, _ = ask(40, None)
    short, reason = ask(5, None)
    assert (full.startswith(short), reason) == (True, "length")
    assert ask(40, full[2:5]) == (full[: full.index(full[2:5])], "stop")
    assert ask(40, ["\x00", full[3]]) == (full[: full.index(full[3])], "stop")


def test_tasks_of_one_loop_get_their_own_answers(url: str, model: str) -> None:
    async def main() -> None:
        async with AsyncOpenAI(base_url=url, api_key="nobody asks yet", max_retries=0) as client:

            async def whole(seed: int) -> str:
                completion = await client.chat.completions.create(model=model, messages=HELLO, seed=seed, max_tokens=60)
                return completion.choices[0].message.content or ""

            async def streamed(seed: int) -> str:
                stream = await client.chat.completions.create(
                    model=model, messages=HELLO, seed=seed, max_tokens=60, stream=True
                )
                return text_of([chunk async for chunk in stream])

            alone = [await whole(seed) for seed in (1, 2)]
            together = await asyncio.gather(*(ask(seed) for ask in (whole, streamed) for seed in (1, 2)))
            assert together == [*alone, *alone]

    asyncio.run(main())


def test_streamed_speech_is_the_speech_of_the_file(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(
        model=model, messages=HELLO, seed=2, max_tokens=20, modalities=["text", "audio"], audio=PCM16
    )
    transcript, pcm = spoken(completion)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=HELLO,
            seed=2,
            max_tokens=20,
            modalities=["text", "audio"],
            audio=PCM16,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert (transcript_of(chunks), sound_of(chunks)) == (transcript, pcm)
    assert completion.choices[0].message.content is None
    assert transcript
    assert len(pcm) > OUTPUT_RATE_HZ
    ids = {chunk.choices[0].delta.audio.id for chunk in chunks if chunk.choices and chunk.choices[0].delta.audio}
    assert len(ids) == 1
    assert unknown_fields(completion).union(*map(unknown_fields, chunks)) == set()
    usage = completion.usage
    assert usage is not None
    assert usage == chunks[-1].usage
    details = usage.completion_tokens_details
    assert details is not None
    assert details.audio_tokens
    assert details.text_tokens
    assert usage.completion_tokens == details.audio_tokens + details.text_tokens


@pytest.mark.parametrize("form", ["wav", "flac", "mp3", "opus"])
def test_speech_comes_as_a_file_of_the_format_that_was_asked_for(client: OpenAI, model: str, form: str) -> None:
    def ask(audio: ChatCompletionAudioParam) -> bytes:
        completion = client.chat.completions.create(
            model=model, messages=HELLO, seed=2, max_tokens=5, modalities=["text", "audio"], audio=audio
        )
        return spoken(completion)[1]

    heard: NDArray[np.int16]
    heard, rate_hz = sf.read(io.BytesIO(ask({"voice": {"id": "mine"}, "format": form})), dtype="int16")  # type: ignore[typeddict-item]  # the parameter
    expected = np.frombuffer(ask(PCM16), "<i2")
    assert rate_hz == OUTPUT_RATE_HZ
    if form in ("wav", "flac"):
        assert heard.tolist() == expected.tolist()
    else:
        assert abs(len(heard) - len(expected)) < OUTPUT_RATE_HZ // 4
        assert heard.any()


def test_pictures_and_sounds_are_seen_and_heard(client: OpenAI, model: str) -> None:
    def ask(seed: int) -> ChatCompletion:
        return client.chat.completions.create(
            model=model,
            messages=[
                {"role": "system", "content": [{"type": "text", "text": "Look and listen."}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is it?"},
                        {"type": "image_url", "image_url": {"url": picture(seed), "detail": "low"}},
                        {
                            "type": "input_audio",
                            "input_audio": {"data": noise(seed, "WAV", 44_100), "format": "wav"},
                        },
                        {
                            "type": "input_audio",
                            "input_audio": {"data": noise(seed, "MP3", INPUT_RATE_HZ), "format": "mp3"},
                        },
                    ],
                },
            ],
            temperature=0,
            max_tokens=20,
        )

    first, again, other = ask(1), ask(1), ask(2)
    assert first.choices[0].message.content == again.choices[0].message.content != other.choices[0].message.content
    usage = first.usage
    assert usage is not None
    details = usage.prompt_tokens_details
    assert details is not None
    assert details.image_tokens
    assert details.text_tokens
    assert (details.audio_tokens or 0) >= 20
    assert usage.prompt_tokens == details.image_tokens + details.text_tokens + (details.audio_tokens or 0)


def test_an_answer_becomes_part_of_the_conversation_as_it_came(client: OpenAI, model: str) -> None:
    answers = [
        client.chat.completions.create(model=model, messages=HELLO, seed=1),
        client.chat.completions.create(
            model=model, messages=HELLO, seed=1, max_tokens=5, modalities=["text", "audio"], audio=PCM16
        ),
    ]
    for answer in answers:
        sent_back: ChatCompletionMessageParam = answer.choices[0].message.model_dump()  # type: ignore[assignment]  # as clients do
        messages = [*HELLO, sent_back, *HELLO]
        completion = client.chat.completions.create(model=model, messages=messages, max_tokens=5)
        assert completion.usage is not None
        assert answer.usage is not None
        assert completion.usage.prompt_tokens > 2 * answer.usage.prompt_tokens - 10
