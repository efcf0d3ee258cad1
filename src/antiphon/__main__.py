"""The command line: `antiphon run`, `serve`, `tiny`, `inspect`, `bench`. Parses and prints; the work is elsewhere."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TextIO

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from antiphon import config
from antiphon.bench.commands import with_bench
from antiphon.config import Code2WavConfig, Dtype, EngineConfig, SessionConfig, WindowLimits, WindowMode, everywhere
from antiphon.console import EXIT_BAD_INPUT, console, errors_in_one_line
from antiphon.core.cache_dtype import CacheDtype, check_slide
from antiphon.core.events import Event, SessionEnded, UnitDecided
from antiphon.core.sampling import Draws
from antiphon.core.window import SlideMode, WindowPolicy
from antiphon.engine import Call, Engine
from antiphon.errors import ConfigError
from antiphon.inspection import inspect as inspect_checkpoint
from antiphon.inspection import needs_of_engine, render, render_memory, session_memory
from antiphon.models.minicpmo.checkpoint import Checkpoint, open_checkpoint
from antiphon.models.minicpmo.hift_config import Generation
from antiphon.models.minicpmo.model import model_config
from antiphon.models.minicpmo.prompt import DEFAULT_INSTRUCTIONS, wrap
from antiphon.models.minicpmo.tiny import write_tiny
from antiphon.models.minicpmo.tokens import PREVIOUS_MARKER, load_tokenizer
from antiphon.offline import NoCamera, PictureFolder, play
from antiphon.recording import CallWriter, Channels, Recording, read_voice
from antiphon.runner.device import resolve_device
from antiphon.server.app import build_app
from antiphon.server.flags import with_flags
from antiphon.server.for_engine import engine_config, session_config
from antiphon.server.run import serve as run_server
from antiphon.server.settings import from_environment, from_file, from_flags, resolve
from antiphon.timeline import Timeline
from antiphon.units import CODEC_RATE_HZ
from antiphon.voices import VoiceBook

DEFAULT_MODEL = "openbmb/MiniCPM-o-4_5"
EXIT_CONTEXT_FULL = 3

app = with_bench(typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False))


@dataclass(frozen=True, slots=True)
class WindowFlags:
    """The window as it was asked for; None is a flag that was not given."""

    mode: WindowMode
    high: int | None
    low: int | None
    max_units: int | None
    previous_tokens: int | None
    max_tokens: int | None

    def check(self) -> None:
        """Raises: ConfigError for limits of another mode, and for contradictions that need no checkpoint to see."""
        own = {
            WindowMode.OFF: ("max_tokens",),
            WindowMode.BASIC: ("high", "low"),
            WindowMode.CONTEXT: ("max_units", "previous_tokens"),
        }
        for name, value in asdict(self).items():
            if name != "mode" and value is not None and name not in own[self.mode]:
                flag = name.replace("_", "-")
                raise ConfigError(
                    f"--{flag} is no limit of --window {self.mode.value}; leave it out or change the window"
                )
        self.policy(())

    def policy(self, marker: tuple[int, ...]) -> WindowPolicy:
        """marker: ids in front of `previous` text. Raises: ConfigError if the limits contradict each other."""
        limits = WindowLimits(
            _given(self.max_tokens, config.TRAINED_CONTEXT_TOKENS),
            _given(self.high, config.DEFAULT_HIGH_TOKENS),
            _given(self.low, config.DEFAULT_LOW_TOKENS),
            _given(self.max_units, config.DEFAULT_MAX_UNITS),
            _given(self.previous_tokens, config.DEFAULT_PREVIOUS_MAX_TOKENS),
        )
        return limits.policy(self.mode, marker)


@app.command()
def run(  # noqa: PLR0913 - one parameter per flag
    recording: Annotated[Path, typer.Argument(metavar="IN.wav", help="What the caller says: wav, flac, ogg or mp3.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.wav", help="Where the call is written.")],
    model: Annotated[str, typer.Option(metavar="DIR|HF-ID", help="Checkpoint folder or hub id.")] = DEFAULT_MODEL,
    instructions: Annotated[str, typer.Option(help="What the model is told before the call.")] = DEFAULT_INSTRUCTIONS,
    voice: Annotated[Path | None, typer.Option(metavar="REF.wav", help="The voice to speak with.")] = None,
    video: Annotated[Path | None, typer.Option(metavar="DIR", help="Pictures by name, one per second.")] = None,
    window: Annotated[WindowMode, typer.Option(help="How old units leave the context.")] = WindowMode.BASIC,
    high: Annotated[int | None, typer.Option(help="basic: slide above so many tokens  [default: 8000]")] = None,
    low: Annotated[int | None, typer.Option(help="basic: slide down to so many tokens  [default: 6000]")] = None,
    max_units: Annotated[int | None, typer.Option(help="context: units that are kept  [default: 24]")] = None,
    previous_tokens: Annotated[
        int | None, typer.Option(help="context: tokens of earlier words that are kept  [default: 500]")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="off: the call ends here  [default: 8192]")] = None,
    slide: Annotated[SlideMode, typer.Option(help="How a slide is done.")] = SlideMode.ROTATE_QUERY,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest everywhere instead of drawing.")] = False,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    mono: Annotated[bool, typer.Option("--mono", help="Write the model's voice only.")] = False,
    events: Annotated[Path | None, typer.Option(metavar="FILE.jsonl", help="Write every event with its times.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[Dtype | None, typer.Option(help="[default: float32 on cpu, bfloat16 on cuda]")] = None,
    kv_dtype: Annotated[CacheDtype, typer.Option(help="Of the thinker's keys and values.")] = CacheDtype.MODEL,
) -> None:
    """Play a recording to the model as a live call and write what it says, aligned to the recording's clock."""
    with errors_in_one_line():
        # What can be wrong without a checkpoint is found before one is loaded.
        flags = WindowFlags(window, high, low, max_units, previous_tokens, max_tokens)
        flags.check()
        check_slide(slide, kv_dtype)
        heard, camera = Recording(recording), NoCamera() if video is None else PictureFolder(video)
        code2wav = _code2wav(voice)
        torch_device = resolve_device(device)
        channels = Channels.MODEL if mono else Channels.CALLER_AND_MODEL
        with CallWriter(output, channels) as writer, _event_file(events) as log:
            checkpoint = open_checkpoint(model)
            tokenizer = load_tokenizer(checkpoint.folder)
            session = SessionConfig(
                prompt=wrap(instructions),
                window=flags.policy(tokenizer.encode(PREVIOUS_MARKER)),
                slide=slide,
                draws=Draws.MOST_LIKELY if greedy else Draws.SAMPLED,
                seed=seed,
                max_pictures=0 if video is None else 1,
                max_text_tokens=0,
            )
            engine_config = EngineConfig(
                everywhere(device), _dtype(dtype, torch_device), code2wav=code2wav, kv_dtype=kv_dtype
            )
            _announce(checkpoint, session, device, engine_config)
            with Engine.load(checkpoint, engine_config, session) as engine:
                call = _open_call(engine, checkpoint, session, voice)
                last = _follow(play(heard, camera, call, writer), heard.num_units, log)
        console.print(f"wrote {output}", highlight=False, soft_wrap=True)
    if last.code != "completed":
        raise typer.Exit(EXIT_CONTEXT_FULL)


@app.command()
@with_flags
def serve(config: Path | None, flags: Mapping[str, str | None]) -> None:
    """Serve live calls over the network. Every option is also an environment variable: ANTIPHON_ and its name."""
    with errors_in_one_line():
        file = {} if config is None else from_file(config)
        environment = from_environment(os.environ)  # noqa: TID251 - the one place where it is read
        resolved = resolve(from_flags(flags), environment, file)
        run_server(resolved, build_app, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))


@app.command()
def tiny(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is not there yet.")],
    vocoder: Annotated[
        Generation, typer.Option(help="Of which minicpmo-utils vocoder and flow shall be.")
    ] = Generation.V1_0_5,
) -> None:
    """Write the tiny checkpoint: every part of the real one with random weights. Its speech is noise."""
    with errors_in_one_line():
        write_tiny(folder, vocoder)
        console.print(f"wrote {folder}: random weights in the official layout; what it says is noise", soft_wrap=True)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="DIR|HF-ID", help="Checkpoint folder or hub id.")],
    memory: Annotated[bool, typer.Option(help="Also say what voices and sessions take.")] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also say what a server with these options takes when full.")
    ] = None,
) -> None:
    """Say what a checkpoint holds, what is missing or unexpected, and the memory it needs."""
    with errors_in_one_line():
        checkpoint = open_checkpoint(model)
        inspection = inspect_checkpoint(checkpoint)
        render(inspection, console)
        if memory:
            render_memory(session_memory(checkpoint), console)
        if config is not None:
            settings = resolve(from_file(config)).settings
            engine, session = engine_config(settings), session_config(settings, ())
            render_memory(needs_of_engine(model_config(checkpoint), engine, session), console)
    if not inspection.is_complete:
        raise typer.Exit(EXIT_BAD_INPUT)


def main() -> None:
    app()


def _follow(happened: Iterator[Event], num_units: int, log: TextIO | None) -> SessionEnded:
    """Show and log events until the call is over, with a bar that fills as it goes."""
    timeline = Timeline(console)
    started_s = time.perf_counter()
    columns = (TextColumn("{task.completed:.0f} of {task.total:.0f} s"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("call", total=num_units)
        for event in happened:
            timeline.show(event)
            if log is not None:
                log.write(json.dumps({"type": _type_name(event)} | asdict(event)) + "\n")
            if isinstance(event, UnitDecided):
                progress.advance(task)
    timeline.summarise(time.perf_counter() - started_s)
    assert isinstance(event, SessionEnded), f"the last event is {event}"
    return event


def _type_name(event: Event) -> str:
    """`UnitDecided` → `unit_decided`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()


@contextmanager
def _event_file(path: Path | None) -> Iterator[TextIO | None]:
    """A file that appears under its name when all of it is there, or none."""
    if path is None:
        yield None
        return
    part = path.with_name(f".{path.name}.part")
    try:
        file = part.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    try:
        with file:
            yield file
    except BaseException:
        part.unlink()
        raise
    part.replace(path)


def _announce(checkpoint: Checkpoint, session: SessionConfig, device: str, engine: EngineConfig) -> None:
    kept_in = "" if engine.kv_dtype is CacheDtype.MODEL else f", keys and values in {engine.kv_dtype.value}"
    line = f"antiphon: {checkpoint.folder.name} on {device}, {engine.dtype.value}{kept_in}"
    console.print(line, highlight=False, soft_wrap=True)
    console.print(f"window {session.window}, slide {session.slide.value}", highlight=False, soft_wrap=True)
    if checkpoint.is_tiny:
        console.print("THE TINY CHECKPOINT HAS RANDOM WEIGHTS: WHAT IT SAYS IS NOISE", style="bold red")
        torch.set_num_threads(1)  # its tensors are so small that sharing one costs more than it saves


def _open_call(engine: Engine, checkpoint: Checkpoint, session: SessionConfig, reference: Path | None) -> Call:
    """reference: a recording of the voice, for the prompt and for the vocoder."""
    book = VoiceBook(checkpoint)
    voice = book.default() if reference is None else book.read(reference)
    return engine.open("run", session, torch.from_numpy(voice.reference), voice.prompt)


def _code2wav(reference: Path | None) -> Code2WavConfig:
    """With room for the voice, whatever its length. Raises: AudioError if it cannot be read."""
    if reference is None:
        return Code2WavConfig()
    samples, rate_hz = read_voice(reference)
    # The last codec token may stand for a part of one.
    return Code2WavConfig(voice_s=samples.shape[1] / rate_hz + 1 / CODEC_RATE_HZ)


def _dtype(asked: Dtype | None, device: torch.device) -> Dtype:
    if asked is not None:
        return asked
    return Dtype.FLOAT32 if device.type == "cpu" else Dtype.BFLOAT16


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


if __name__ == "__main__":
    main()
