"""The same engine on a GPU; skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

import build
import build_voice
import chats
from antiphon.call import UnitResult
from antiphon.config import Dtype, EngineConfig, SessionConfig, everywhere
from antiphon.core.batch_grid import BatchGrid
from antiphon.core.cache_dtype import CacheDtype
from antiphon.core.duplex import Wish
from antiphon.core.messages import Address, CodecChunk, Handoff
from antiphon.core.sampling import CodecSampling, Draws
from antiphon.core.window import BasicWindow, SlideMode
from antiphon.engine import Engine
from antiphon.kernels.beside import Beside
from antiphon.models.minicpmo.audio_features import MelExtractor
from antiphon.models.minicpmo.audio_stream import MelStream
from antiphon.models.minicpmo.captured import GraphRecorder
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.hift_config import Generation
from antiphon.models.minicpmo.image import cut_picture
from antiphon.models.minicpmo.model import Section, load_model
from antiphon.models.minicpmo.tokens import load_tokenizer
from antiphon.models.minicpmo.vocoder import NoNoise
from antiphon.runner.device import Precedence, on_device
from antiphon.stages.code2wav.renderer import ChunkRow, Renderer, grid_on
from antiphon.stages.paged import CacheConfig, PagedDecoder
from antiphon.stages.talker.choosing import CodecChooser
from antiphon.stages.talker.speaker import CHAIN_STEPS
from antiphon.stages.talker.stage import TalkerStage
from antiphon.stages.talker.state import TalkerSession, TalkerState
from antiphon.stages.thinker.choosing import TextChooser
from antiphon.stages.thinker.decider import Decider
from antiphon.stages.thinker.state import ThinkerSession, UnitOutcome

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

NUM_UNITS = 30


WAYS = [
    *((slide, CacheDtype.MODEL) for slide in SlideMode),
    (SlideMode.ROTATE_QUERY, CacheDtype.FLOAT8_E4M3),
    (SlideMode.REPREFILL, CacheDtype.FLOAT8_E4M3),
]
"""To slide, and what of."""


def greedy_call(
    folder: Path, device: str, dtype: Dtype, slide: SlideMode, kept_in: CacheDtype = CacheDtype.MODEL
) -> list[UnitResult]:
    session = SessionConfig(window=BasicWindow(200, 120), slide=slide, draws=Draws.MOST_LIKELY)
    config = EngineConfig(everywhere(device), dtype, kv_dtype=kept_in)
    with Engine.load(open_checkpoint(folder), config, session) as engine:
        call = engine.open("a", session, torch.empty(0), build.voice(engine))
        return [call.run_unit(build.second(unit)) for unit in range(NUM_UNITS)]


def samples_of(results: list[UnitResult]) -> Tensor:
    return torch.cat([speech.samples for result in results for speech in result.speech])


@pytest.mark.parametrize("slide", [SlideMode.ROTATE_QUERY, SlideMode.ROTATE_KEYS])
def test_a_float32_call_decides_on_the_gpu_what_it_decides_on_the_cpu(tiny_checkpoint: Path, slide: SlideMode) -> None:
    here, there = (greedy_call(tiny_checkpoint, device, Dtype.FLOAT32, slide) for device in ("cpu", "cuda"))
    assert any(result.outcome.slide for result in here)
    assert [result.outcome.token_ids for result in here] == [result.outcome.token_ids for result in there]
    codec = [[speech.chunk.codec_tokens for result in call for speech in result.speech] for call in (here, there)]
    assert codec[0] == codec[1]
    # Full scale is 1; the end-to-end golden cases allow 5e-3 for the vocoder's summed phase.
    torch.testing.assert_close(samples_of(there), samples_of(here), rtol=0, atol=5e-3)


@pytest.mark.parametrize(("slide", "kept_in"), WAYS)
def test_a_bfloat16_call_runs_and_speaks(tiny_checkpoint: Path, slide: SlideMode, kept_in: CacheDtype) -> None:
    results = greedy_call(tiny_checkpoint, "cuda", Dtype.BFLOAT16, slide, kept_in)
    samples = samples_of(results)
    assert samples.isfinite().all()
    assert 0.01 < samples.abs().max() < 1
    assert any(result.outcome.slide for result in results)


@pytest.mark.parametrize("dtype", Dtype)
def test_chats_beside_a_call_are_answered_and_spoken_on_the_gpu(tiny_checkpoint: Path, dtype: Dtype) -> None:
    def answered(device: str, dtype: Dtype) -> list[chats.Talk]:
        session = SessionConfig(window=BasicWindow(200, 120))
        config = EngineConfig(everywhere(device), dtype, max_calls=4)
        with Engine.load(open_checkpoint(tiny_checkpoint), config, session) as engine:
            voice = build.voice(engine)
            talks: list[chats.Talk] = []
            call = engine.open("call", session, torch.empty(0), voice)
            for kind in (chats.WRITTEN, chats.SPOKEN):
                asked = chats.prompt(engine, "Hello", chats.picture(1), chats.noise(2), is_spoken=kind.answer.is_spoken)
                name, likeliest = f"chat {len(talks)}", replace(kind, draws=Draws.MOST_LIKELY)
                talks.append(chats.begin(engine, name, likeliest, asked, voice)[1])
            call.run_unit(build.second(1))
            while not all(talk.code for talk in talks):
                engine.advance()
        return talks

    written, spoken = answered("cuda", dtype)
    assert (written.code, spoken.code) == ("completed", "completed")
    assert spoken.samples.isfinite().all()
    assert len(spoken.samples)
    if dtype is Dtype.FLOAT32:
        assert [written.text, spoken.text] == [talk.text for talk in answered("cpu", dtype)]


def five_seconds_of_four_voices(device: torch.device, generation: Generation) -> list[Tensor]:
    """Float32; solves are shared where the device allows it."""
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        synthesizer = build_voice.synthesizer(device=device, generation=generation)
        grid = grid_on(device, BatchGrid((1, 2, 4)))
        renderer = Renderer(synthesizer, build_voice.vocoder(generation, device), grid)
        prompts = [build_voice.prompt(num_tokens, seed=num_tokens) for num_tokens in (3, 10, 30, 60)]
        states = [renderer.open(synthesizer.build_voice(prompt), NoNoise(device)) for prompt in prompts]
        pieces = []
        for second in range(5):
            tokens = range(100 * second, 100 * second + 25)
            rows = [ChunkRow(state, tokens, is_turn_end=False, is_flush=False) for state in states]
            results = [result for result in renderer.speak(rows) if isinstance(result, Tensor)]
            pieces.append(torch.stack(results).cpu())
        return [*torch.cat(pieces, dim=1)]


@pytest.mark.parametrize("generation", Generation)
def test_voices_that_share_a_solve_on_the_gpu_sound_as_each_alone_on_the_cpu(
    generation: Generation,
) -> None:
    here, there = (five_seconds_of_four_voices(torch.device(name), generation) for name in ("cpu", "cuda"))
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=5e-3)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises; waiting for one event does not."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def thinker_session(slide: SlideMode, draws: Draws) -> ThinkerSession:
    return replace(build.SESSION, session_id="a", window=BasicWindow(200, 120), slide=slide, draws=draws)


def test_a_stage_that_goes_first_is_recorded_and_launched_with_that_priority() -> None:
    cuda = torch.device("cuda")
    for precedence in Precedence:
        assert GraphRecorder.on(cuda, precedence.value).stream.priority == precedence.value
        with on_device(cuda, precedence):
            assert torch.cuda.current_stream().priority == precedence.value


def test_what_runs_beside_a_stage_is_waited_for_when_it_is_handed_over() -> None:
    cuda = torch.device("cuda")
    beside = Beside(cuda, Precedence.FIRST.value)
    with torch.inference_mode():
        before = torch.zeros(1000, device=cuda)
        torch.cuda.synchronize()
        with beside.running():
            torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # noqa: SLF001 - nothing public spins so long
            made = before + 7
        beside.hand_over([made])
        assert (made + 1).eq(8).all()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("is_recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize(("slide", "kept_in"), WAYS)
def test_the_host_never_waits_inside_a_step(
    tiny_checkpoint: Path, slide: SlideMode, kept_in: CacheDtype, *, is_recorded: bool
) -> None:
    cuda, tokenizer = torch.device("cuda"), load_tokenizer(tiny_checkpoint)
    model = load_model(open_checkpoint(tiny_checkpoint), dict.fromkeys(Section, cuda), torch.bfloat16)
    with torch.inference_mode():
        decider = Decider(model.thinker, tokenizer, CacheConfig(100, dtype=kept_in))
        talker = TalkerStage(model.talker, CacheConfig(600), chain_steps=CHAIN_STEPS if is_recorded else 1)
        recorders = (GraphRecorder.on(cuda), GraphRecorder.on(cuda))
        if is_recorded:
            record(decider.decoder, decider.chooser, recorders[0])
            assert [*talker.speaker.capture(2, recorders[1])]
        mind = decider.open(thinker_session(slide, Draws.SAMPLED), 1000)
        decider.loop.run("a", decider.prompt(mind, decider.embed((1, 2, 3)), ()), 0.0)
        speaker = talker.open(TalkerSession("a", CodecSampling(), Draws.SAMPLED, seed=0))
        num_chunks = num_slides = 0
        size = decider.embed(()).shape[1]
        for _ in range(NUM_UNITS):
            # A unit's input comes from the encoders, which are not a step.
            heard = torch.randn(11, size, device=cuda, dtype=torch.bfloat16)
            with _no_waiting():
                outcome = decider.loop.run("a", decider.decide(mind, heard, 0.0, Wish.FREE), 0.0)
                assert isinstance(outcome, UnitOutcome)
                num_slides += outcome.slide is not None
                num_chunks += spoken(talker, speaker, outcome.handoffs)
        assert num_slides
        assert num_chunks
        for recorder in recorders:
            recorder.forget()


WAITS = (
    "cudaStreamSynchronize",
    "cudaMemcpy",
    "cudaStreamWaitEvent",
    "cudaFree",
    "cudaMalloc",
)
"""Calls of the runtime that make the host wait, or other streams."""


def test_the_profiler_sees_no_call_that_waits_in_recorded_steps(tiny_checkpoint: Path) -> None:
    """The allocator is warm by then. What is read is waited for by an event of its own."""
    cuda, tokenizer = torch.device("cuda"), load_tokenizer(tiny_checkpoint)
    model = load_model(open_checkpoint(tiny_checkpoint), dict.fromkeys(Section, cuda), torch.bfloat16)
    with torch.inference_mode():
        decider, recorder = Decider(model.thinker, tokenizer, CacheConfig(100)), GraphRecorder.on(cuda)
        record(decider.decoder, decider.chooser, recorder)
        mind = decider.open(thinker_session(SlideMode.ROTATE_QUERY, Draws.SAMPLED), 1000)
        decider.loop.run("a", decider.prompt(mind, decider.embed((1, 2, 3)), ()), 0.0)
        heard = torch.randn(11, decider.embed(()).shape[1], device=cuda, dtype=torch.bfloat16)

        def units(number: int) -> None:
            for _ in range(number):
                decider.loop.run("a", decider.decide(mind, heard, 0.0, Wish.FREE), 0.0)

        units(NUM_UNITS)
        torch.cuda.synchronize()
        with torch.profiler.profile(acc_events=True) as profile:
            units(NUM_UNITS)
        calls = {event.key: event.count for event in profile.key_averages()}
        recorder.forget()
    assert calls["cudaGraphLaunch"] >= 2 * NUM_UNITS
    assert not [name for name in calls if name in WAITS]
    # The profiler itself waits, once, at its end.
    assert calls.get("cudaDeviceSynchronize", 0) <= 1


def record(decoder: PagedDecoder, chooser: TextChooser | CodecChooser, recorder: GraphRecorder) -> None:
    *_, num_left = decoder.capture(2, 1000, recorder)
    *_, num_left_draws = chooser.capture(2, recorder)
    assert (num_left, num_left_draws) == (0, 0)


@pytest.mark.parametrize(("slide", "kept_in"), WAYS)
def test_recorded_steps_decide_what_launched_ones_do(
    tiny_checkpoint: Path, slide: SlideMode, kept_in: CacheDtype
) -> None:
    cuda, tokenizer = torch.device("cuda"), load_tokenizer(tiny_checkpoint)
    model = load_model(open_checkpoint(tiny_checkpoint), dict.fromkeys(Section, cuda), torch.float32)

    def decided(*, is_recorded: bool) -> list[tuple[int, ...]]:
        decider = Decider(model.thinker, tokenizer, CacheConfig(100, dtype=kept_in))
        recorder = GraphRecorder.on(cuda)
        if is_recorded:
            record(decider.decoder, decider.chooser, recorder)
        generator = torch.Generator().manual_seed(0)
        mind = decider.open(thinker_session(slide, Draws.MOST_LIKELY), 1000)
        decider.loop.run("a", decider.prompt(mind, decider.embed((1, 2, 3)), ()), 0.0)
        units = []
        for _ in range(NUM_UNITS):
            heard = torch.randn(11, decider.embed(()).shape[1], generator=generator).to(cuda)
            outcome = decider.loop.run("a", decider.decide(mind, heard, 0.0, Wish.FREE), 0.0)
            assert isinstance(outcome, UnitOutcome)
            units.append(outcome.token_ids)
        assert (decider.num_runs.num_launched == 0) is is_recorded
        recorder.forget()
        return units

    with torch.inference_mode():
        assert decided(is_recorded=True) == decided(is_recorded=False)


def test_recorded_chains_say_on_the_gpu_what_steps_one_by_one_say_on_the_cpu(tiny_checkpoint: Path) -> None:
    """Turns of sessions together, chunks that end early among them."""
    checkpoint, num_sessions = open_checkpoint(tiny_checkpoint), 3

    def said(device: torch.device, chain_steps: int) -> list[tuple[int, ...]]:
        model = load_model(checkpoint, dict.fromkeys(Section, device), torch.float32)
        talker = TalkerStage(model.talker, CacheConfig(600), chain_steps=chain_steps)
        recorders = (GraphRecorder.on(device),) if chain_steps > 1 else ()
        for recorder in recorders:
            assert [*talker.speaker.capture(4, recorder)]
        sessions = [TalkerSession(str(n), CodecSampling(), Draws.MOST_LIKELY, seed=n) for n in range(num_sessions)]
        states = [talker.open(session) for session in sessions]
        rng, chunks = torch.Generator().manual_seed(0), []
        for unit in range(4):
            works = []
            for number, state in enumerate(states):
                hidden = torch.randn(2 + number, model.config.talker.llm_hidden_size, generator=rng)
                address = Address(str(number), 0, 0, unit)
                heard = Handoff(address, 0.0, unit, (*range(2 + number),), hidden, ends_turn=unit == 3)
                works.append((str(number), talker.speaker.speak(state, heard)))
            ends = build.run_together(talker.speaker.loop, works)
            for number in range(num_sessions):
                chunk = ends[str(number)]
                assert isinstance(chunk, CodecChunk)
                chunks.append(chunk.codec_tokens)
        assert (talker.speaker.num_runs.num_launched == 0) is (chain_steps > 1)
        for recorder in recorders:
            recorder.forget()
        return chunks

    with torch.inference_mode():
        assert said(torch.device("cuda"), CHAIN_STEPS) == said(torch.device("cpu"), 1)


def test_recorded_eyes_see_on_the_gpu_what_they_see_on_the_cpu(tiny_checkpoint: Path) -> None:
    """Items of several lengths together, more than a pass holds, and again after others."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    sides = [(60, 60), (200, 90), (90, 310)]
    images = [Image.effect_noise(own, 50).convert("RGB") for own in sides]

    def seen(device: torch.device) -> list[Tensor]:
        eyes = load_model(open_checkpoint(tiny_checkpoint), dict.fromkeys(Section, device), torch.float32).vision
        recorders = (GraphRecorder.on(device),) if device == cuda else ()
        for recorder in recorders:
            assert [*eyes.capture((1, 2), recorder)] == [1, 0]
        pictures = [cut_picture(image, eyes.config, max_slices=4) for image in images]
        embeds = [*eyes.encode(pictures), *eyes.encode(pictures[1:2])]
        assert (eyes.num_runs.num_launched == 0) is (device == cuda)
        here = [one.cpu() for one in embeds]
        for recorder in recorders:
            recorder.forget()
        return here

    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for here, there in zip(seen(cpu), seen(cuda), strict=True):
            torch.testing.assert_close(there, here, rtol=0, atol=1e-4)


def test_recorded_ears_hear_on_the_gpu_what_they_hear_on_the_cpu(tiny_checkpoint: Path) -> None:
    """Sessions that come one after the other, over a history that is full and dropped."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    num_sessions, num_seconds = 3, 33

    def heard(device: torch.device) -> list[Tensor]:
        ears = load_model(open_checkpoint(tiny_checkpoint), dict.fromkeys(Section, device), torch.float32).audio
        recorders = (GraphRecorder.on(device),) if device == cuda else ()
        for recorder in recorders:
            assert [*ears.capture((1, 2, 4), recorder)] == [2, 1, 0]
        extractor = MelExtractor(ears.config.num_mel_bins)
        streams, states = [], []
        embeds = []
        for second in range(num_seconds):
            if second < num_sessions:
                streams.append(MelStream(extractor))
                states.append(ears.new_state())
            for number, stream in enumerate(streams):
                stream.push(build.second(second + number).samples)
            chunks = [stream.take() for stream in streams]
            assert all(chunks)
            embeds.append(ears.encode_chunks([(c, s) for c, s in zip(chunks, states, strict=True) if c]).cpu())
        assert [state.num_resets for state in states] == [1, 1, 1]
        assert (ears.num_runs.num_launched == 0) is (device == cuda)
        for recorder in recorders:
            recorder.forget()
        return embeds

    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for here, there in zip(heard(cpu), heard(cuda), strict=True):
            torch.testing.assert_close(there, here, rtol=0, atol=1e-4)


def spoken(talker: TalkerStage, speaker: TalkerState, handoffs: tuple[Handoff[Tensor], ...]) -> int:
    """How many chunks the handoffs came to. Hidden states come from the host."""
    assert all(handoff.hidden.device.type == "cpu" for handoff in handoffs)
    for handoff in handoffs:
        talker.speaker.loop.run("a", talker.speaker.speak(speaker, handoff), 0.0)
    return len(handoffs)
