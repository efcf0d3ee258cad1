"""`antiphon bench`: a command for each kind of measurement. Parses flags, writes results; measuring is elsewhere.

Every command writes `NAME.json` and the report of all results into its folder. Shown by tests/bench/test_commands.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from antiphon.bench.cache_error import CachePlan, run_cache
from antiphon.bench.duplex import ProfileFlags, run_duplex, run_sweep, run_unit, unit_plans
from antiphon.bench.error import run_error
from antiphon.bench.kernel_case import Sizes
from antiphon.bench.kernels import KernelPlan, run_kernels
from antiphon.bench.load import LoadPlan
from antiphon.bench.loading import run_loading
from antiphon.bench.long_call import NUM_COMPARED_UNITS, run_long_call
from antiphon.bench.pacing import Arrival
from antiphon.bench.report import write_report
from antiphon.bench.results import BenchResult, write_result
from antiphon.bench.script import Talk, script_of
from antiphon.bench.slide import SlidePlans, run_slide
from antiphon.bench.step import StepPlan, run_step
from antiphon.bench.target import RANDOM, Target, target
from antiphon.config import Dtype
from antiphon.console import console, errors_in_one_line
from antiphon.errors import ConfigError
from antiphon.models.minicpmo.source import ModelSize, RandomWeights
from antiphon.models.minicpmo.tokens import PREVIOUS_MARKER
from antiphon.runner.device import resolve_device
from antiphon.server.for_engine import engine_config, session_config
from antiphon.server.settings import from_file, resolve

app = typer.Typer(no_args_is_help=True, help="Measure the engine and its parts; results are JSON and a report.")

Weights = Annotated[str, typer.Option(metavar="random|DIR|HF-ID", help="Of a checkpoint, or random ones.")]
Size = Annotated[ModelSize, typer.Option(help="Dimensions of random weights.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N  [default: the profile's, or cpu]")]
DtypeName = Annotated[Dtype | None, typer.Option("--dtype", help="[default: float32 on cpu, bfloat16 on cuda]")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Where results and report are written.")]
Repetitions = Annotated[int, typer.Option(min=1, help="Of everything, to see how far they are apart.")]
Numbers = Annotated[str, typer.Option(metavar="N,N,..")]
Profile = Annotated[Path | None, typer.Option(metavar="FILE", help="A server's options, as in deploy.")]
High = Annotated[int | None, typer.Option(help="Windows slide above so many tokens  [default: the profile's]")]
Low = Annotated[int | None, typer.Option(help="They slide down to so many  [default: the profile's]")]
Seconds = Annotated[int, typer.Option(min=1, help="That are measured.")]
WarmUp = Annotated[int, typer.Option(min=0, help="Seconds in real time before that.")]
Share = Annotated[float, typer.Option(min=0, max=1, help="Part of the callers that is spoken to at any time.")]
TurnUnits = Annotated[int, typer.Option(min=1, help="Units of an answer.")]
UnitWords = Annotated[int, typer.Option(min=1, help="Spoken tokens of a unit.")]
Lead = Annotated[float, typer.Option(min=0, help="Milliseconds that a listener buffers.")]
MaxLate = Annotated[float, typer.Option(min=0, help="Milliseconds after which a unit counts as late.")]
Camera = Annotated[int, typer.Option(min=0, help="Side of a picture that each caller shows every second; 0 for none.")]
VoiceS = Annotated[float, typer.Option(min=0.5, help="Seconds of the callers' voice.")]

_OUT = Path("build/bench")


def with_bench(commands: typer.Typer) -> typer.Typer:
    """The same commands and these, as `bench`."""
    commands.add_typer(app, name="bench")
    return commands


@app.command()
def kernels(
    weights: Weights = RANDOM,
    size: Size = ModelSize.FULL,
    device: Device = None,
    dtype: DtypeName = None,
    sessions: Numbers = "1,32,64",
    context: Annotated[int, typer.Option(min=2, help="Tokens of each session.")] = 6000,
    step_tokens: Annotated[int, typer.Option(min=1, help="Of a mixed step.")] = 512,
    frames: Annotated[int, typer.Option(min=2, help="Of speech that the vocoder remembers.")] = 400,
    only: Annotated[str, typer.Option(metavar="NAME,NAME,..", help="These operators  [default: all]")] = "",
    repetitions: Repetitions = 20,
    out: Out = _OUT,
) -> None:
    """Time every operator at the model's sizes, with cold caches, beside the copy of as many bytes."""
    with errors_in_one_line():
        sizes = Sizes(_some(sessions), context, step_tokens, frames)
        names = tuple(name.strip() for name in only.split(",") if name.strip())
        on = _target(weights, size, device, dtype)
        _write(out, run_kernels(on, KernelPlan(sizes, names, repetitions)))


@app.command()
def slide(
    weights: Weights = RANDOM,
    size: Size = ModelSize.FULL,
    device: Device = None,
    dtype: DtypeName = None,
    context: Numbers = "2000,4000,8000,16000,32000",
    slides: Annotated[int, typer.Option(min=1, help="Of each repetition.")] = 200,
    reprefills: Annotated[int, typer.Option(min=0, help="Times that a ring is computed again.")] = 3,
    repetitions: Repetitions = 5,
    out: Out = _OUT,
) -> None:
    """Time the removal of the oldest units, in all three ways, by the length of the context."""
    with errors_in_one_line():
        on = _target(weights, size, device, dtype)
        _write(out, run_slide(on, SlidePlans(_some(context), slides, repetitions, reprefills)))


@app.command()
def step(
    weights: Weights = RANDOM,
    size: Size = ModelSize.FULL,
    device: Device = None,
    dtype: DtypeName = None,
    profile: Profile = None,
    sessions: Numbers = "1,8,16,32,64,96",
    mixed: Annotated[str, typer.Option(metavar="N,N,..", help="Tokens of steps with new units.")] = "64,128,256,512",
    talkers: Annotated[str, typer.Option(metavar="N,N,..", help="Sessions of a talker step.")] = "1,16,48,96",
    speakers: Annotated[str, typer.Option(metavar="N,N,..", help="Sessions of a code2wav step.")] = "1,4,16,48",
    context: Annotated[int, typer.Option(min=2, help="Tokens of each session.")] = 6000,
    talker_context: Annotated[int, typer.Option(min=2, help="Codec tokens of each session.")] = 600,
    voice_s: VoiceS = 6.0,
    steps: Annotated[int, typer.Option(min=1, help="Of each repetition.")] = 20,
    graphs: Annotated[bool, typer.Option(help="Record steps as CUDA graphs, as an engine does.")] = True,
    repetitions: Repetitions = 5,
    out: Out = _OUT,
) -> None:
    """Time a step of each stage, for one session and for many, with full contexts. An empty list leaves a part out.

    Of a profile it takes what code2wav computes and remembers with, and how the thinker keeps keys and values.
    """
    with errors_in_one_line():
        served = engine_config(resolve({} if profile is None else from_file(profile)).settings)
        plan = StepPlan(
            thinker_sessions=_numbers(sessions),
            talker_sessions=_numbers(talkers),
            code2wav_sessions=_numbers(speakers),
            context_tokens=context,
            talker_tokens=talker_context,
            mixed_tokens=_numbers(mixed),
            voice_s=voice_s,
            num_steps=steps,
            num_repetitions=repetitions,
            has_graphs=graphs,
            code2wav=served.code2wav,
            kv_dtype=served.kv_dtype,
        )
        _write(out, run_step(_target(weights, size, device, dtype), plan))


@app.command()
def unit(
    weights: Weights = RANDOM,
    size: Size = ModelSize.FULL,
    device: Device = None,
    dtype: DtypeName = None,
    profile: Profile = None,
    sessions: Numbers = "1,8,16,32",
    seconds: Seconds = 30,
    warm_up: WarmUp = 5,
    turn_units: TurnUnits = 10,
    unit_words: UnitWords = 8,
    lead_ms: Lead = 300.0,
    max_late_ms: MaxLate = 200.0,
    camera: Camera = 0,
    voice_s: VoiceS = 6.0,
    high: High = None,
    low: Low = None,
    repetitions: Repetitions = 3,
    out: Out = _OUT,
) -> None:
    """Time a unit to its first PCM while everybody speaks, on a whole engine, by the number of sessions."""
    with errors_in_one_line():
        flags = ProfileFlags(profile, device, _name(dtype), high, low)
        talk = Talk(1.0, turn_units, unit_words)
        numbers = _some(sessions)
        base = LoadPlan(
            max(numbers), talk, Arrival.STAGGERED, warm_up, seconds, repetitions, lead_ms, max_late_ms, camera, voice_s
        )
        on = _served(weights, size, flags, base)
        _write(out, run_unit(on, flags, unit_plans(base, numbers), _say))


@app.command()
def duplex(
    weights: Weights = RANDOM,
    size: Size = ModelSize.FULL,
    device: Device = None,
    dtype: DtypeName = None,
    profile: Profile = None,
    sessions: Annotated[int, typer.Option(min=1, help="Callers at once.")] = 32,
    seconds: Seconds = 60,
    warm_up: WarmUp = 5,
    speaking_share: Share = 0.5,
    turn_units: TurnUnits = 5,
    unit_words: UnitWords = 8,
    arrival: Annotated[Arrival, typer.Option(help="When their units are complete.")] = Arrival.STAGGERED,
    lead_ms: Lead = 300.0,
    max_late_ms: MaxLate = 200.0,
    camera: Camera = 0,
    voice_s: VoiceS = 6.0,
    high: High = None,
    low: Low = None,
    repetitions: Repetitions = 5,
    out: Out = _OUT,
) -> None:
    """Let callers talk in real time, their windows full, and see what comes too late."""
    with errors_in_one_line():
        flags = ProfileFlags(profile, device, _name(dtype), high, low)
        talk = Talk(speaking_share, turn_units, unit_words)
        plan = LoadPlan(sessions, talk, arrival, warm_up, seconds, repetitions, lead_ms, max_late_ms, camera, voice_s)
        _write(out, run_duplex(_served(weights, size, flags, plan), flags, plan, _say))


@app.command()
def sweep(
    weights: Weights = RANDOM,
    size: Size = ModelSize.FULL,
    device: Device = None,
    dtype: DtypeName = None,
    profile: Profile = None,
    sessions: Numbers = "1,8,16,32,48,64,80,96,112,128",
    seconds: Seconds = 30,
    warm_up: WarmUp = 5,
    speaking_share: Share = 0.5,
    turn_units: TurnUnits = 5,
    unit_words: UnitWords = 8,
    arrival: Annotated[Arrival, typer.Option(help="When their units are complete.")] = Arrival.STAGGERED,
    lead_ms: Lead = 300.0,
    max_late_ms: MaxLate = 200.0,
    camera: Camera = 0,
    voice_s: VoiceS = 6.0,
    high: High = None,
    low: Low = None,
    repetitions: Repetitions = 3,
    out: Out = _OUT,
) -> None:
    """Let more and more callers talk, until a unit is late or anything else goes wrong."""
    with errors_in_one_line():
        flags = ProfileFlags(profile, device, _name(dtype), high, low)
        talk = Talk(speaking_share, turn_units, unit_words)
        numbers = sorted(_some(sessions))
        plan = LoadPlan(
            numbers[-1], talk, arrival, warm_up, seconds, repetitions, lead_ms, max_late_ms, camera, voice_s
        )
        plans = [replace(plan, num_sessions=number) for number in numbers]
        _write(out, run_sweep(_served(weights, size, flags, plan), flags, plans, _say))


@app.command()
def soak(
    weights: Weights = RANDOM,
    size: Size = ModelSize.FULL,
    device: Device = None,
    dtype: DtypeName = None,
    profile: Profile = None,
    sessions: Annotated[int, typer.Option(min=1, help="Callers at once; unpaced it is one.")] = 32,
    seconds: Seconds = 3600,
    unpaced: Annotated[bool, typer.Option("--unpaced", help="One call, unit after unit as fast as it goes.")] = False,
    warm_up: WarmUp = 5,
    speaking_share: Share = 0.5,
    turn_units: TurnUnits = 5,
    unit_words: UnitWords = 8,
    lead_ms: Lead = 300.0,
    max_late_ms: MaxLate = 200.0,
    camera: Camera = 0,
    voice_s: VoiceS = 6.0,
    high: High = None,
    low: Low = None,
    repetitions: Repetitions = 10,
    out: Out = _OUT,
) -> None:
    """As duplex, for long: do memory and times stay as they are?"""
    with errors_in_one_line():
        flags = ProfileFlags(profile, device, _name(dtype), high, low)
        talk = Talk(speaking_share, turn_units, unit_words)
        plan = LoadPlan(
            1 if unpaced else sessions,
            talk,
            Arrival.STAGGERED,
            warm_up,
            seconds,
            repetitions,
            lead_ms,
            max_late_ms,
            camera,
            voice_s,
        )
        on = _served(weights, size, flags, plan)
        result = _long_call(on, flags, plan) if unpaced else run_duplex(on, flags, plan, _say, name="soak")
        _write(out, result)


@app.command()
def error(
    weights: Weights = RANDOM,
    size: Size = ModelSize.FULL,
    device: Device = None,
    seconds: Annotated[int, typer.Option(min=1, help="Of the turn.")] = 20,
    out: Out = _OUT,
) -> None:
    """Compare the sound of a turn in every precision of code2wav with that of float32."""
    with errors_in_one_line():
        _write(out, run_error(_target(weights, size, device, Dtype.FLOAT32), seconds))


@app.command()
def cache(
    weights: Weights = RANDOM,
    size: Size = ModelSize.FULL,
    device: Device = None,
    dtype: DtypeName = None,
    context: Annotated[int, typer.Option(min=100, help="Tokens above which the window slides.")] = 2000,
    unit_tokens: Annotated[int, typer.Option(min=1, help="Fed at once.")] = 100,
    slides: Annotated[int, typer.Option(min=0, help="Of the context.")] = 20,
    out: Out = _OUT,
) -> None:
    """Compare what the thinker computes with keys and values in float8 to what it computes with its own."""
    with errors_in_one_line():
        on = _target(weights, size, device, dtype)
        _write(out, run_cache(on, CachePlan(context, unit_tokens, slides)))


@app.command()
def load(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="Written with random weights if it is not there.")],
    tokenizer: Annotated[Path, typer.Option(metavar="DIR", help="Whose tokenizer files the written one gets.")],
    size: Size = ModelSize.FULL,
    device: Device = None,
    dtype: DtypeName = None,
    out: Out = _OUT,
) -> None:
    """Time the loading of a checkpoint from its files, and see what memory it takes."""
    with errors_in_one_line():
        on = resolve_device(device or "cpu")
        config = RandomWeights(size).config()
        _write(out, run_loading(checkpoint, config, tokenizer, on, dtype or _usual_dtype(on.type)))


@app.command()
def report(out: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of results.")]) -> None:
    """Write the report of results that are there, with plots if matplotlib is."""
    with errors_in_one_line():
        _say(f"wrote {write_report(out)}")


def _long_call(on: Target, flags: ProfileFlags, plan: LoadPlan) -> BenchResult:
    """One call whose script is that of the load's first caller."""
    if plan.num_units < 2 * NUM_COMPARED_UNITS:
        raise ConfigError(f"--seconds is {plan.num_units}; the first and the last {NUM_COMPARED_UNITS} are compared")
    settings, tokenizer = flags.settings(1, plan), on.source.tokenizer()
    script = script_of(plan.talk, 0, 1, tokenizer)
    session = replace(session_config(settings, tokenizer.encode(PREVIOUS_MARKER)), script=script)
    return run_long_call(on, engine_config(settings), session, plan.num_units)


def _target(weights: str, size: ModelSize, device: str | None, dtype: Dtype | None) -> Target:
    name = device or "cpu"
    return target(weights, size, name, dtype or _usual_dtype(name))


def _served(weights: str, size: ModelSize, flags: ProfileFlags, plan: LoadPlan) -> Target:
    """What the thinker of a profile runs on; the engine has the rest from the profile."""
    settings = flags.settings(plan.num_sessions, plan)
    return target(weights, size, settings.thinker_device, settings.dtype)


def _usual_dtype(device: str) -> Dtype:
    return Dtype.FLOAT32 if device == "cpu" else Dtype.BFLOAT16


def _name(dtype: Dtype | None) -> str | None:
    return None if dtype is None else dtype.value


def _numbers(text: str) -> tuple[int, ...]:
    """By commas; none of an empty text. Raises: ConfigError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"{text!r} is no list of whole numbers above 0; give for example 1,8,32")
    return tuple(map(int, parts))


def _some(text: str) -> tuple[int, ...]:
    """The same, at least one. Raises: ConfigError."""
    numbers = _numbers(text)
    if not numbers:
        raise ConfigError("a list of numbers is empty; give for example 1,8,32")
    return numbers


def _write(folder: Path, result: BenchResult) -> None:
    _say(f"wrote {write_result(folder, result)} and {write_report(folder)}")
    for note in result.notes:
        _say(note)


def _say(line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
