"""What do the released dimensions cost? Loads random weights of that size and runs a call on them.

    python -m antiphon.bench.released_size DIR --tokenizer TOKENIZER_DIR --units 24

Writes the checkpoint to DIR if that is absent, and prints time and memory of loading and of every unit. TOKENIZER_DIR
has the tokenizer files of the released checkpoint. Random weights all but never choose to listen or to end: every unit
after the forced listens is as long as units get. Not a measure of quality, nor of more than one call.
"""

from __future__ import annotations

import math
import platform
import resource
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
import yaml
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from antiphon.bench.long_call import LOUDNESS, NUM_VOICE_TOKENS
from antiphon.config import Dtype, EngineConfig, SessionConfig, everywhere
from antiphon.core.duplex import DuplexConfig
from antiphon.core.events import UnitDecided, UnitFinished
from antiphon.engine import Engine
from antiphon.errors import ConfigError
from antiphon.models.minicpmo.checkpoint import HIFT_PREFIX, VOCODER_FOLDER, Part, WeightFile, open_checkpoint
from antiphon.models.minicpmo.flow_config import FlowConfig
from antiphon.models.minicpmo.model import ModelConfig, build_model, model_config
from antiphon.models.minicpmo.new_folder import new_folder, write_json
from antiphon.models.minicpmo.released import RELEASED, config_document, flow_document
from antiphon.models.minicpmo.tokens import load_tokenizer
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.runner.device import resolve_device
from antiphon.stages.thinker.state import UnitInput
from antiphon.units import MEL_FRAMES_PER_CODEC_TOKEN, UNIT_SAMPLES

MAX_SHARD_BYTES = 4 * 10**9
NUM_LISTENS = 4
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")

_BIAS_SPREAD = 0.02


@dataclass(frozen=True, slots=True)
class UnitCost:
    decided: UnitDecided
    finished: UnitFinished


def main(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR")],
    tokenizer: Annotated[Path, typer.Option(metavar="TOKENIZER_DIR")],
    units: Annotated[int, typer.Option(min=NUM_LISTENS + 1)] = 24,
    device: Annotated[str, typer.Option()] = "cuda",
    dtype: Annotated[Dtype, typer.Option()] = Dtype.BFLOAT16,
) -> None:
    """Write what is absent, load, run, print."""
    console = Console(highlight=False)
    torch_device = resolve_device(device)
    name = torch.cuda.get_device_name(torch_device) if torch_device.type == "cuda" else platform.machine()
    console.print(f"{name}, {dtype.value}, torch {torch.__version__}, Python {platform.python_version()}")
    if not checkpoint.exists():
        started_s = time.perf_counter()
        # In a process of its own, so that this one's memory at the peak is that of loading.
        with console.status(f"writing {checkpoint}"), ProcessPoolExecutor(1, get_context("spawn")) as writer:
            writer.submit(write_random, checkpoint, RELEASED, tokenizer, torch_device).result()
        console.print(f"written in {time.perf_counter() - started_s:.1f} s")
    opened = open_checkpoint(checkpoint)
    headers = [header for store in opened.stores.values() for header in store.headers.values()]
    num_bytes = sum(header.num_bytes for header in headers)
    console.print(f"{len(headers)} tensors, {num_bytes / 1e9:.2f} GB in {checkpoint}", soft_wrap=True)

    session = SessionConfig(duplex=DuplexConfig(num_forced_listens=NUM_LISTENS))
    started_s = time.perf_counter()
    with Engine.load(opened, EngineConfig(everywhere(device), dtype), session) as engine:
        if torch_device.type == "cuda":
            torch.cuda.synchronize(torch_device)
        seconds = f"loaded, with the caches of one call, in {time.perf_counter() - started_s:.1f} s"
        console.print(f"{seconds}: {memory(torch_device)}", soft_wrap=True)
        costs = list(run_call(engine, session, model_config(opened).flow, units))
    console.print(unit_table(costs))
    console.print(f"after {units} units: {memory(torch_device)}", soft_wrap=True)


def write_random(
    folder: Path,
    config: ModelConfig,
    tokenizer: Path,
    device: torch.device,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Make a checkpoint with random weights in the official layout; the same bytes every time on one kind of device.

    folder: appears when everything is written.
    tokenizer: folder that the tokenizer's files are copied from.
    device: that the weights are drawn on.
    Raises: ConfigError if the folder is there already or cannot be written, or the tokenizer has ids beyond the model's
    vocabulary; CheckpointError if it cannot be read.
    """
    num_ids, vocab_size = max(load_tokenizer(tokenizer).special_ids) + 1, config.thinker.vocab_size
    if num_ids > vocab_size:
        raise ConfigError(f"the tokenizer in {tokenizer} has {num_ids} ids, the model {vocab_size}; give its own")
    with new_folder(folder) as whole:
        (whole / VOCODER_FOLDER).mkdir(parents=True)
        for file in TOKENIZER_FILES:
            if (tokenizer / file).exists():
                shutil.copyfile(tokenizer / file, whole / file)
        _write_model(whole, config, torch.Generator(device).manual_seed(0), max_shard_bytes)


def run_call(engine: Engine, session: SessionConfig, flow: FlowConfig, num_units: int) -> Iterator[UnitCost]:
    """Run a call of `num_units` seconds of noise, with a random voice of the sizes of `flow`."""
    generator = torch.Generator().manual_seed(0)
    mel = torch.randn(NUM_VOICE_TOKENS * MEL_FRAMES_PER_CODEC_TOKEN, flow.num_mel_bins, generator=generator)
    speaker = torch.randn(flow.speaker_size, generator=generator)
    voice = VoicePrompt(tuple(range(NUM_VOICE_TOKENS)), mel, speaker)
    call = engine.open("released size", session, torch.empty(0), voice)
    for _ in range(num_units):
        samples = LOUDNESS * torch.randn(UNIT_SAMPLES, generator=generator)
        events = call.run_unit(UnitInput(samples, ())).events
        (decided,) = (one for one in events if isinstance(one, UnitDecided))
        (finished,) = (one for one in events if isinstance(one, UnitFinished))
        yield UnitCost(decided, finished)
    call.close()


def memory(device: torch.device) -> str:
    """Memory of this process at its peak, and what torch has of the device now and at the peak; Linux only."""
    text = f"host {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9:.2f} GB at the peak"
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        text += f", device {now / 1e9:.2f} GB, {peak / 1e9:.2f} GB at the peak"
    return text


def unit_table(costs: Sequence[UnitCost]) -> Table:
    """A line for every unit, then medians of those that listen and of those that speak.

    tokens: that the unit adds after its input. context: tokens in it afterwards.
    """
    table = Table(box=None)
    for column in ("unit", "decision", "tokens", "context", "thinker ms", "talker ms", "code2wav ms"):
        table.add_column(column, justify="right")
    for one in costs:
        table.add_row(str(one.decided.unit), *_cells([one]))
    for is_listen in (True, False):
        if alike := [one for one in costs if one.decided.is_listen is is_listen]:
            table.add_row(f"median of {len(alike)}", *_cells(alike), style="bold")
    return table


def _cells(alike: Sequence[UnitCost]) -> tuple[str, ...]:
    """Medians of units with the same decision."""
    return (
        "listen" if alike[0].decided.is_listen else "speak",
        f"{median(len(one.decided.token_ids) for one in alike):g}",
        f"{median(one.decided.num_context_tokens for one in alike):g}",
        f"{median(one.finished.thinker_ms for one in alike):.1f}",
        f"{median(one.finished.talker_ms for one in alike):.1f}",
        f"{median(one.finished.code2wav_ms for one in alike):.1f}",
    )


def _write_model(folder: Path, config: ModelConfig, generator: torch.Generator, max_shard_bytes: int) -> None:
    vocoder = folder / VOCODER_FOLDER
    write_json(folder / "config.json", config_document(config))
    (vocoder / "flow.yaml").write_text(yaml.safe_dump(flow_document(config.flow), sort_keys=False), encoding="utf-8")
    parts = build_model(config).parts()
    _write_main(folder, _shapes(parts, WeightFile.MAIN), generator, max_shard_bytes)
    for file, name, prefix in ((WeightFile.FLOW, "flow.pt", ""), (WeightFile.HIFT, "hift.pt", HIFT_PREFIX)):
        shapes = _shapes(parts, file)
        torch.save({prefix + key: _draw(key, shapes[key], torch.float32, generator) for key in shapes}, vocoder / name)


_Shapes = Mapping[str, tuple[int, ...]]
"""By the weights' names in one of the files."""


def _shapes(parts: Iterable[Part], file: WeightFile) -> _Shapes:
    return {name: shape for part in parts if part.file is file for name, shape in part.shapes().items()}


def _write_main(folder: Path, shapes: _Shapes, generator: torch.Generator, max_shard_bytes: int) -> None:
    dtype = torch.bfloat16
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards = _cut(sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weights = {name: _draw(name, shapes[name], dtype, generator) for name in names}
        save_file(weights, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def _cut(sizes_bytes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Names in order, in runs of at most `max_bytes`; a larger one is alone."""
    runs: list[list[str]] = []
    room_bytes = 0
    for name, size_bytes in sizes_bytes.items():
        if not runs or size_bytes > room_bytes:
            runs.append([])
            room_bytes = max_bytes
        runs[-1].append(name)
        room_bytes -= size_bytes
    return runs


def _draw(name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Such that activations keep their size: norms, magnitudes of weight norms and slopes of snakes are 1."""
    weight = torch.empty(shape, dtype=dtype, device=generator.device)
    is_vector = len(shape) == 1
    if name.endswith(("original0", "alpha")) or (is_vector and name.endswith("weight")):
        return weight.fill_(1).cpu()
    spread = _BIAS_SPREAD if is_vector else 1 / math.sqrt(math.prod(shape[1:]))
    return weight.normal_(0, spread, generator=generator).cpu()


if __name__ == "__main__":
    typer.run(main)
