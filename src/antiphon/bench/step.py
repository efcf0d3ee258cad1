"""`antiphon bench step`: one step of each stage, for one session up to all of them, with full contexts.

Contexts are full of random numbers, behind real block tables (`contexts.py`); what runs is the stages' own code. Times
on device and host are separate figures. Shown by tests/bench/test_step.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import TypeVar

import torch

from antiphon.bench.contexts import fill, fill_randomly, grow
from antiphon.bench.results import BenchResult, Figure, Quantity, Unit
from antiphon.bench.target import Target, random_voice
from antiphon.bench.timing import StepTime, in_a_row_ms, timed
from antiphon.config import Code2WavConfig, SessionConfig
from antiphon.core.batch_grid import BatchGrid
from antiphon.core.cache_dtype import CacheDtype
from antiphon.core.context import Context
from antiphon.core.messages import CodecChunk
from antiphon.core.sampling import CodecSampling, Draws, TextSampling
from antiphon.core.window import SlideMode
from antiphon.models.minicpmo.captured import GraphRecorder
from antiphon.models.minicpmo.flow import NUM_FLOW_STEPS, MelSynthesizer, draw_noise
from antiphon.models.minicpmo.flow_cache import FlowShape
from antiphon.models.minicpmo.flow_inputs import FlowRow
from antiphon.models.minicpmo.model import Section
from antiphon.models.minicpmo.speech_arena import ArenaSize, SpeechArena
from antiphon.models.minicpmo.vocoder import SeededNoise
from antiphon.runner.device import DTYPES
from antiphon.stages.code2wav.renderer import ChunkRow, Renderer
from antiphon.stages.code2wav.state import Code2WavState
from antiphon.stages.draw_table import DrawPlace, Newest
from antiphon.stages.paged import CacheConfig
from antiphon.stages.step_packing import Row
from antiphon.stages.stepping import Chain, Finished, Request
from antiphon.stages.talker.choosing import CodecDraw
from antiphon.stages.talker.speaker import CHAIN_STEPS, Speaker, SpeakerSteps
from antiphon.stages.thinker.choosing import Turn, UnitDraw
from antiphon.stages.thinker.decider import Decider, DeciderState, DeciderSteps
from antiphon.stages.thinker.state import PromptDone, ThinkerSession
from antiphon.units import MEL_FRAME_RATE_HZ

MIXED_ROW_TOKENS = 16
"""About a unit's input."""
NUM_WARM_UPS = 3
CHUNK_TOKENS = 25
LOOKAHEAD_TOKENS = 3

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Numbers of sessions for each stage; none leaves it out. *_tokens: of each session's context.

    mixed_tokens: of steps that take units in. voice_s: of the vocoder's voices; it remembers as much speech and 2 s.
    has_graphs: steps are recorded where there is a GPU. code2wav: as in an engine, but for voices and grid.
    kv_dtype: of the thinker's keys and values.
    """

    thinker_sessions: tuple[int, ...]
    talker_sessions: tuple[int, ...]
    code2wav_sessions: tuple[int, ...]
    context_tokens: int
    talker_tokens: int
    mixed_tokens: tuple[int, ...]
    voice_s: float
    num_steps: int
    num_repetitions: int
    has_graphs: bool
    code2wav: Code2WavConfig
    kv_dtype: CacheDtype


def run_step(target: Target, plan: StepPlan) -> BenchResult:
    figures: list[Figure] = []
    with torch.inference_mode():
        for stage in (_thinker_figures, _talker_figures, _code2wav_figures):
            figures += stage(target, plan)
            target.forget()
    return BenchResult(
        name="step",
        environment=target.environment(),
        figures=tuple(figures),
        notes=(
            "Each value is one step, begun on an idle device, or one of a row of steps, launched while the one before "
            "is under way. Thinker and talker: one forward pass and its draws; of steps that are launched several at "
            "once, a part of the launch. DiT "
            f"solve: the flow of a chunk of {CHUNK_TOKENS} codec tokens, encoder and all Euler steps. Code2wav step: "
            "that and the vocoder, up to PCM on the device.",
        ),
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """One value of a step. in_a_row_ms: of one of several that follow one another."""

    alone: StepTime
    in_a_row_ms: float


def _figures(
    case: str, size: tuple[str, int], repetitions: Sequence[Sequence[_Measured]], num_at_once: int = 1
) -> Iterator[Figure]:
    """num_at_once: steps that were launched as one."""
    parts: tuple[tuple[Quantity, Callable[[_Measured], float]], ...] = (
        (Quantity.STEP_DEVICE_TIME, lambda one: one.alone.device_ms),
        (Quantity.STEP_HOST_TIME, lambda one: one.alone.host_ms),
        (Quantity.STEP_TIME, lambda one: one.alone.whole_ms),
        (Quantity.STEP_IN_A_ROW_TIME, lambda one: one.in_a_row_ms),
    )
    for quantity, part in parts:
        values = [[part(one) / num_at_once for one in measured] for measured in repetitions]
        yield Figure.of(quantity, case, size, Unit.MS, values)


def _repeated(target: Target, plan: StepPlan, step: Callable[[], object]) -> list[list[_Measured]]:
    for _ in range(NUM_WARM_UPS):
        step()

    def measured() -> _Measured:
        return _Measured(timed(step, target.device), in_a_row_ms(step, target.device))

    return [[measured() for _ in range(plan.num_steps)] for _ in range(plan.num_repetitions)]


def _endless(finished: Sequence[Finished[ResultT]]) -> None:
    """Raises: what work that should go on ended with."""
    for one in finished:
        assert isinstance(one.result, Exception), f"work that never ends came to {one.result}"
        raise one.result


def _recorders(target: Target, plan: StepPlan) -> tuple[GraphRecorder, ...]:
    """One where steps are recorded, as in an engine."""
    return (GraphRecorder.on(target.device),) if plan.has_graphs and target.device.type == "cuda" else ()


def _finish(*captures: Iterator[int]) -> None:
    for _ in chain.from_iterable(captures):
        pass


def _thinker_figures(target: Target, plan: StepPlan) -> Iterator[Figure]:
    num_mixed = tuple(num_tokens // MIXED_ROW_TOKENS for num_tokens in plan.mixed_tokens)
    num_most = max((*plan.thinker_sessions, *num_mixed), default=0)
    if not num_most:
        return
    network = target.source.load(Section.THINKER, target.device, target.torch_dtype).thinker
    max_tokens = plan.context_tokens + MIXED_ROW_TOKENS
    one = CacheConfig.for_tokens(max_tokens, num_segments=2)
    blocks = CacheConfig(num_most * one.num_blocks, one.block_size, plan.kv_dtype)
    decider = Decider(network, target.source.tokenizer(), blocks)
    for recorder in _recorders(target, plan):
        max_keys = network.config.max_position_tokens
        _finish(decider.decoder.capture(num_most, max_keys, recorder), decider.chooser.capture(num_most, recorder))
    fill_randomly(decider.decoder.cache)
    states = [decider.open(_session(f"session {number}"), max_tokens) for number in range(num_most)]
    for state in states:
        fill(state.memory.context, plan.context_tokens)

    def repeated(works: Sequence[tuple[DeciderState, DeciderSteps]]) -> list[list[_Measured]]:
        """Steps of work that never ends; it is dropped afterwards."""
        for state, steps in works:
            decider.loop.add(state.session.session_id, steps, deadline_s=0.0)
        times = _repeated(target, plan, lambda: _endless(decider.loop.step()))
        for state, _ in works:
            decider.loop.cancel(state.session.session_id)
        return times

    kept_in = "" if plan.kv_dtype is CacheDtype.MODEL else f", {plan.kv_dtype.value}"
    each = f"{plan.context_tokens} tokens each{kept_in}"
    for num in plan.thinker_sessions:
        times = repeated([(state, _decoding(state)) for state in states[:num]])
        yield from _figures(f"thinker, decode, {each}", ("sessions", num), times)
    embeds = decider.embed(tuple(range(MIXED_ROW_TOKENS)))
    for num_rows in num_mixed:
        times = repeated([(state, _reading(state, embeds)) for state in states[:num_rows]])
        case = f"thinker, {MIXED_ROW_TOKENS} new tokens a session, {each}"
        yield from _figures(case, ("tokens", num_rows * MIXED_ROW_TOKENS), times)
    for state in states:
        decider.close(state)


def _session(session_id: str) -> ThinkerSession:
    defaults = SessionConfig()
    return ThinkerSession(
        session_id=session_id,
        prompt=defaults.prompt,
        reference=torch.empty(0),
        window=defaults.window,
        slide=defaults.slide,
        max_pictures=0,
        max_slices=1,
        max_text_tokens=0,
        duplex=defaults.duplex,
        sampling=TextSampling(),
        draws=Draws.SAMPLED,
        seed=0,
        keeps_inputs=False,
        deadline_s=0.0,
    )


def _decoding(state: DeciderState) -> DeciderSteps:
    """Draw and feed for ever; the context stays as long as it is."""
    for draw in _draws(state):
        try:
            yield from state.memory.feed_drawn(state.slot, draw)
        finally:
            state.memory.context.retract(1)
    return PromptDone(state.memory.context.num_tokens)


def _reading(state: DeciderState, embeds: torch.Tensor) -> DeciderSteps:
    """Take a unit in for ever, and choose after it. embeds: [n, hidden]."""
    for draw in _draws(state):
        try:
            yield from state.memory.feed_and_draw(embeds, draw)
        finally:
            state.memory.context.retract(len(embeds))
    return PromptDone(state.memory.context.num_tokens)


def _draws(state: DeciderState) -> Iterator[UnitDraw]:
    """Without end."""
    for counter in count():
        newest = Newest.TAKEN if counter else Newest.FORGOTTEN
        place = DrawPlace(state.slot, newest, state.session.sampling.repetition_window_tokens)
        yield UnitDraw(TextSampling(), Draws.SAMPLED, place, Turn.CLOSED, must_speak=True, seed=0, counter=counter)


def _talker_figures(target: Target, plan: StepPlan) -> Iterator[Figure]:
    if not plan.talker_sessions:
        return
    network = target.source.load(Section.TALKER, target.device, target.torch_dtype).talker
    recorders = _recorders(target, plan)
    num_steps = CHAIN_STEPS if recorders else 1
    max_tokens = plan.talker_tokens + num_steps
    one = CacheConfig.for_tokens(max_tokens, num_segments=1)
    speaker = Speaker(network, CacheConfig(max(plan.talker_sessions) * one.num_blocks, one.block_size), num_steps)
    for recorder in recorders:
        _finish(speaker.capture(max(plan.talker_sessions), recorder))
    fill_randomly(speaker.decoder.cache)
    contexts = []
    for _ in range(max(plan.talker_sessions)):
        context = Context(speaker.decoder.pool, SlideMode.ROTATE_QUERY, max_tokens)
        grow(context, plan.talker_tokens)
        contexts.append(context)
    for num in plan.talker_sessions:
        for number, context in enumerate(contexts[:num]):
            speaker.loop.add(f"session {number}", _saying(speaker, context), deadline_s=0.0)
        times = _repeated(target, plan, lambda: _endless(speaker.loop.step()))
        for number in range(num):
            speaker.loop.cancel(f"session {number}")
        at_once = f", {num_steps} at once" if num_steps > 1 else ""
        yield from _figures(f"talker, {plan.talker_tokens} tokens each{at_once}", ("sessions", num), times, num_steps)


def _saying(speaker: Speaker, context: Context) -> SpeakerSteps[CodecChunk]:
    """Draw and feed codec tokens for ever."""
    sampling, num_steps = CodecSampling(), speaker.chains.num_steps
    slot = speaker.chooser.table.take(sampling.repetition_window_tokens)
    try:
        for counter in count(step=num_steps):
            newest = Newest.TAKEN if counter else Newest.FORGOTTEN
            place = DrawPlace(slot, newest, sampling.repetition_window_tokens)
            draws = tuple(
                CodecDraw(sampling, Draws.SAMPLED, place, is_eos_masked=True, seed=0, counter=counter + step)
                for step in range(num_steps)
            )
            row = Row(context, context.append(num_steps))
            try:
                yield Request(row, slot, draws[0]) if num_steps == 1 else Chain(row, slot, draws)
            finally:
                context.retract(num_steps)
    finally:
        speaker.chooser.table.give_back(slot)
    raise AssertionError("it goes on for ever")


def _code2wav_figures(target: Target, plan: StepPlan) -> Iterator[Figure]:
    if not plan.code2wav_sessions:
        return
    num_most, config = max(plan.code2wav_sessions), plan.code2wav
    if target.device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # as in an engine: `Code2WavBuilder`
    model = target.source.load(Section.VOCODER, target.device, target.torch_dtype)
    voice_frames = round(plan.voice_s * MEL_FRAME_RATE_HZ)
    size = ArenaSize.for_turns(config.retention, voice_frames, num_most, 2 * num_most)
    shape = FlowShape(model.config.flow, NUM_FLOW_STEPS)
    arena = SpeechArena(shape, config.retention, size, DTYPES[config.dtype], target.device)
    noise = draw_noise(model.config.flow.num_mel_bins, 0, target.device)
    synthesizer = model.synthesizer(noise, arena, config.compute)
    voice = synthesizer.build_voice(random_voice(target.source, plan.voice_s))
    grid = BatchGrid(tuple(sorted({1, *plan.code2wav_sessions})))
    renderer = Renderer(synthesizer, model.vocoder(config.compute), grid)
    for recorder in _recorders(target, plan):
        _finish(renderer.capture(config.chunk_tokens.sizes, voice_frames, recorder))
    states = [renderer.open(voice, SeededNoise(number, target.device)) for number in range(num_most)]
    # Until as much is remembered as ever is: as many seconds as the voice has, and the reference's two.
    for second in range(round(plan.voice_s) + 3):
        _render(renderer, states, is_flush=second == 0)
    for num in plan.code2wav_sessions:
        rows = states[:num]
        frames = rows[0].speech.num_past_frames
        solve = _Solve(synthesizer, tuple(rows), model.config.flow.vocab_size)
        yield from _figures(f"DiT solve, {frames} frames each", ("sessions", num), _repeated(target, plan, solve.run))
        times = _repeated(target, plan, partial(_render, renderer, rows, is_flush=False))
        yield from _figures(f"code2wav, {frames} frames each", ("sessions", num), times)


def _render(renderer: Renderer, states: Sequence[Code2WavState], *, is_flush: bool) -> None:
    """A second of each."""
    chunk = list(range(CHUNK_TOKENS))
    for result in renderer.speak([ChunkRow(state, chunk, is_turn_end=False, is_flush=is_flush) for state in states]):
        if isinstance(result, Exception):
            raise result


@dataclass(frozen=True, slots=True)
class _Solve:
    """The flow alone, over and over at the same place of the turn."""

    synthesizer: MelSynthesizer
    states: tuple[Code2WavState, ...]
    num_codec_ids: int

    def run(self) -> None:
        tokens = [index % self.num_codec_ids for index in range(CHUNK_TOKENS + LOOKAHEAD_TOKENS)]
        rows = [FlowRow(tokens, state.voice, state.speech, is_last=False) for state in self.states]
        for row, (_, after) in zip(rows, self.synthesizer.speak(rows), strict=True):
            self.synthesizer.arena.keep_only(row.speech, [after])
