"""The engine: calls, the three stages that serve them, and the way of every second through them.

    UnitInput → thinker → Handoff → talker → CodecChunk → code2wav → Speech

It passes messages on and keeps account of them; it computes nothing. One thread uses it at a time, and things happen
while that thread is in `advance`. Shown by tests/test_engine.py, tests/test_placements.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar, assert_never

import torch
from torch import Tensor

from antiphon.assembly import (
    Code2WavAnswer,
    FromCode2Wav,
    FromTalker,
    FromThinker,
    Inbox,
    Stages,
    StageSettings,
    TalkerAnswer,
    ThinkerAnswer,
    assemble,
    chat_settings,
    stage_settings,
)
from antiphon.call import CallPhase, CallRecord, MovedCall, Record, Second, TellMoved, UnitResult
from antiphon.chat import ChatRecord, Errands
from antiphon.config import ChatConfig, EngineConfig, SessionConfig
from antiphon.core.clock import Clock
from antiphon.core.duplex import Wish
from antiphon.core.events import SessionEnded, SessionOpened, SpeechLost, TurnInterrupted
from antiphon.core.messages import (
    Close,
    CodecChunk,
    Done,
    Dropped,
    Failed,
    Fault,
    HeardUnit,
    Interrupt,
    Open,
    Opened,
    Refused,
    Retain,
    Spoken,
    Surveyed,
)
from antiphon.core.playback import PlaybackClock
from antiphon.counts import EngineCounts, Surveys
from antiphon.errors import AntiphonError, CallEnded, ConfigError, EngineStopped, InputError, InternalError
from antiphon.happenings import Happening, opening_event
from antiphon.models.minicpmo.chat_prompt import ChatPrompt
from antiphon.models.minicpmo.checkpoint import Checkpoint
from antiphon.models.minicpmo.flow import draw_noise
from antiphon.models.minicpmo.model import ModelConfig
from antiphon.models.minicpmo.source import CheckpointFolder, ModelSource
from antiphon.models.minicpmo.tokens import TextTokenizer
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.runner.placed import Died
from antiphon.stages.thinker.rebuild import Retained
from antiphon.stages.thinker.stage import ThinkerResult
from antiphon.stages.thinker.state import PieceOutcome, PromptReady, ThinkerSession, UnitInput, UnitOutcome
from antiphon.units import UNIT_S

AboutT = TypeVar("AboutT")
ResultT = TypeVar("ResultT")

FLOW_NOISE_SEED = 0
"""The reference draws this noise once, unseeded (REFERENCE 9.3); ours is the same for all engines."""


class MonotonicClock:
    """The machine's clock."""

    def now_s(self) -> float:
        return time.perf_counter()


class Engine:
    """Owns the records of all calls. What sessions hold in a stage is that stage's. Use as a context, or `stop` it."""

    def __init__(
        self, stages: Stages, inbox: Inbox, tokenizer: TextTokenizer, model: ModelConfig, clock: Clock
    ) -> None:
        """inbox: where the stages put their answers."""
        self.tokenizer = tokenizer
        self.model = model
        self._stages = stages
        self._inbox = inbox
        self._clock = clock
        self._calls: dict[str, CallRecord | ChatRecord] = {}
        self._num_opened = 0
        self._death: AntiphonError | None = None
        self._surveys = Surveys()

    @staticmethod
    def load(checkpoint: Checkpoint, config: EngineConfig, session: SessionConfig) -> Engine:
        """session: whose need the caches are sized for. Raises: CheckpointError, ConfigError."""
        return Engine.of(CheckpointFolder(checkpoint.folder), config, session)

    @staticmethod
    def of(source: ModelSource, config: EngineConfig, session: SessionConfig) -> Engine:
        """As `load`, from any source."""
        noise = draw_noise(source.config().flow.num_mel_bins, FLOW_NOISE_SEED, torch.device("cpu"))
        return Engine._assembled(source, config, session, noise)

    @staticmethod
    def from_noise(checkpoint: Checkpoint, config: EngineConfig, session: SessionConfig, flow_noise: Tensor) -> Engine:
        """flow_noise: [M, N] float32 on the host, what all speech is made from."""
        return Engine._assembled(CheckpointFolder(checkpoint.folder), config, session, flow_noise)

    @staticmethod
    def _assembled(source: ModelSource, config: EngineConfig, session: SessionConfig, flow_noise: Tensor) -> Engine:
        inbox: Inbox = SimpleQueue()
        stages = assemble(source, config, session, flow_noise, inbox)
        return Engine(stages, inbox, source.tokenizer(), source.config(), MonotonicClock())

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End all calls, and the stages; idempotent."""
        self._death = EngineStopped("the engine was stopped")
        self.end_all(self._death)
        self._stages.stop()

    def end_all(self, error: AntiphonError) -> None:
        """End all calls, also those that other threads are about to begin; nobody is left waiting."""
        death, self._death = self._death, error
        while self._calls:
            # Whoever is told so may close others.
            self._end(next(iter(self._calls.values())), error)
        while not self._inbox.empty():
            item = self._inbox.get()
            if not isinstance(item, FromThinker | FromTalker | FromCode2Wav):
                item()
        self._surveys.give_up(error)
        self._death = death

    def open(self, session_id: str, session: SessionConfig, reference: Tensor, voice: VoicePrompt) -> Call:
        """Start a call and wait until it can hear.

        Raises: ConfigError if a call of this name is open, PromptTooLong, AudioError, ResourceExhausted; nothing is
        held then.
        """
        call = self.begin(session_id, session, reference, voice, listener=_nobody)
        while call.record.phase is CallPhase.OPENING:
            self.advance()
        if call.record.error is not None:
            raise call.record.error
        return call

    def begin(
        self,
        session_id: str,
        session: SessionConfig,
        reference: Tensor,
        voice: VoicePrompt,
        listener: Callable[[Happening], None],
    ) -> Call:
        """Start a call; its listener is told SessionOpened, or SessionEnded with the reason why it could not start.

        reference: [n] float32 on the host, 16 kHz, the voice in the prompt; n = 0 for none. voice: to speak with.
        listener: is told everything that happens in the call, in the engine's thread.
        Raises: ConfigError if a call of this name is open.
        """
        record = self._new_record(session_id, session, listener)
        settings = stage_settings(record.key, session, reference, voice, deadline_s=record.opened_s + UNIT_S)
        return self._begin(record, settings, settings.thinker)

    def begin_chat(
        self,
        session_id: str,
        chat: ChatConfig,
        prompt: ChatPrompt,
        voice: VoicePrompt,
        listener: Callable[[Happening], None],
    ) -> Chat:
        """Start a chat; its listener is told SessionOpened, then what it answers, then SessionEnded.

        voice: to speak with, if it speaks. listener: as of `begin`. Raises: ConfigError if the name is taken.
        """
        self._check_new(session_id)
        num_stages = len(self._stages.all) if chat.answer.is_spoken else 1
        key, now_s = self._new_key(session_id), self._clock.now_s()
        record = ChatRecord(session_id, key, listener, now_s, num_stages, config=chat)
        settings = chat_settings(key, chat, prompt, voice, record.deadline_s)
        self._calls[key] = record
        self._stages.thinker.send(Open(key, settings.thinker))
        if chat.answer.is_spoken:
            self._stages.talker.send(Open(key, settings.talker))
            self._stages.code2wav.send(Open(key, settings.code2wav))
        return Chat(self, record)

    def resume(
        self, session_id: str, moved: MovedCall, voice: VoicePrompt, listener: Callable[[Happening], None]
    ) -> Call:
        """Go on with a call of another engine where it stopped. Parameters and errors as of `begin`.

        Its context is computed anew from what was retained of it.
        """
        return self._go_on(self._new_record(session_id, moved.session, listener), moved, voice)

    def succeed(
        self, record: CallRecord, moved: MovedCall, voice: VoicePrompt, listener: Callable[[Happening], None]
    ) -> Call:
        """Go on with a call beside itself, under its own name, so that it can be closed once its successor is open.

        Parameters as of `resume`.
        """
        return self._go_on(self._record(record.session_id, moved.session, listener), moved, voice)

    def retain(self, record: CallRecord, tell: TellMoved) -> None:
        """Ask for all that the call needs to go on elsewhere, after the seconds that are on their way; it stays open.

        tell: is called with it, or with why there is none.
        """
        address = record.next_address()
        record.moving[address.epoch, address.seq] = tell
        self._stages.thinker.send(Retain(address, self._clock.now_s()))

    def hear(self, record: CallRecord, heard: UnitInput) -> Second:
        """Send a second of a call on its way.

        Raises: InputError if the call is not open yet or was closed, or what it failed with.
        """
        if record.phase is CallPhase.OPENING:
            raise InputError(f"the call {record.session_id!r} is still opening; wait for SessionOpened")
        if record.phase is CallPhase.ENDED:
            assert record.error is not None, f"{record.key} ended for no reason"
            if not isinstance(record.error, CallEnded):
                raise record.error
            raise InputError(f"the call {record.session_id!r} has ended; open another one")
        if heard.wish is Wish.LISTEN:
            # The unit would close an open turn in the context only; talker and vocoder have to forget it too.
            self.interrupt(record)
        now_s = self._clock.now_s()
        address, second = record.send(now_s)
        # The listener runs dry when what is queued has been played.
        deadline_s = now_s + max(0.0, record.playback.end_s - record.now_s)
        self._stages.thinker.send(HeardUnit(address, deadline_s, heard))
        return second

    def interrupt(self, record: CallRecord) -> TurnInterrupted | None:
        """Stop a call's present answer at once, wherever it is.

        Queued speech is void, talker and vocoder forget the turn, and the thinker closes it in the context: what was
        said until now stays there. Returns None if nothing was being said or played.
        """
        is_heard = record.is_answering
        num_void_samples = record.playback.cut(record.now_s)
        if record.phase is not CallPhase.OPEN or not (is_heard or num_void_samples or record.undecided):
            return None
        record.enter_next_epoch()
        for stage in self._stages.all:
            stage.send(Interrupt(record.key, record.epoch))
        if not is_heard and not num_void_samples:
            return None
        num_heard_samples = max(0, record.num_turn_samples - num_void_samples)
        event = TurnInterrupted(record.turn, record.epoch, record.now_s, num_heard_samples, num_void_samples)
        record.listener(event)
        return event

    def close(self, record: CallRecord | ChatRecord) -> None:
        """End a session wherever it is and give everything back; idempotent."""
        if record.phase is not CallPhase.ENDED:
            self._end(record, CallEnded("the caller closed the call"))

    def advance(self) -> None:
        """Wait for something to do, and do it: pass on what stages answered, step those that run here."""
        is_waiting = self._stages.are_idle
        while is_waiting or not self._inbox.empty():
            item = self._inbox.get()
            is_waiting = False
            match item:
                case FromThinker(answer=answer):
                    self._from_thinker(answer)
                case FromTalker(answer=answer):
                    self._from_talker(answer)
                case FromCode2Wav(answer=answer):
                    self._from_code2wav(answer)
                case action:
                    action()
        self._stages.step()

    @property
    def is_idle(self) -> bool:
        """`advance` would wait: nothing has come in, and the stages that run here have nothing to do."""
        return self._stages.are_idle and self._inbox.empty()

    def call_soon(self, action: Callable[[], None]) -> None:
        """Let the engine's thread do something. The one method for other threads."""
        self._inbox.put(action)

    def survey(self) -> EngineCounts:
        """Ask all stages how things stand, and wait for it. Raises: AntiphonError if the engine is no more."""
        told: list[EngineCounts | AntiphonError] = []
        self.ask(told.append)
        while not told:
            self.advance()
        if isinstance(told[0], AntiphonError):
            raise told[0]
        return told[0]

    def ask(self, tell: Callable[[EngineCounts | AntiphonError], None]) -> None:
        """Ask all stages how things stand; tell: is called with what they say, or with why they say nothing."""
        if self._death is not None:
            tell(self._death)
            return
        question = self._surveys.ask(tell)
        for stage in self._stages.all:
            stage.send(question)

    def run_units(self, seconds: Sequence[tuple[Call, UnitInput]]) -> list[UnitResult | AntiphonError]:
        """Let calls live through one second each, together, and wait for all. One result per call, in order."""
        on_their_way: list[Second | AntiphonError] = []
        for call, heard in seconds:
            try:
                on_their_way.append(self.hear(call.record, heard))
            except AntiphonError as error:
                on_their_way.append(error)
        while any(isinstance(second, Second) and not second.is_over for second in on_their_way):
            self.advance()
        return [second.result() if isinstance(second, Second) else second for second in on_their_way]

    def _new_record(self, session_id: str, session: SessionConfig, listener: Callable[[Happening], None]) -> CallRecord:
        """Raises: ConfigError if a session of this name is open, or what the engine ended with."""
        self._check_new(session_id)
        return self._record(session_id, session, listener)

    def _record(self, session_id: str, session: SessionConfig, listener: Callable[[Happening], None]) -> CallRecord:
        """Raises: what the engine ended with."""
        key, num_stages = self._new_key(session_id), len(self._stages.all)
        return CallRecord(session_id, key, listener, self._clock.now_s(), num_stages, session=session)

    def _check_new(self, session_id: str) -> None:
        """Raises: ConfigError if a session of this name is open."""
        if any(record.session_id == session_id for record in self._calls.values()):
            raise ConfigError(f"a session named {session_id!r} is open; end it first or take another name")

    def _new_key(self, session_id: str) -> str:
        """Raises: what the engine ended with."""
        if self._death is not None:
            raise self._death
        # A name may come again while answers to its last owner are under way.
        key = f"{session_id} ({self._num_opened})"
        self._num_opened += 1
        return key

    def _go_on(self, record: CallRecord, moved: MovedCall, voice: VoicePrompt) -> Call:
        record.num_units, record.turn = moved.num_units, moved.turn
        record.playback = PlaybackClock(moved.queued_to_samples)
        reference, deadline_s = moved.retained.session.reference, record.opened_s + UNIT_S
        settings = stage_settings(record.key, moved.session, reference, voice, deadline_s)
        return self._begin(record, settings, moved.retained.for_session(settings.thinker))

    def _begin(self, record: CallRecord, settings: StageSettings, thinker: ThinkerSession | Retained) -> Call:
        self._calls[record.key] = record
        self._stages.thinker.send(Open(record.key, thinker))
        self._stages.talker.send(Open(record.key, settings.talker))
        self._stages.code2wav.send(Open(record.key, settings.code2wav))
        return Call(self, record)

    def _from_thinker(self, answer: ThinkerAnswer | Died) -> None:
        if isinstance(answer, Surveyed):
            self._surveys.take_thinker(answer)
            return
        rest = self._take_common(answer)
        record = None if rest is None else self._calls.get(rest.address.session_id)
        if rest is None or record is None or (isinstance(rest, Dropped) and rest.fault is Fault.REPEATED):
            return
        if isinstance(record, ChatRecord):
            self._advance_chat(record, rest)
            return
        tell = record.moving.pop((rest.address.epoch, rest.address.seq), None)
        if tell is not None:
            tell(_moved(record, rest))
            return
        second = record.answered(rest.address)
        if second is None:
            return
        match rest:
            case Done(result=outcome):
                assert isinstance(outcome, UnitOutcome), f"a second came to {outcome}"
                for handoff in record.decide(second, outcome, self._clock.now_s()):
                    self._stages.talker.send(handoff)
            case Refused(error=error):
                record.lose(second, error)
            case Dropped(fault=fault):
                record.lose(second, InputError(f"a second before this one was lost ({fault.value})"))
                self.interrupt(record)
            case never:
                assert_never(never)

    def _from_talker(self, answer: TalkerAnswer | Died) -> None:
        if isinstance(answer, Surveyed):
            self._surveys.take_talker(answer)
            return
        rest = self._take_common(answer)
        record = None if rest is None else self._calls.get(rest.address.session_id)
        if rest is None or record is None:
            return
        if isinstance(record, ChatRecord):
            self._advance_chat(record, rest)
        elif not isinstance(rest, Done):
            self._lose_speech(record, rest)
        elif record.pronounce(rest.address, self._clock.now_s()):
            self._stages.code2wav.send(rest.result)

    def _from_code2wav(self, answer: Code2WavAnswer | Died) -> None:
        if isinstance(answer, Surveyed):
            self._surveys.take_code2wav(answer)
            return
        rest = self._take_common(answer)
        record = None if rest is None else self._calls.get(rest.address.session_id)
        if rest is None or record is None:
            return
        if isinstance(record, ChatRecord):
            self._advance_chat(record, rest)
        elif isinstance(rest, Done):
            record.speak(rest.address, rest.result, self._clock.now_s())
        else:
            self._lose_speech(record, rest)

    def _take_common(
        self, answer: Opened[AboutT] | Done[ResultT] | Dropped | Refused | Failed | Died
    ) -> Done[ResultT] | Refused | Dropped | None:
        """What all stages say alike. Returns what is about a piece of work."""
        match answer:
            case Died(reason=reason):
                self._death = InternalError(f"a stage is gone: {reason}")
                self.end_all(self._death)
            case Failed(session_id=key, error=error):
                if key in self._calls:
                    self._end(self._calls[key], error)
            case Opened(session_id=key, about=about):
                if key in self._calls:
                    self._ready(self._calls[key], about)
            case _:
                return answer
        return None

    def _advance_chat(
        self, record: ChatRecord, answer: Done[ThinkerResult | CodecChunk | Spoken[Tensor]] | Refused | Dropped
    ) -> None:
        """Go on with an answer; one with a hole in it is over."""
        match answer:
            case Done(result=PieceOutcome() | CodecChunk() | Spoken() as result):
                self._send(record.take(result))
                if record.is_over:
                    self._end(record, CallEnded("the answer is complete"))
            case Refused(error=error):
                self._end(record, error)
            case Done() | Dropped():
                self._end(record, InternalError("a part of the answer was lost on its way"))

    def _send(self, errands: Errands) -> None:
        for asked in errands.thinker:
            self._stages.thinker.send(asked)
        for said in errands.talker:
            self._stages.talker.send(said)
        for chunk in errands.code2wav:
            self._stages.code2wav.send(chunk)

    def _ready(self, record: CallRecord | ChatRecord, about: object) -> None:
        record.num_ready += 1
        if isinstance(about, PromptReady):
            record.prompt = about
        if record.num_ready == record.num_stages:
            assert record.prompt is not None, f"no stage said how long the prompt of {record.key} is"
            took_s = self._clock.now_s() - record.opened_s
            record.phase = CallPhase.OPEN
            record.opened = opening_event(record.session_id, record.prompt, took_s)
            record.listener(record.opened)
            if isinstance(record, ChatRecord):
                self._send(record.ask())

    def _lose_speech(self, record: CallRecord, answer: Refused | Dropped) -> None:
        """An answer with a hole in it is stopped as if it were interrupted."""
        address = answer.address
        if isinstance(answer, Refused):
            reason = str(answer.error)
        elif answer.fault in (Fault.GAP, Fault.VOID):
            reason = f"a part of the answer before this one was lost ({answer.fault.value})"
        else:
            return  # it was answered, or its answer is void already
        if address.epoch == record.epoch:
            record.listener(SpeechLost(address.turn, record.now_s, reason))
            self.interrupt(record)

    def _end(self, record: Record, error: AntiphonError) -> None:
        """Close a session in all its stages; nothing of it is passed on afterwards."""
        del self._calls[record.key]
        for stage in self._stages.all[: record.num_stages]:
            stage.send(Close(record.key))
        record.end(error)
        record.listener(SessionEnded(record.now_s, error.code, str(error)))


class Call:
    """One session from its prompt to its end; made by `Engine`, used in its thread. record: what the engine knows."""

    def __init__(self, engine: Engine, record: CallRecord) -> None:
        self.record = record
        self._engine = engine

    @property
    def session_id(self) -> str:
        return self.record.session_id

    @property
    def opened(self) -> SessionOpened:
        """Its first event."""
        assert self.record.opened is not None, f"{self.session_id} is still opening"
        return self.record.opened

    def run_unit(self, heard: UnitInput) -> UnitResult:
        """Live through one second, alone.

        Raises: AudioError, ImageError or InputError for bad input, with the call as before;
        ContextLengthExceeded when the window is off and the context full: the call is over then.
        """
        (result,) = self._engine.run_units([(self, heard)])
        if isinstance(result, AntiphonError):
            raise result
        return result

    def hear(self, heard: UnitInput) -> None:
        """Send a second on its way; the listener is told what it comes to. Raises: InputError if the call has ended."""
        self._engine.hear(self.record, heard)

    def retain(self, tell: TellMoved) -> None:
        """As `Engine.retain`."""
        self._engine.retain(self.record, tell)

    def succeed(self, moved: MovedCall, voice: VoicePrompt, listener: Callable[[Happening], None]) -> Call:
        """As `Engine.succeed`."""
        return self._engine.succeed(self.record, moved, voice, listener)

    def interrupt(self) -> TurnInterrupted | None:
        """Stop the present answer. Returns None if nothing was being said."""
        return self._engine.interrupt(self.record)

    def close(self) -> None:
        """Give everything back; idempotent."""
        self._engine.close(self.record)


class Chat:
    """One chat from its prompt to the end of its answer; made by `Engine`, used in its thread."""

    def __init__(self, engine: Engine, record: ChatRecord) -> None:
        self._engine = engine
        self._record = record

    def close(self) -> None:
        """Give everything back, wherever the answer is; idempotent."""
        self._engine.close(self._record)


def _moved(record: CallRecord, answer: Done[ThinkerResult] | Refused | Dropped) -> MovedCall | AntiphonError:
    if isinstance(answer, Dropped):
        return InputError(f"the question was lost ({answer.fault.value}); ask again")
    if isinstance(answer, Refused):
        return answer.error
    assert isinstance(answer.result, Retained), f"what was to be retained came to {answer.result}"
    retained = answer.result
    return MovedCall(record.session, retained, record.num_units, retained.next_turn, record.playback.end_samples)


def _nobody(happening: Happening) -> None:
    """The listener of a call whose results are returned."""
