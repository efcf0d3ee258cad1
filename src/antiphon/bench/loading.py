"""`antiphon bench load`: what it takes to load a checkpoint of the released size.

Writes one of random weights in the official layout if it is not there. Not needed by the other measurements, which draw
their weights on the device. Shown by tests/bench/test_loading.py.
"""

from __future__ import annotations

import math
import resource
import shutil
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from antiphon.bench.environment import environment
from antiphon.bench.results import BenchResult, Count, Figure, Quantity, Unit
from antiphon.config import Dtype
from antiphon.errors import ConfigError
from antiphon.models.minicpmo.checkpoint import HIFT_PREFIX, VOCODER_FOLDER, Part, WeightFile, open_checkpoint
from antiphon.models.minicpmo.model import ModelConfig, Section, build_model, load_model
from antiphon.models.minicpmo.new_folder import new_folder, write_json
from antiphon.models.minicpmo.random_weights import drawn_weight
from antiphon.models.minicpmo.released import config_document, flow_document
from antiphon.models.minicpmo.tokens import load_tokenizer
from antiphon.runner.device import DTYPES

MAX_SHARD_BYTES = 4 * 10**9
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")


def run_loading(folder: Path, config: ModelConfig, tokenizer: Path, device: torch.device, dtype: Dtype) -> BenchResult:
    """Load all networks of a checkpoint.

    config, tokenizer: of the one that is written if none is there, as of `write_random`.
    Raises: CheckpointError, ConfigError.
    """
    if not folder.exists():
        # In a process of its own, so that this one's memory at the peak is that of loading.
        with ProcessPoolExecutor(1, get_context("spawn")) as writer:
            writer.submit(write_random, folder, config, tokenizer, device).result()
    opened = open_checkpoint(folder)
    headers = [header for store in opened.stores.values() for header in store.headers.values()]
    num_bytes = sum(header.num_bytes for header in headers)
    started_s = time.perf_counter()
    model = load_model(opened, dict.fromkeys(Section, device), DTYPES[dtype])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took_s = time.perf_counter() - started_s
    size = ("tensors", len(headers))
    counts = [
        Count("in the files", "checkpoint", *size, num_bytes / 1e9, "GB"),
        Count("parameters", "checkpoint", *size, sum(header.num_parameters for header in headers) / 1e6, "M"),
        Count("host memory at the peak, mapped files included", "checkpoint", *size, _peak_host_bytes() / 1e9, "GB"),
    ]
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        counts.append(Count("device memory after loading", "checkpoint", *size, now / 1e9, "GB"))
        counts.append(Count("device memory at the peak", "checkpoint", *size, peak / 1e9, "GB"))
    del model
    return BenchResult(
        name="load",
        environment=environment(f"checkpoint {folder.name}", device, dtype.value),
        figures=(Figure.of(Quantity.LOADING, "all networks", size, Unit.S, [[took_s]]),),
        counts=tuple(counts),
        notes=("One value: later ones find the files in the system's cache, as the first one does after writing.",),
    )


def _peak_host_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
        _write_model(whole, config, device, max_shard_bytes)


def _write_model(folder: Path, config: ModelConfig, device: torch.device, max_shard_bytes: int) -> None:
    vocoder = folder / VOCODER_FOLDER
    write_json(folder / "config.json", config_document(config))
    (vocoder / "flow.yaml").write_text(yaml.safe_dump(flow_document(config.flow), sort_keys=False), encoding="utf-8")
    parts = build_model(config).parts()
    _write_main(folder, _shapes(parts, WeightFile.MAIN), device, max_shard_bytes)
    for file, name, prefix in ((WeightFile.FLOW, "flow.pt", ""), (WeightFile.HIFT, "hift.pt", HIFT_PREFIX)):
        shapes = _shapes(parts, file)
        torch.save(
            {prefix + key: drawn_weight(key, shapes[key], torch.float32, device).cpu() for key in shapes},
            vocoder / name,
        )


_Shapes = Mapping[str, tuple[int, ...]]
"""By the weights' names in one of the files."""


def _shapes(parts: Iterable[Part], file: WeightFile) -> _Shapes:
    return {name: shape for part in parts if part.file is file for name, shape in part.shapes().items()}


def _write_main(folder: Path, shapes: _Shapes, device: torch.device, max_shard_bytes: int) -> None:
    dtype = torch.bfloat16
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards = _cut(sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weights = {name: drawn_weight(name, shapes[name], dtype, device).cpu() for name in names}
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
