"""The OpenAI realtime service of Pipecat as it is published, in a pipeline, with nothing set but where the server is.

Any event that Pipecat calls an error ends its call, and the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from openai.types.chat import ChatCompletionAssistantMessageParam, ChatCompletionUserMessageParam
from pipecat.adapters.llm.schemas.function_schema import FunctionSchema
from pipecat.adapters.llm.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    InputImageRawFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMMessagesAppendFrame,
    LLMRunFrame,
    LLMSetToolsFrame,
    LLMTextFrame,
    LLMUpdateSettingsFrame,
    TTSAudioRawFrame,
    TTSStartedFrame,
    TTSStoppedFrame,
    UserStartedSpeakingFrame,
    UserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.realtime.events import (
    AudioConfiguration,
    AudioInput,
    ConversationItem,
    SessionProperties,
    TurnDetection,
)
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner

from antiphon.units import INPUT_RATE_HZ

Sound = NDArray[np.int16]
Kind = TypeVar("Kind", bound=Frame)
FRAME_SAMPLES = INPUT_RATE_HZ // 50
"""20 ms, as a transport delivers them."""
LIMIT_S = 60.0
"""Of a whole talk; what takes longer hangs."""


def turns_by(detection: TurnDetection | Literal[False]) -> SessionProperties:
    """detection: False if the pipeline finds the turns itself."""
    return SessionProperties(audio=AudioConfiguration(input=AudioInput(turn_detection=detection)))


QUESTION: ChatCompletionUserMessageParam = {"role": "user", "content": "Are you open?"}
TOOLS = ToolsSchema([FunctionSchema("opening_hours", "When the shop is open.", properties={}, required=[])])


class Ear(FrameProcessor):
    """What passes behind the service, for the test to read in order."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        self.frames.put_nowait(frame)
        await self.push_frame(frame, direction)


@dataclass(slots=True)
class Call:
    """A pipeline that runs. added, updated: items of the conversation, as the server tells them."""

    service: OpenAIRealtimeLLMService
    worker: PipelineWorker
    ear: Ear
    added: asyncio.Queue[ConversationItem] = field(default_factory=asyncio.Queue)
    updated: asyncio.Queue[ConversationItem] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.service.add_event_handler("on_conversation_item_created", self._item_added)
        self.service.add_event_handler("on_conversation_item_updated", self._item_updated)

    def _item_added(self, _: OpenAIRealtimeLLMService, item_id: str, item: ConversationItem) -> None:
        assert item.id == item_id
        self.added.put_nowait(item)

    def _item_updated(self, _: OpenAIRealtimeLLMService, item_id: str, item: ConversationItem) -> None:
        assert item.id == item_id
        self.updated.put_nowait(item)

    async def speak(self, samples: Sound) -> None:
        for start in range(0, len(samples), FRAME_SAMPLES):
            audio = samples[start : start + FRAME_SAMPLES].tobytes()
            await self.send(InputAudioRawFrame(audio=audio, sample_rate=INPUT_RATE_HZ, num_channels=1))

    async def send(self, frame: Frame) -> None:
        await self.worker.queue_frame(frame)

    async def add(self, *messages: ChatCompletionAssistantMessageParam | ChatCompletionUserMessageParam) -> None:
        """Behind the aggregator that would keep them, as an application does in a call that goes on; and ask."""
        await self.service.queue_frame(LLMMessagesAppendFrame([*messages], run_llm=True))

    async def until(self, kind: type[Kind]) -> tuple[list[Frame], Kind]:
        """What comes before the next of this kind, and that."""
        before: list[Frame] = []
        while not isinstance(frame := await self.ear.frames.get(), kind):
            before.append(frame)
        return before, frame

    async def sounds(self) -> None:
        """An answer is there; silence may come first, or an answer without a sound."""
        while not np.abs(np.frombuffer((await self.until(TTSAudioRawFrame))[1].audio, np.int16)).max() > 100:
            pass

    async def answered(self) -> ConversationItem:
        """The next answer that is over."""
        while (item := await self.updated.get()).role != "assistant":
            pass
        return item

    async def cut(self) -> ConversationItem:
        """The next answer that did not come to its end."""
        while (item := await self.updated.get()).status != "incomplete":
            pass
        return item


def of(kind: type[Kind], frames: list[Frame]) -> list[Kind]:
    return [frame for frame in frames if isinstance(frame, kind)]


def run(
    address: str,
    talk: Callable[[Call], Awaitable[None]],
    *,
    properties: SessionProperties | None = None,
    context: LLMContext | None = None,
) -> None:
    """Until the talk is over and an `EndFrame` has gone through. What Pipecat calls an error ends it at once."""

    async def main() -> None:
        settings = OpenAIRealtimeLLMService.Settings(
            session_properties=properties or SessionProperties(), system_instruction="Be brief."
        )
        service = OpenAIRealtimeLLMService(
            base_url=f"ws://{address}/v1/realtime", api_key="nobody asks yet", settings=settings
        )
        aggregators = LLMContextAggregatorPair(context or LLMContext())
        ear = Ear()
        worker = PipelineWorker(
            Pipeline([aggregators.user(), service, ear, aggregators.assistant()]),
            params=PipelineParams(enable_metrics=True, enable_usage_metrics=True),
            enable_rtvi=False,
        )
        call = Call(service, worker, ear)
        started = asyncio.Event()
        errors: asyncio.Queue[ErrorFrame] = asyncio.Queue()

        def begun(_: PipelineWorker, __: Frame) -> None:
            started.set()

        def failed(_: PipelineWorker, error: ErrorFrame) -> None:
            errors.put_nowait(error)

        worker.add_event_handler("on_pipeline_started", begun)
        worker.add_event_handler("on_pipeline_error", failed)

        async def talk_once_started() -> None:
            await started.wait()
            await talk(call)

        runner = WorkerRunner(handle_sigint=False)
        await runner.add_workers(worker)
        running = asyncio.create_task(runner.run())
        talking = asyncio.create_task(talk_once_started())
        failing = asyncio.create_task(errors.get())
        try:
            await asyncio.wait((talking, failing), timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            assert not failing.done(), failing.result()
            assert talking.done(), "the talk hangs"
            talking.result()
        finally:
            talking.cancel()
            failing.cancel()
            await worker.queue_frame(EndFrame())
            await running
        assert errors.empty()

    asyncio.run(main())


def test_a_caller_is_answered_interrupts_and_goes_on(address: str, recording: Sound) -> None:
    async def talk(call: Call) -> None:
        await call.speak(recording)
        before, _ = await call.until(TTSAudioRawFrame)
        assert len(of(TTSStartedFrame, before)) == 1
        await call.sounds()
        await call.send(InterruptionFrame())
        await call.until(InterruptionFrame)
        cut = await call.cut()
        assert cut.role == "assistant"
        await call.speak(recording)
        await call.sounds()

    run(address, talk)


def test_a_caller_whose_turns_the_server_finds_interrupts_with_the_voice(address: str, turn: Sound) -> None:
    async def talk(call: Call) -> None:
        await call.speak(turn)
        await call.until(UserStartedSpeakingFrame)
        await call.until(UserStoppedSpeakingFrame)
        is_cut = False
        while not is_cut:  # an answer of the tiny checkpoint may be over before the caller speaks again
            await call.sounds()
            await call.speak(turn)
            await call.until(InterruptionFrame)
            is_cut = (await call.answered()).status == "incomplete"
        await call.sounds()

    run(address, talk, properties=turns_by(TurnDetection()))


def test_turns_that_the_pipeline_finds_are_answered_when_they_end_and_not_before(address: str, turn: Sound) -> None:
    async def talk(call: Call) -> None:
        for number in range(2):
            await call.send(UserStartedSpeakingFrame())
            await call.send(InterruptionFrame())
            await call.until(InterruptionFrame)
            await call.speak(turn)
            await call.send(UserStoppedSpeakingFrame())
            before, _ = await call.until(UserStoppedSpeakingFrame)
            # Sound of an answer that was interrupted may still have been on its way.
            assert number or of(TTSStartedFrame, before) == []
            await call.sounds()

    run(address, talk, properties=turns_by(False))


def test_answers_that_the_pipeline_asks_for_are_kept_in_its_context(address: str) -> None:
    context = LLMContext([QUESTION])

    async def talk(call: Call) -> None:
        await call.send(LLMRunFrame())
        heard, _ = await call.until(LLMFullResponseEndFrame)
        while not (words := "".join(frame.text for frame in of(LLMTextFrame, heard)).strip()):
            await call.add(QUESTION)  # an answer of the tiny checkpoint may have no words
            heard, _ = await call.until(LLMFullResponseEndFrame)
        assert of(TTSAudioRawFrame, heard)
        assert of(TTSStoppedFrame, heard)
        await call.send(EndFrame())
        await call.until(EndFrame)
        assert context.messages[-1] == {"role": "assistant", "content": words}

    run(address, talk, properties=turns_by(False), context=context)


def test_what_is_added_to_the_context_is_in_the_conversation(address: str) -> None:
    async def talk(call: Call) -> None:
        await call.send(LLMRunFrame())
        await call.sounds()
        answer: ChatCompletionAssistantMessageParam = {"role": "assistant", "content": "Until six."}
        await call.add(answer, QUESTION)
        roles = [(await call.added.get()).role for _ in range(4)]
        assert roles == ["user", "assistant", "assistant", "system"]
        await call.until(LLMFullResponseEndFrame)
        await call.sounds()

    run(address, talk, properties=turns_by(False), context=LLMContext([QUESTION]))


def test_answers_in_words_alone_have_no_sound(address: str) -> None:
    async def talk(call: Call) -> None:
        await call.send(LLMRunFrame())
        heard, _ = await call.until(LLMFullResponseEndFrame)
        while not of(LLMTextFrame, heard):
            await call.add(QUESTION)
            heard += (await call.until(LLMFullResponseEndFrame))[0]
        assert of(TTSAudioRawFrame, heard) == []

    properties = turns_by(False).model_copy(update={"output_modalities": ["text"]})
    run(address, talk, properties=properties, context=LLMContext([QUESTION]))


def test_a_session_may_have_tools_and_pictures_and_other_settings_while_it_goes_on(address: str, turn: Sound) -> None:
    async def talk(call: Call) -> None:
        await call.send(LLMRunFrame())
        await call.sounds()
        await call.send(LLMSetToolsFrame(tools=TOOLS))
        picture = InputImageRawFrame(image=bytes(64 * 64 * 3), size=(64, 64), format="RGB")
        await call.send(picture)
        settings = OpenAIRealtimeLLMService.Settings(
            session_properties=turns_by(TurnDetection()).model_copy(update={"max_output_tokens": 100, "tools": TOOLS})
        )
        await call.send(LLMUpdateSettingsFrame(delta=settings))
        await call.send(InterruptionFrame())
        await call.until(InterruptionFrame)
        await call.speak(turn)
        while (await call.added.get()).role != "user":
            pass
        await call.sounds()

    properties = turns_by(False).model_copy(update={"tools": TOOLS, "tool_choice": "auto"})
    run(address, talk, properties=properties, context=LLMContext([QUESTION]))


def test_instructions_change_between_two_answers(address: str) -> None:
    async def talk(call: Call) -> None:
        await call.send(LLMRunFrame())
        await call.sounds()
        changed = OpenAIRealtimeLLMService.Settings(system_instruction="Tell more.")
        await call.send(LLMUpdateSettingsFrame(delta=changed))
        await call.add(QUESTION)
        await call.until(LLMFullResponseEndFrame)
        await call.sounds()

    run(address, talk, properties=turns_by(False), context=LLMContext([QUESTION]))


def test_a_conversation_that_is_begun_anew_is_answered(address: str, recording: Sound) -> None:
    async def talk(call: Call) -> None:
        await call.send(LLMRunFrame())
        await call.sounds()
        await call.send(InterruptionFrame())
        await call.until(InterruptionFrame)
        await call.service.reset_conversation()  # type: ignore[no-untyped-call]  # so it is declared
        await call.speak(recording)
        await call.sounds()

    run(address, talk, context=LLMContext([QUESTION]))


def test_an_item_is_shown_when_it_is_asked_for_and_one_that_is_not_there_is_no_error(address: str) -> None:
    async def talk(call: Call) -> None:
        await call.send(LLMRunFrame())
        item = await call.added.get()
        assert (await call.service.retrieve_conversation_item(item.id)).id == item.id
        with pytest.raises(Exception, match="no_such_item"):
            await call.service.retrieve_conversation_item("no_such_item")
        await call.sounds()

    run(address, talk, context=LLMContext([QUESTION]))
