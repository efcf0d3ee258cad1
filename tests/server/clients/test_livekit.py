"""The realtime model of LiveKit Agents as it is published, with nothing set but where the server is.

Once in an agent's session with a microphone and a loudspeaker, and else by itself, driven as an agent drives it.
Nothing that LiveKit calls an error may come in any of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
from livekit import rtc
from livekit.agents import Agent, AgentSession, ErrorEvent, function_tool, llm
from livekit.agents.metrics import RealtimeModelMetrics
from livekit.agents.voice import io
from livekit.plugins.openai.realtime import RealtimeModel
from livekit.plugins.openai.realtime.realtime_model import RealtimeSession
from numpy.typing import NDArray
from openai.types.realtime.realtime_audio_input_turn_detection import ServerVad

from antiphon.units import INPUT_RATE_HZ, OUTPUT_RATE_HZ

ServerEvent = dict[str, object]
Sound = NDArray[np.int16]
FRAME_SAMPLES = INPUT_RATE_HZ // 50
"""20 ms, as a room delivers them."""
LIMIT_S = 60.0
"""Of a whole talk; what takes longer hangs."""


def frames_of(samples: Sound) -> list[rtc.AudioFrame]:
    starts = range(0, len(samples), FRAME_SAMPLES)
    parts = [samples[start : start + FRAME_SAMPLES] for start in starts]
    return [rtc.AudioFrame(part.tobytes(), INPUT_RATE_HZ, 1, len(part)) for part in parts]


@function_tool
async def opening_hours() -> str:
    """When the shop is open."""
    return "until six"


@dataclass(slots=True)
class Call:
    """A session and what it tells; what is in a queue is read once, in order."""

    session: RealtimeSession
    answers: asyncio.Queue[llm.GenerationCreatedEvent] = field(default_factory=asyncio.Queue)
    told: asyncio.Queue[ServerEvent] = field(default_factory=asyncio.Queue)
    metrics: asyncio.Queue[RealtimeModelMetrics] = field(default_factory=asyncio.Queue)
    renewals: asyncio.Queue[llm.RealtimeSessionReconnectedEvent] = field(default_factory=asyncio.Queue)
    errors: list[llm.RealtimeModelError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session.on("generation_created", self.answers.put_nowait)
        self.session.on("openai_server_event_received", self.told.put_nowait)
        self.session.on("metrics_collected", self.metrics.put_nowait)
        self.session.on("session_reconnected", self.renewals.put_nowait)
        self.session.on("error", self.errors.append)

    def speak(self, samples: Sound) -> None:
        for frame in frames_of(samples):
            self.session.push_audio(frame)

    async def event(self, kind: str) -> ServerEvent:
        """The next of this kind; those before it are forgotten."""
        while (event := await self.told.get())["type"] != kind:
            pass
        return event

    async def ask(self) -> llm.MessageGeneration:
        return await message_of(await self.session.generate_reply())

    async def answer_with_sound(self) -> llm.MessageGeneration:
        """The next that is heard; one that was on its way in an interruption is stopped before that."""
        while True:
            message = await message_of(await self.answers.get())
            async for _ in message.audio_stream:
                return message

    @property
    def item_ids(self) -> list[str]:
        return [item.id for item in self.session.chat_ctx.items]


@dataclass(slots=True)
class Message:
    """An answer to its end, as LiveKit gives it out."""

    message_id: str
    frames: list[rtc.AudioFrame]
    words: str

    @property
    def samples(self) -> Sound:
        return np.concatenate([np.frombuffer(frame.data, np.int16) for frame in self.frames])

    @property
    def audio_ms(self) -> int:
        return 1000 * len(self.samples) // OUTPUT_RATE_HZ


async def message_of(answer: llm.GenerationCreatedEvent) -> llm.MessageGeneration:
    return await anext(aiter(answer.message_stream))


async def heard(message: llm.MessageGeneration) -> Message:
    """All of it."""
    frames = [frame async for frame in message.audio_stream]
    words = [str(words) async for words in message.text_stream]
    return Message(message.message_id, frames, "".join(words))


async def first(stream: AsyncIterable[rtc.AudioFrame]) -> rtc.AudioFrame:
    return await anext(aiter(stream))


def has_sound(samples: Sound) -> bool:
    return bool(np.abs(samples).max() > 100)


def run(talk: Callable[[Call], Awaitable[None]], model: Callable[[], RealtimeModel]) -> None:
    async def main() -> None:
        called = model()
        call = Call(called.session())
        try:
            async with asyncio.timeout(LIMIT_S):
                await talk(call)
        finally:
            await call.session.aclose()
            await called.aclose()
        assert call.errors == []

    asyncio.run(main())


def answers_by_itself(address: str) -> Callable[[], RealtimeModel]:
    return lambda: RealtimeModel(base_url=f"http://{address}/v1", api_key="nobody asks yet")


def answers_when_asked(address: str, *, max_session_s: float | None = None) -> Callable[[], RealtimeModel]:
    return lambda: RealtimeModel(
        base_url=f"http://{address}/v1",
        api_key="nobody asks yet",
        turn_detection=None,
        max_session_duration=max_session_s,
    )


def test_a_caller_is_answered_interrupts_cuts_what_was_not_heard_and_goes_on(address: str, recording: Sound) -> None:
    async def talk(call: Call) -> None:
        call.speak(recording)
        answer = await call.answers.get()
        assert not answer.user_initiated
        message = await message_of(answer)
        begun = await first(message.audio_stream)
        call.session.interrupt()
        rest = await heard(message)
        rest.frames.insert(0, begun)
        assert await message.modalities == ["audio", "text"]
        assert has_sound(rest.samples)
        done = await call.event("response.done")
        assert isinstance(done["response"], dict)
        assert done["response"]["status"] == "cancelled"

        call.session.truncate(message_id=rest.message_id, modalities=["audio"], audio_end_ms=rest.audio_ms // 2)
        truncated = await call.event("conversation.item.truncated")
        assert (truncated["item_id"], truncated["audio_end_ms"]) == (rest.message_id, rest.audio_ms // 2)

        call.speak(recording)
        again = await call.answer_with_sound()
        assert call.item_ids[0] == rest.message_id
        assert again.message_id in call.item_ids[1:]

    run(talk, answers_by_itself(address))


def test_a_caller_whose_turns_the_server_finds_interrupts_with_the_voice(address: str, turn: Sound) -> None:
    async def talk(call: Call) -> None:
        call.speak(turn)
        await call.event("input_audio_buffer.speech_started")
        await call.event("input_audio_buffer.speech_stopped")
        message = await message_of(await call.answers.get())
        await first(message.audio_stream)
        call.speak(turn)
        await call.event("input_audio_buffer.speech_started")
        done = await call.event("response.done")
        assert isinstance(done["response"], dict)
        assert done["response"]["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        again = await message_of(await call.answers.get())
        assert await first(again.audio_stream)
        roles = [item.role for item in call.session.chat_ctx.items if item.type == "message"]
        assert roles == ["user", "assistant", "user", "assistant"]

    run(
        talk,
        lambda: RealtimeModel(
            base_url=f"http://{address}/v1", api_key="nobody asks yet", turn_detection=ServerVad(type="server_vad")
        ),
    )


def test_an_answer_that_is_asked_for_is_known_as_the_one_asked_for_and_is_counted(address: str, turn: Sound) -> None:
    async def talk(call: Call) -> None:
        call.speak(turn)
        call.session.commit_audio()
        answer = await call.session.generate_reply()
        assert answer.user_initiated
        message = await heard(await message_of(answer))
        assert has_sound(message.samples)
        while (counted := await call.metrics.get()).request_id != answer.response_id:
            pass  # the first one is of the connection
        assert counted.output_token_details.audio_tokens == message.audio_ms // 50
        # What LiveKit's own resampler keeps back was not sent.
        num_said = 10 * len(turn) // INPUT_RATE_HZ
        assert counted.input_token_details.audio_tokens in (num_said - 1, num_said)
        said, spoken = call.session.chat_ctx.items
        assert said.type == spoken.type == "message"
        assert (said.role, spoken.role) == ("user", "assistant")
        assert (spoken.text_content or "") == message.words

    run(talk, answers_when_asked(address))


def test_an_answer_of_which_nothing_was_played_is_taken_out_of_the_conversation(address: str, turn: Sound) -> None:
    async def talk(call: Call) -> None:
        call.speak(turn)
        message = await call.ask()
        await first(message.audio_stream)
        call.session.interrupt()
        call.session.truncate(message_id=message.message_id, modalities=["audio"], audio_end_ms=0)
        deleted = await call.event("conversation.item.deleted")
        assert deleted["item_id"] == message.message_id
        assert message.message_id not in call.item_ids
        call.speak(turn)
        assert await first((await call.ask()).audio_stream)

    run(talk, answers_when_asked(address))


def test_an_answer_that_is_not_wanted_any_more_before_it_began_is_not_heard(address: str, turn: Sound) -> None:
    async def talk(call: Call) -> None:
        call.speak(turn)
        call.session.generate_reply().cancel()
        await call.event("response.done")
        answer = await call.session.generate_reply()
        assert await first((await message_of(answer)).audio_stream)
        assert call.answers.get_nowait().response_id == answer.response_id

    run(talk, answers_when_asked(address))


def test_a_conversation_that_is_begun_anew_ends_the_answer_in_it(address: str, turn: Sound) -> None:
    async def talk(call: Call) -> None:
        call.speak(turn)
        message = await call.ask()
        await first(message.audio_stream)
        await call.session.update_chat_ctx(llm.ChatContext.empty())
        await heard(message)
        assert call.item_ids == []
        call.speak(turn)
        assert await first((await call.ask()).audio_stream)

    run(talk, answers_when_asked(address))


def test_what_the_agent_writes_into_the_conversation_is_there_in_its_order(address: str) -> None:
    async def talk(call: Call) -> None:
        await call.session.update_instructions("Be brief.")
        context = llm.ChatContext.empty()
        context.add_message(role="system", content="You are a clerk.")
        asked = context.add_message(role="user", content="Are you open?")
        context.items.append(llm.FunctionCall(call_id="call", name="opening_hours", arguments="{}"))
        found = llm.FunctionCallOutput(call_id="call", name="opening_hours", output="until six", is_error=False)
        context.items.append(found)
        context.add_message(role="assistant", content="Until six.")
        await call.session.update_chat_ctx(context)
        assert call.item_ids == [item.id for item in context.items]

        changed = call.session.chat_ctx.copy()
        changed.items[1] = asked.model_copy(update={"content": ["When do you close?"]})
        changed.items.pop()
        await call.session.update_chat_ctx(changed)
        assert call.item_ids == [item.id for item in changed.items]
        written = call.session.chat_ctx.items[1]
        assert written.type == "message"
        assert written.text_content == "When do you close?"

        message = await call.ask()
        assert await first(message.audio_stream)
        assert call.item_ids[-1] == message.message_id

    run(talk, answers_when_asked(address))


def test_a_model_may_be_given_tools_and_pictures_and_speaks(address: str, turn: Sound) -> None:
    async def talk(call: Call) -> None:
        await call.session.update_tools([opening_hours])
        call.session.push_video(rtc.VideoFrame(64, 64, rtc.VideoBufferType.RGBA, bytes(64 * 64 * 4)))
        call.speak(turn)
        answer = await call.session.generate_reply(instructions="Say hello.", tool_choice="none", tools=[opening_hours])
        assert await first((await message_of(answer)).audio_stream)
        await call.session.update_tools([])
        call.session.interrupt()
        await call.event("response.done")

    run(talk, answers_when_asked(address))


def test_answers_in_words_alone_have_no_sound(address: str, turn: Sound) -> None:
    async def talk(call: Call) -> None:
        words = ""
        while not words:  # an answer of the tiny checkpoint may have none
            call.speak(turn)
            answer = call.session.generate_reply()
            call.speak(turn)  # time to answer in
            message = await message_of(await answer)
            assert await message.modalities == ["text"]
            said = await heard(message)
            assert said.frames == []
            words = said.words

    run(
        talk,
        lambda: RealtimeModel(
            base_url=f"http://{address}/v1", api_key="nobody asks yet", turn_detection=None, modalities=["text"]
        ),
    )


def test_options_change_while_the_call_goes_on(address: str, turn: Sound) -> None:
    async def talk(call: Call) -> None:
        call.speak(turn)
        await first((await call.ask()).audio_stream)
        call.session.interrupt()
        call.session.update_options(
            turn_detection=ServerVad(type="server_vad"), tool_choice="none", speed=1.0, max_response_output_tokens=100
        )
        call.speak(turn)
        answers = [await call.answers.get() for _ in range(2)]
        assert await first((await message_of(answers[-1])).audio_stream)
        call.session.clear_audio()
        await call.event("input_audio_buffer.cleared")

    run(talk, answers_when_asked(address))


def test_instructions_change_between_two_answers(address: str, turn: Sound) -> None:
    async def talk(call: Call) -> None:
        await call.session.update_instructions("Be brief.")
        call.speak(turn)
        await first((await call.ask()).audio_stream)
        await call.session.update_instructions("Tell more.")
        call.session.interrupt()
        call.speak(turn)
        assert await first((await call.ask()).audio_stream)

    run(talk, answers_when_asked(address))


def test_a_session_that_livekit_begins_anew_has_its_conversation_again(address: str, turn: Sound) -> None:
    async def talk(call: Call) -> None:
        context = llm.ChatContext.empty()
        context.add_message(role="user", content="Are you open?")
        context.add_message(role="assistant", content="Until six.")
        await call.session.update_chat_ctx(context)
        await call.renewals.get()
        for item in context.items:
            added = await call.event("conversation.item.added")
            while isinstance(added["item"], dict) and added["item"]["id"] != item.id:
                added = await call.event("conversation.item.added")
        call.speak(turn)
        assert await first((await call.ask()).audio_stream)

    run(talk, answers_when_asked(address, max_session_s=1.0))


class Microphone(io.AudioInput):
    """Gives what is put into it."""

    def __init__(self) -> None:
        super().__init__(label="microphone")
        self._frames: asyncio.Queue[rtc.AudioFrame] = asyncio.Queue()

    async def __anext__(self) -> rtc.AudioFrame:
        return await self._frames.get()

    def speak(self, samples: Sound) -> None:
        for frame in frames_of(samples):
            self._frames.put_nowait(frame)


class Loudspeaker(io.AudioOutput):
    """Half of all that it was given has been played whenever it is stopped."""

    def __init__(self) -> None:
        super().__init__(
            label="loudspeaker", capabilities=io.AudioOutputCapabilities(pause=False), sample_rate=OUTPUT_RATE_HZ
        )
        self._given: asyncio.Queue[rtc.AudioFrame] = asyncio.Queue()
        self._num_unplayed = 0
        self.played_ms = 0

    async def sounds(self) -> None:
        """Silence may come first."""
        while not has_sound(np.frombuffer((await self._given.get()).data, np.int16)):
            pass

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        self._num_unplayed += frame.samples_per_channel
        self._given.put_nowait(frame)

    def flush(self) -> None:
        super().flush()

    def clear_buffer(self) -> None:
        if self._num_unplayed:
            self.played_ms = 1000 * self._num_unplayed // OUTPUT_RATE_HZ // 2
            self._num_unplayed = 0
            self.on_playback_finished(playback_position=self.played_ms / 1000, interrupted=True)


def test_an_agent_with_a_tool_is_interrupted_and_speaks_again(address: str, recording: Sound) -> None:
    async def talk() -> None:
        model = answers_by_itself(address)()
        session = AgentSession[None](llm=model)
        errors: list[ErrorEvent] = []
        session.on("error", errors.append)
        microphone, loudspeaker = Microphone(), Loudspeaker()
        session.input.audio, session.output.audio = microphone, loudspeaker
        agent = Agent(instructions="Be brief.", tools=[opening_hours])
        try:
            async with asyncio.timeout(LIMIT_S):
                await session.start(agent, record=False)
                assert isinstance(agent.realtime_llm_session, RealtimeSession)
                call = Call(agent.realtime_llm_session)
                microphone.speak(recording)
                await loudspeaker.sounds()
                await session.interrupt()
                truncated = await call.event("conversation.item.truncated")
                assert truncated["audio_end_ms"] == loudspeaker.played_ms
                microphone.speak(recording)
                await call.answers.get()
        finally:
            await session.aclose()
            await model.aclose()
        assert errors == []

    asyncio.run(talk())
