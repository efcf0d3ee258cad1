"""Simulated callers in real time: many sessions of one engine, each with a second of sound every second.

Their windows are filled first, by units that are really computed, as fast as they go. Then the clock starts, and every
unit is sent at its time, whatever the engine does. What the model decides is scripted (`script.py`), when it does so is
not. Shown by tests/bench/test_duplex.py.
"""

from __future__ import annotations

import resource
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

import torch
from PIL import Image

from antiphon.bench.load import LoadPlan, LoadRun, MemoryAt, Stages, Troubles, TurnHeard, UnitTimes
from antiphon.bench.pacing import Due, Heard, timetable
from antiphon.bench.script import script_of
from antiphon.bench.target import noise_reference, noise_second, random_voice
from antiphon.config import SessionConfig
from antiphon.core.duplex import Wish
from antiphon.core.events import (
    InputRefused,
    SessionEnded,
    SessionOpened,
    SpeechLost,
    UnitDecided,
    UnitFinished,
    WindowSlid,
)
from antiphon.core.window import BasicWindow
from antiphon.errors import AudioError, ConfigError
from antiphon.happenings import Happening, Speech
from antiphon.live import LiveEngine, Sender
from antiphon.models.minicpmo.source import ModelSource
from antiphon.models.minicpmo.voice_prompt import VoicePrompt

DRAIN_S = 20.0
"""After the last unit, so long is waited for what was not finished."""
TIMETABLE_S = 5e-6
"""Time that a line of the timetable may take to be written, before the clock starts."""
FILL_WORD = "so "
NEVER = -1
"""A unit that no call has."""
NUM_SECONDS = 8
"""Different ones that are said by turns."""


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """What all callers say and show. fill_text: typed while a window is filled, as much as a unit takes."""

    seconds: tuple[torch.Tensor, ...]
    pictures: tuple[Image.Image, ...]
    fill_text: str


def _integers() -> array[int]:
    return array("q")


def _floats() -> array[float]:
    return array("d")


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """Times by unit, in order; small, so that a long run's memory is the engine's."""

    units: array[int] = field(default_factory=_integers)
    times_s: array[float] = field(default_factory=_floats)

    def add(self, unit: int, at_s: float) -> None:
        self.units.append(unit)
        self.times_s.append(at_s)

    def by_unit(self) -> dict[int, float]:
        return dict(zip(self.units, self.times_s, strict=True))


@dataclass(slots=True, eq=False)
class Caller:
    """One of them. Written by the engine's thread as soon as its call has begun; read when the run is over.

    target_tokens: that its context shall have when the clock starts, or as much as units come to without a slide, which
    is above high_tokens. fill_steps: after each unit of the fill, it.
    units: of the call, by those of the timetable; `NEVER` where one was not taken.
    decided, finished, heard: by unit of the call; of what was heard also its turn and how much it was.
    stages_ms: of every unit that is finished, in thinker, talker and code2wav.
    """

    target_tokens: int
    high_tokens: int
    fill_steps: SimpleQueue[Caller]
    said: Said
    is_open: bool = False
    is_filling: bool = False
    end: SessionEnded | None = None
    num_fill_units: int = 0
    num_context_tokens: int = 0
    decided: Marks = field(default_factory=Marks)
    finished: Marks = field(default_factory=Marks)
    stages_ms: array[float] = field(default_factory=_floats)
    heard: Marks = field(default_factory=Marks)
    heard_turns: array[int] = field(default_factory=_integers)
    heard_samples: array[int] = field(default_factory=_integers)
    slides: array[int] = field(default_factory=_integers)
    refused: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    units: array[int] = field(default_factory=_integers)
    num_unsent: int = 0

    def happened(self, happening: Happening) -> None:
        """In the engine's thread."""
        now_s = time.perf_counter()
        match happening:
            case UnitDecided():
                self._decided(happening, now_s)
            case UnitFinished():
                self.finished.add(happening.unit, now_s)
                self.stages_ms.extend((happening.thinker_ms, happening.talker_ms, happening.code2wav_ms))
            case Speech(chunk=chunk, samples=samples):
                self.heard.add(chunk.unit, now_s)
                self.heard_turns.append(chunk.address.turn)
                self.heard_samples.append(samples.numel())
            case WindowSlid(unit=unit):
                self.slides.append(unit)
            case SessionOpened(num_prompt_tokens=num_prompt_tokens):
                self.is_open = True
                self.num_context_tokens = num_prompt_tokens
            case SessionEnded():
                self.end = happening
                self._end_fill()
            case InputRefused(message=message):
                self.refused.append(message)
                self._end_fill()
            case SpeechLost(reason=reason):
                self.lost.append(reason)

    def _decided(self, decided: UnitDecided, now_s: float) -> None:
        self.decided.add(decided.unit, now_s)
        num_grown_tokens = decided.num_context_tokens - self.num_context_tokens
        self.num_context_tokens = decided.num_context_tokens
        if not self.is_filling:
            return
        self.num_fill_units = decided.unit + 1
        # A unit that takes the context over its limit would empty what was filled.
        most_tokens = min(self.target_tokens, self.high_tokens - num_grown_tokens)
        if decided.num_context_tokens < most_tokens:
            self.fill_steps.put(self)
        else:
            self._end_fill()

    def _end_fill(self) -> None:
        if self.is_filling:
            self.is_filling = False
            self.fill_steps.put(self)

    def fill(self, sender: Sender) -> None:
        """Send the next unit of the fill; nothing is decided in it."""
        if self.said.fill_text:
            sender.send_text(self.said.fill_text)
        sender.wish(Wish.HOLD)
        sender.send_audio(self.said.seconds[0])

    def speak(self, sender: Sender, unit: int) -> None:
        """Send a unit at its time."""
        try:
            if self.said.pictures:
                sender.send_picture(self.said.pictures[unit % len(self.said.pictures)])
            sender.send_audio(self.said.seconds[unit % len(self.said.seconds)])
        except AudioError:
            self.units.append(NEVER)
            self.num_unsent += 1
        else:
            self.units.append(self.num_fill_units + len(self.units) - self.num_unsent)

    @property
    def is_alive(self) -> bool:
        return self.is_open and self.end is None


def run_load(
    live: LiveEngine, source: ModelSource, session: SessionConfig, plan: LoadPlan, name: str, device: torch.device
) -> LoadRun:
    """Open the callers, fill their windows, let them talk, close them.

    session: of each, but for what is scripted. name: no two runs of an engine have the same. device: whose memory is
    looked at.
    """
    fill_steps: SimpleQueue[Caller] = SimpleQueue()
    callers, senders = _opened(live, source, session, plan, name, fill_steps)
    started_s = time.perf_counter()
    _fill(callers, senders, fill_steps)
    fill_s = time.perf_counter() - started_s
    context_tokens = tuple(caller.num_context_tokens for caller in callers if caller.is_alive)
    pace = _paced(plan, callers, senders, device)
    _drain(callers)
    is_lost = [caller.is_open and caller.end is not None for caller in callers]
    for sender in senders:
        sender.close()
    _wait(lambda: all(caller.end is not None for caller in callers), DRAIN_S)
    by_session: list[list[Due]] = [[] for _ in callers]
    for due in pace.due:
        by_session[due.session].append(due)
    due_of = tuple(zip(callers, by_session, strict=True))
    return LoadRun(
        plan=plan,
        units=tuple(times for caller, own in due_of for times in unit_times(caller, own)),
        turns=tuple(turn for caller, own in due_of for turn in turns_heard(caller, own, plan)),
        sending_s=tuple(pace.sending_s),
        memory=pace.memory,
        troubles=_troubles(callers, is_lost),
        num_slides=sum(
            unit - caller.num_fill_units >= plan.num_warm_up_units for caller in callers for unit in caller.slides
        ),
        fill_s=fill_s,
        context_tokens=context_tokens,
    )


def said(plan: LoadPlan, source: ModelSource, max_text_tokens: int) -> Said:
    """max_text_tokens: that a session reads in a second."""
    text, tokenizer = "", source.tokenizer()
    while len(tokenizer.encode_plain(text + FILL_WORD)) <= max_text_tokens:
        text += FILL_WORD
    pictures = tuple(_picture(plan.picture_side, seed) for seed in range(NUM_SECONDS)) if plan.picture_side else ()
    return Said(tuple(noise_second(seed) for seed in range(NUM_SECONDS)), pictures, text)


def resident_bytes() -> int:
    """Memory of this process that is in RAM; Linux only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _picture(side: int, seed: int) -> Image.Image:
    pixels = torch.randint(256, (side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.numpy())


def _opened(
    live: LiveEngine,
    source: ModelSource,
    session: SessionConfig,
    plan: LoadPlan,
    name: str,
    fill_steps: SimpleQueue[Caller],
) -> tuple[list[Caller], list[Sender]]:
    """Callers whose calls are open, or were refused.

    Their windows are to be full to different degrees, so that not all slide at once.
    """
    if not isinstance(session.window, BasicWindow):
        raise ConfigError(f"a load is measured with a window of tokens, not with {session.window}; choose basic")
    low, high = session.window.low_tokens, session.window.high_tokens
    tokenizer, words = source.tokenizer(), said(plan, source, session.max_text_tokens)
    voice, reference = _voice(source, plan)
    callers, senders = [], []
    for number in range(plan.num_sessions):
        target_tokens = low + (high - low) * number // plan.num_sessions
        caller = Caller(target_tokens, high, fill_steps, words)
        script = script_of(plan.talk, number, plan.num_sessions, tokenizer)
        config = replace(session, script=script, seed=number)
        ongoing = live.begin(f"{name} {number}", config, reference, voice, caller.happened)
        callers.append(caller)
        senders.append(Sender(live, ongoing))
    _wait(lambda: all(caller.is_open or caller.end is not None for caller in callers))
    return callers, senders


def _voice(source: ModelSource, plan: LoadPlan) -> tuple[VoicePrompt, torch.Tensor]:
    return random_voice(source, plan.voice_s), noise_reference(plan.voice_s)


def _fill(callers: Sequence[Caller], senders: Sequence[Sender], fill_steps: SimpleQueue[Caller]) -> None:
    """One unit after the other of each, all callers at the same time."""
    sender_of = dict(zip(map(id, callers), senders, strict=True))
    filling = [caller for caller in callers if caller.is_alive]
    for caller in filling:
        caller.is_filling = True
        caller.fill(sender_of[id(caller)])
    num_filling = len(filling)
    while num_filling:
        caller = fill_steps.get()
        if caller.is_filling:
            caller.fill(sender_of[id(caller)])
        else:
            num_filling -= 1


@dataclass(frozen=True, slots=True)
class _Pace:
    due: tuple[Due, ...]
    sending_s: array[float]
    memory: tuple[MemoryAt, ...]


def _paced(plan: LoadPlan, callers: Sequence[Caller], senders: Sequence[Sender], device: torch.device) -> _Pace:
    """Send every unit at its time; a time that has passed is not made up for."""
    num_units = plan.num_warm_up_units + plan.num_units
    start_s = time.perf_counter() + TIMETABLE_S * plan.num_sessions * num_units
    table = tuple(timetable(plan.num_sessions, num_units, plan.arrival, start_s))
    sending_s, memory = _floats(), []
    for due in table:
        wait_s = due.at_s - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)
        caller = callers[due.session]
        if caller.is_alive:
            caller.speak(senders[due.session], due.unit)
        sent_s = time.perf_counter()
        if due.unit >= plan.num_warm_up_units:
            sending_s.append(sent_s - due.at_s)
        if due.session == 0:
            memory.append(memory_at(sent_s - start_s, device))
    return _Pace(table, sending_s, tuple(memory))


def memory_at(at_s: float, device: torch.device) -> MemoryAt:
    """Now."""
    held_bytes = reserved_bytes = 0
    if device.type == "cuda":
        held_bytes, reserved_bytes = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return MemoryAt(at_s, resident_bytes(), held_bytes, reserved_bytes)


def _drain(callers: Sequence[Caller]) -> None:
    """Wait for what is still on its way, but not for ever."""

    def is_done(caller: Caller) -> bool:
        return (
            not caller.is_alive
            or len(caller.finished.units) >= caller.num_fill_units + len(caller.units) - caller.num_unsent
        )

    _wait(lambda: all(map(is_done, callers)), DRAIN_S)


def _wait(is_over: Callable[[], bool], limit_s: float = float("inf")) -> None:
    """Until it is over, or the time is."""
    end_s = time.perf_counter() + limit_s
    while not is_over() and time.perf_counter() < end_s:
        time.sleep(0.005)


def unit_times(caller: Caller, table: Sequence[Due]) -> Iterator[UnitTimes]:
    """table: of this caller."""
    decided, finished = caller.decided.by_unit(), caller.finished.by_unit()
    in_stages = iter(caller.stages_ms)
    stages = dict(zip(caller.finished.units, map(Stages, in_stages, in_stages, in_stages), strict=True))
    first_pcm: dict[int, float] = {}
    for unit, at_s, num_samples in zip(caller.heard.units, caller.heard.times_s, caller.heard_samples, strict=True):
        if num_samples:
            first_pcm.setdefault(unit, at_s)
    for due in table:
        unit = caller.units[due.unit] if due.unit < len(caller.units) else NEVER
        yield UnitTimes(
            session=due.session,
            unit=due.unit,
            complete_s=due.at_s,
            decided_s=decided.get(unit),
            first_pcm_s=first_pcm.get(unit),
            finished_s=finished.get(unit),
            stages=stages.get(unit),
        )


def turns_heard(caller: Caller, table: Sequence[Due], plan: LoadPlan) -> Iterator[TurnHeard]:
    """Of the measured time, the end of a turn that began before it too. table: of this caller."""
    due_of = dict(zip(caller.units, table, strict=False))
    turns: dict[int, list[tuple[Due, Heard]]] = {}
    heard = zip(caller.heard.units, caller.heard.times_s, caller.heard_turns, caller.heard_samples, strict=True)
    for unit, at_s, turn, num_samples in heard:
        if unit in due_of:  # an input that was refused, which is counted, moves the numbers of all after it
            turns.setdefault(turn, []).append((due_of[unit], Heard(at_s, num_samples)))
    for pieces in turns.values():
        measured = [(due, piece) for due, piece in pieces if due.unit >= plan.num_warm_up_units]
        if measured:
            first = pieces[0][0]
            began_s = first.at_s if first.unit >= plan.num_warm_up_units else None
            yield TurnHeard(first.session, measured[0][0].unit, began_s, tuple(piece for _, piece in measured))


def _troubles(callers: Sequence[Caller], is_lost: Sequence[bool]) -> Troubles:
    ends = [caller.end for caller in callers if not caller.is_open]
    ends += [caller.end for caller, lost in zip(callers, is_lost, strict=True) if lost]
    reasons = [f"{end.code}: {end.message}" for end in ends if end is not None]
    reasons += [text for caller in callers for text in (*caller.refused, *caller.lost)]
    return Troubles(
        num_refused=sum(not caller.is_open for caller in callers),
        num_lost=sum(is_lost),
        num_unsent=sum(caller.num_unsent for caller in callers),
        num_inputs_refused=sum(len(caller.refused) for caller in callers),
        num_speech_lost=sum(len(caller.lost) for caller in callers),
        reasons=tuple(dict.fromkeys(reasons))[:20],
    )
