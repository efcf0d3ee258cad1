"""Does a call stay bounded? Runs one of any length and compares its first and last hundred units.

    python -m antiphon.bench.long_call DIR --units 3600

Prints time per unit, KV blocks and host memory for both ends and for the worst unit. The input is noise and silence by
turns from a fixed seed.
"""

from __future__ import annotations

import platform
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, quantiles
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from antiphon.config import DEFAULT_HIGH_TOKENS, DEFAULT_LOW_TOKENS, Dtype, EngineConfig, SessionConfig, everywhere
from antiphon.core.events import UnitDecided, UnitFinished, WindowSlid
from antiphon.core.window import BasicWindow, SlideMode
from antiphon.engine import Engine
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.runner.device import resolve_device
from antiphon.stages.thinker.state import UnitInput
from antiphon.units import MEL_FRAMES_PER_CODEC_TOKEN, UNIT_SAMPLES

NUM_COMPARED_UNITS = 100
NUM_VOICE_TOKENS = 75
LOUDNESS = 0.05


@dataclass(frozen=True, slots=True)
class UnitCost:
    """unit_ms: computing. num_blocks: held by the session after it. host_bytes: resident memory of the process."""

    unit_ms: float
    num_blocks: int
    num_context_tokens: int
    host_bytes: int
    num_slides: int


def measure(engine: Engine, session: SessionConfig, num_units: int) -> Iterator[UnitCost]:
    """Run a call of `num_units` seconds."""
    num_frames = NUM_VOICE_TOKENS * MEL_FRAMES_PER_CODEC_TOKEN
    generator = torch.Generator().manual_seed(0)
    mel = torch.randn(num_frames, engine.model.flow.num_mel_bins, generator=generator)
    voice = VoicePrompt(tuple(range(NUM_VOICE_TOKENS)), mel, torch.randn(192, generator=generator))
    call = engine.open("long", session, torch.empty(0), voice)
    for unit in range(num_units):
        is_loud = unit // 3 % 2
        samples = LOUDNESS * is_loud * torch.randn(UNIT_SAMPLES, generator=generator)
        events = call.run_unit(UnitInput(samples, ())).events
        decided = next(event for event in events if isinstance(event, UnitDecided))
        finished = next(event for event in events if isinstance(event, UnitFinished))
        yield UnitCost(
            unit_ms=finished.thinker_ms + finished.talker_ms + finished.code2wav_ms,
            num_blocks=decided.num_context_blocks,
            num_context_tokens=decided.num_context_tokens,
            host_bytes=resident_bytes(),
            num_slides=sum(isinstance(event, WindowSlid) for event in events),
        )
    call.close()


def resident_bytes() -> int:
    """Memory of this process that is in RAM; Linux only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR")],
    units: Annotated[int, typer.Option(min=2 * NUM_COMPARED_UNITS)] = 3600,
    high: Annotated[int, typer.Option()] = DEFAULT_HIGH_TOKENS,
    low: Annotated[int, typer.Option()] = DEFAULT_LOW_TOKENS,
    slide: Annotated[SlideMode, typer.Option()] = SlideMode.ROTATE_QUERY,
    device: Annotated[str, typer.Option()] = "cpu",
) -> None:
    """Run the call and print the comparison."""
    console = Console()
    session = SessionConfig(window=BasicWindow(high, low), slide=slide)
    opened = open_checkpoint(checkpoint)
    if opened.is_tiny:
        torch.set_num_threads(1)  # its tensors are so small that sharing one costs more than it saves
    dtype = Dtype.FLOAT32 if resolve_device(device).type == "cpu" else Dtype.BFLOAT16
    with Engine.load(opened, EngineConfig(everywhere(device), dtype), session) as engine:
        costs = list(track(measure(engine, session, units), total=units, console=console, transient=True))
    table = Table(title=f"{units} units, basic {high}/{low}, {slide.value}, {device}, torch {torch.__version__}")
    for column in ("units", "ms mean", "ms p95", "ms max", "context tokens", "KV blocks", "resident MB"):
        table.add_column(column, justify="right")
    ends = {
        f"0 to {NUM_COMPARED_UNITS - 1}": costs[:NUM_COMPARED_UNITS],
        f"{units - NUM_COMPARED_UNITS} to {units - 1}": costs[-NUM_COMPARED_UNITS:],
        "all": costs,
    }
    for name, part in ends.items():
        times = [cost.unit_ms for cost in part]
        table.add_row(
            name,
            f"{mean(times):.1f}",
            f"{quantiles(times, n=20, method='inclusive')[18]:.1f}",
            f"{max(times):.1f}",
            f"{max(cost.num_context_tokens for cost in part)}",
            f"{max(cost.num_blocks for cost in part)}",
            f"{part[-1].host_bytes / 1e6:.0f}",
        )
    console.print(table)
    console.print(
        f"{sum(cost.num_slides for cost in costs)} slides; {platform.machine()}, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    typer.run(main)
