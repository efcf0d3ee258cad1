"""What a checkpoint holds, whether the code can use all of it, and the memory it needs. Loads nothing.

`inspect` gives data, `render` shows it. Shown by tests/models/test_checkpoint.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from antiphon.config import DEFAULT_HIGH_TOKENS, Dtype, EngineConfig, SessionConfig, everywhere
from antiphon.core.cache_dtype import CacheDtype
from antiphon.models.minicpmo.checkpoint import Checkpoint, Fit, Part, fit, shortened
from antiphon.models.minicpmo.config import DecoderConfig
from antiphon.models.minicpmo.flow import NUM_FLOW_STEPS
from antiphon.models.minicpmo.flow_cache import FlowShape
from antiphon.models.minicpmo.flow_membership import Retention, max_speech_frames
from antiphon.models.minicpmo.model import ModelConfig, build_model, model_config
from antiphon.models.minicpmo.speech_arena import ArenaSize
from antiphon.runner.device import DTYPES
from antiphon.stages.paged import CacheConfig
from antiphon.stages.talker.stage import turn_cache
from antiphon.stages.thinker.senses import num_input_tokens
from antiphon.stages.thinker.stage import NUM_SEGMENTS
from antiphon.units import CODEC_RATE_HZ, MEL_FRAME_RATE_HZ

VOICE_S = 6
"""A usual length of a voice, to compare by."""


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
    """Memory besides the weights. per: of what there is one. is_on_host: not the device's."""

    name: str
    per: str
    num_bytes: int
    is_on_host: bool = False


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


def session_memory(checkpoint: Checkpoint, dtype: torch.dtype = torch.bfloat16) -> tuple[CacheNeed, ...]:
    """What voices and sessions take besides the weights. dtype: that the model will have.

    Raises: CheckpointError if the configuration is not one that the code implements.
    """
    return needs_of_sessions(model_config(checkpoint), dtype)


def needs_of_sessions(config: ModelConfig, dtype: torch.dtype) -> tuple[CacheNeed, ...]:
    """The same from the dimensions: sessions as in `SessionConfig`, prompts and prompt limits as in `EngineConfig`."""
    shape, session, engine = (
        FlowShape(config.flow, NUM_FLOW_STEPS),
        SessionConfig(),
        EngineConfig(everywhere("cpu"), Dtype.BFLOAT16),
    )
    peak_tokens = session.window.peak_tokens(engine.max_prompt_tokens, _unit_tokens(config, session))
    context = CacheConfig.for_tokens(peak_tokens, NUM_SEGMENTS)
    turn = turn_cache(config.talker.max_position_tokens)
    inputs_bytes = config.thinker.decoder.hidden_size * dtype.itemsize
    scaled = CacheDtype.FLOAT8_E4M3
    scaled_bytes = _cache_bytes(config.thinker.decoder, replace(context, dtype=scaled), dtype)
    needs = [
        CacheNeed("thinker KV", "session", _cache_bytes(config.thinker.decoder, context, dtype)),
        CacheNeed(f"thinker KV, {scaled.value}", "session", scaled_bytes),
        CacheNeed("kept inputs", "session that may change", peak_tokens * inputs_bytes, is_on_host=True),
        CacheNeed("audio encoder KV", "session", _audio_bytes(config, dtype)),
        CacheNeed("flow", "listening session", 0),
        CacheNeed("talker KV", "speaking session", _cache_bytes(config.talker.decoder, turn, dtype)),
    ]
    for stored in (torch.float32, torch.bfloat16):
        name = _name(stored)
        second = shape.voice_bytes(CODEC_RATE_HZ, stored) - shape.voice_bytes(0, stored)
        six = shape.voice_bytes(round(VOICE_S * CODEC_RATE_HZ), stored)
        needs += [CacheNeed(f"voice, {name}", "second", second), CacheNeed(f"voice, {name}", f"{VOICE_S} s", six)]
        for retention in Retention:
            frames = max_speech_frames(retention, round(VOICE_S * MEL_FRAME_RATE_HZ))
            spoken = ArenaSize(max_speaking=1, max_frames=frames, max_windows=0).num_bytes(shape, stored)
            per = f"speaking session, voice of {VOICE_S} s"
            needs.append(CacheNeed(f"flow, {retention.value}, {name}", per, spoken))
        window = ArenaSize(max_speaking=0, max_frames=0, max_windows=1).num_bytes(shape, stored)
        needs.append(CacheNeed(f"flow, {name}", "session in one solve", window))
    return tuple(needs)


def needs_of_engine(config: ModelConfig, engine: EngineConfig, session: SessionConfig) -> tuple[CacheNeed, ...]:
    """What an engine takes when it is full: what is allocated at start, and what its sessions come to hold.

    session: whose need it is made for. Not in it: what steps compute with, recorded steps, and the device's own.
    """
    dtype, shape = DTYPES[engine.dtype], FlowShape(config.flow, NUM_FLOW_STEPS)
    window_tokens = session.window.peak_tokens(engine.max_prompt_tokens, _unit_tokens(config, session))
    context = CacheConfig.for_tokens(window_tokens, NUM_SEGMENTS)
    turn = turn_cache(config.talker.max_position_tokens)
    voice_frames = math.ceil(engine.code2wav.voice_s * MEL_FRAME_RATE_HZ)
    retention, grid = engine.code2wav.retention, engine.code2wav.grid
    arena = ArenaSize.for_turns(retention, voice_frames, engine.max_speaking, grid.largest)
    weights = sum(
        torch.Size(size).numel() * part.dtype(dtype).itemsize
        for part in build_model(config).parts()
        for size in part.shapes().values()
    )
    inputs_bytes = window_tokens * config.thinker.decoder.hidden_size * dtype.itemsize
    kept_bytes = engine.max_calls * inputs_bytes * session.keeps_inputs
    calls, speaking = f"{engine.max_calls} calls", f"{engine.max_speaking} speaking sessions"
    thinker_bytes = _cache_bytes(config.thinker.decoder, replace(context, dtype=engine.kv_dtype), dtype)
    talker_bytes = _cache_bytes(config.talker.decoder, turn, dtype)
    return (
        CacheNeed("weights", "engine", weights),
        CacheNeed("thinker KV", calls, engine.max_calls * thinker_bytes),
        CacheNeed("kept inputs", calls, kept_bytes, is_on_host=True),
        CacheNeed("audio encoder KV", calls, engine.max_calls * _audio_bytes(config, dtype)),
        CacheNeed("talker KV", speaking, engine.max_speaking * talker_bytes),
        CacheNeed("flow", speaking, arena.num_bytes(shape, DTYPES[engine.code2wav.dtype])),
        CacheNeed("stored voices", "engine", engine.max_stored_voice_bytes),
    )


def render_memory(needs: Iterable[CacheNeed], console: Console) -> None:
    console.print(_rows("memory of voices and sessions", map(_row, needs)))


def _row(need: CacheNeed) -> tuple[str, str, str]:
    where = ", on the host" if need.is_on_host else ""
    return need.name + where, f"per {need.per}", _size(need.num_bytes)


def render(inspection: Inspection, console: Console) -> None:
    """Print everything; what is wrong comes last."""
    dtype = _name(inspection.dtype)
    console.print(inspection.folder, style="bold", highlight=False, soft_wrap=True)
    if inspection.is_tiny:
        console.print("THE TINY CHECKPOINT HAS RANDOM WEIGHTS: WHAT IT SAYS IS NOISE", style="bold red")
    console.print(_parts_table(inspection.parts, dtype))
    console.print(_rows("decided by the files", ((one.about, one.outcome) for one in inspection.decisions)))
    console.print(_rows(f"memory besides the weights, {dtype}", map(_row, inspection.caches)))
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
    thinker, talker, session = config.thinker.decoder, config.talker.decoder, SessionConfig()
    talker_tokens, positions = config.talker.max_position_tokens, config.audio.max_positions
    unit_tokens = _unit_tokens(config, session)
    window = f"session of {DEFAULT_HIGH_TOKENS} + {unit_tokens} tokens"
    return (
        CacheNeed("thinker KV", "token", _kv_bytes(thinker, 1, dtype)),
        CacheNeed("thinker KV", window, _kv_bytes(thinker, DEFAULT_HIGH_TOKENS + unit_tokens, dtype)),
        CacheNeed("talker KV", f"turn of {talker_tokens} positions", _kv_bytes(talker, talker_tokens, dtype)),
        CacheNeed("audio encoder KV", f"session of {positions} positions", _audio_bytes(config, dtype)),
    )


def _unit_tokens(config: ModelConfig, session: SessionConfig) -> int:
    """The most that a second of such a session may have."""
    return (
        num_input_tokens(config.vision, config.audio, session.max_pictures, session.max_slices, session.max_text_tokens)
        + session.duplex.max_output_tokens
    )


def _kv_bytes(decoder: DecoderConfig, num_tokens: int, dtype: torch.dtype) -> int:
    return _cache_bytes(decoder, CacheConfig(num_tokens, block_size=1), dtype)


def _cache_bytes(decoder: DecoderConfig, cache: CacheConfig, dtype: torch.dtype) -> int:
    return cache.make(decoder, dtype, torch.device("meta")).num_bytes


def _audio_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    audio = config.audio
    return 2 * audio.num_layers * audio.hidden_size * audio.max_positions * dtype.itemsize


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(num_bytes: int) -> str:
    """With three digits, in binary units."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1000:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"
