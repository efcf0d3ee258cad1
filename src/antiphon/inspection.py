"""What a checkpoint holds, whether the code can use all of it, and the memory it needs. Loads nothing.

`inspect` gives data, `render` shows it. Shown by tests/models/test_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from antiphon.config import DEFAULT_HIGH_TOKENS, SessionConfig
from antiphon.models.minicpmo.checkpoint import Checkpoint, Fit, Part, fit, shortened
from antiphon.models.minicpmo.model import ModelConfig, build_model, model_config
from antiphon.stages.thinker.senses import num_input_tokens


@dataclass(frozen=True, slots=True)
class PartReport:
    """A network's tensors as they are in the files. num_loaded_bytes: what they take on the device."""

    name: str
    num_tensors: int
    num_parameters: int
    num_bytes: int
    num_loaded_bytes: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that the files decide, not config.json alone."""

    about: str
    outcome: str


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """Memory besides the weights. per: of what there is one."""

    name: str
    per: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """parts: the networks in order, then what no network reads, if there is any. dtype: of the model on the device."""

    folder: str
    is_tiny: bool
    dtype: torch.dtype
    parts: tuple[PartReport, ...]
    fit: Fit
    decisions: tuple[Decision, ...]
    caches: tuple[CacheNeed, ...]

    @property
    def is_complete(self) -> bool:
        """The checkpoint can be loaded."""
        return self.fit.is_exact


def inspect(checkpoint: Checkpoint, dtype: torch.dtype = torch.bfloat16) -> Inspection:
    """dtype: that the model will have.

    Raises: CheckpointError if the configuration is not one that the code implements.
    """
    config = model_config(checkpoint)
    parts = build_model(config).parts()
    reports = [_report(part, checkpoint, dtype) for part in parts]
    return Inspection(
        folder=str(checkpoint.folder),
        is_tiny=checkpoint.is_tiny,
        dtype=dtype,
        parts=(*reports, *_unread(checkpoint, reports)),
        fit=fit(parts, checkpoint.stores),
        decisions=_decisions(checkpoint, config),
        caches=_caches(config, dtype),
    )


def render(inspection: Inspection, console: Console) -> None:
    """Print everything; what is wrong comes last."""
    dtype = str(inspection.dtype).removeprefix("torch.")
    console.print(inspection.folder, style="bold", highlight=False, soft_wrap=True)
    if inspection.is_tiny:
        console.print("THE TINY CHECKPOINT HAS RANDOM WEIGHTS: WHAT IT SAYS IS NOISE", style="bold red")
    console.print(_parts_table(inspection.parts, dtype))
    console.print(_rows("decided by the files", ((one.about, one.outcome) for one in inspection.decisions)))
    caches = ((one.name, f"per {one.per}", _size(one.num_bytes)) for one in inspection.caches)
    console.print(_rows(f"memory besides the weights, {dtype}", caches))
    found = inspection.fit
    for what, names in (("missing", found.missing), ("unexpected", found.unexpected), ("wrong shape", found.misshaped)):
        if names:
            line = f"{what}, {len(names)} tensors: {shortened(names)}"
            console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    if inspection.is_complete:
        console.print("complete: every tensor is accounted for", style="green")


def _report(part: Part, checkpoint: Checkpoint, dtype: torch.dtype) -> PartReport:
    found = checkpoint.stores[part.file].headers
    headers = [found[name] for name in part.shapes() if name in found]
    num_parameters = sum(header.num_parameters for header in headers)
    return PartReport(
        name=part.name,
        num_tensors=len(headers),
        num_parameters=num_parameters,
        num_bytes=sum(header.num_bytes for header in headers),
        num_loaded_bytes=num_parameters * part.dtype(dtype).itemsize,
    )


def _unread(checkpoint: Checkpoint, reports: Iterable[PartReport]) -> tuple[PartReport, ...]:
    """Whatever the files hold beyond the networks' tensors."""
    headers = [header for store in checkpoint.stores.values() for header in store.headers.values()]
    reports = tuple(reports)
    rest = PartReport(
        name="not read",
        num_tensors=len(headers) - sum(report.num_tensors for report in reports),
        num_parameters=sum(h.num_parameters for h in headers) - sum(report.num_parameters for report in reports),
        num_bytes=sum(h.num_bytes for h in headers) - sum(report.num_bytes for report in reports),
        num_loaded_bytes=0,
    )
    return (rest,) if rest.num_tensors else ()


def _decisions(checkpoint: Checkpoint, config: ModelConfig) -> tuple[Decision, ...]:
    num_layers, num_kept = config.vision.num_layers, config.num_vision_layers
    layers = f"all {num_layers}" if num_kept == num_layers else f"{num_kept} of {num_layers}, the last is not there"
    absent = ", ".join(checkpoint.missing_voice_models)
    return (
        Decision("vision layers", layers),
        Decision("vocoder", f"minicpmo-utils {config.hift.generation.value}"),
        Decision("voice models", f"{absent} absent: only voices given as numbers" if absent else "present"),
        Decision("sliding_window", "null" if "sliding_window" in checkpoint.config else "not in config.json"),
    )


def _caches(config: ModelConfig, dtype: torch.dtype) -> tuple[CacheNeed, ...]:
    def kv_bytes(num_layers: int, width: int) -> int:
        return 2 * num_layers * width * dtype.itemsize

    thinker, talker, audio = config.thinker.decoder, config.talker.decoder, config.audio
    per_token = kv_bytes(thinker.num_layers, thinker.num_kv_heads * thinker.head_dim)
    per_talker_token = kv_bytes(talker.num_layers, talker.num_kv_heads * talker.head_dim)
    talker_tokens, positions = config.talker.max_position_tokens, audio.max_positions
    per_position = kv_bytes(audio.num_layers, audio.hidden_size)
    session = SessionConfig()
    unit_tokens = (
        num_input_tokens(config.vision, audio, session.max_pictures, session.max_slices, session.max_text_tokens)
        + session.duplex.max_output_tokens
    )
    window = f"session of {DEFAULT_HIGH_TOKENS} + {unit_tokens} tokens"
    return (
        CacheNeed("thinker KV", "token", per_token),
        CacheNeed("thinker KV", window, per_token * (DEFAULT_HIGH_TOKENS + unit_tokens)),
        CacheNeed("talker KV", f"turn of {talker_tokens} positions", per_talker_token * talker_tokens),
        CacheNeed("audio encoder KV", f"session of {positions} positions", per_position * positions),
    )


def _parts_table(parts: Iterable[PartReport], dtype: str) -> Table:
    table = Table("part", box=None)
    for heading in ("tensors", "parameters", "in the files", f"loaded as {dtype}"):
        table.add_column(heading, justify="right")
    parts = tuple(parts)
    total = PartReport(
        name="all",
        num_tensors=sum(part.num_tensors for part in parts),
        num_parameters=sum(part.num_parameters for part in parts),
        num_bytes=sum(part.num_bytes for part in parts),
        num_loaded_bytes=sum(part.num_loaded_bytes for part in parts),
    )
    for part in (*parts, total):
        table.add_row(
            part.name,
            str(part.num_tensors),
            f"{part.num_parameters / 1e6:,.2f} M",
            _size(part.num_bytes),
            _size(part.num_loaded_bytes),
        )
    return table


def _rows(title: str, rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def _size(num_bytes: int) -> str:
    """With three digits, in binary units."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1000:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"
