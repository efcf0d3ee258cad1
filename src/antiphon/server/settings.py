"""What the operator of a server decides: every option with its limits, and how files, environment and flags set it.

All sources give text, so that one set of rules reads them all; flags win over the environment, that over the file.
`resolve` gives settings with nothing left open. What an engine makes of them: `for_engine.py`.
Shown by tests/server/test_settings.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, TypeVar

import yaml
from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from antiphon.config import (
    DEFAULT_HIGH_TOKENS,
    DEFAULT_LOW_TOKENS,
    DEFAULT_MAX_UNITS,
    DEFAULT_PREVIOUS_MAX_TOKENS,
    TRAINED_CONTEXT_TOKENS,
    Code2WavConfig,
    Dtype,
    Placement,
    WindowMode,
)
from antiphon.core.batch_grid import BatchGrid, LengthGrid
from antiphon.core.cache_dtype import CacheDtype, check_slide
from antiphon.core.window import SlideMode
from antiphon.errors import ConfigError
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.flow_membership import Retention

ENVIRONMENT_PREFIX = "ANTIPHON_"
MIB = 2**20
_CODE2WAV = Code2WavConfig()


class LogLevel(Enum):
    DEBUG = "debug"
    """Also what callers and model say, and how it came to errors. Never for other people's calls."""
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(Enum):
    TEXT = "text"
    JSON = "json"


def _none_if_empty(text: str) -> str | None:
    return text or None


def _split_by_commas(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


GridT = TypeVar("GridT", BatchGrid, LengthGrid)


def _grid_of(kind: Callable[[tuple[int, ...]], GridT]) -> Callable[[str], GridT]:
    def read(text: str) -> GridT:
        parts = _split_by_commas(text)
        if not all(part.isascii() and part.isdigit() for part in parts):
            raise PydanticCustomError("grid", "give whole numbers, by commas")
        try:
            return kind(tuple(map(int, parts)))
        except ConfigError as error:
            raise PydanticCustomError("grid", "{why}", {"why": str(error)}) from error

    return read


OptionalFile = Annotated[Path | None, BeforeValidator(_none_if_empty)]
"""Empty text is no file, so that a source can take back what one below it says."""
Names = Annotated[tuple[str, ...], BeforeValidator(_split_by_commas)]
Grid = Annotated[BatchGrid, BeforeValidator(_grid_of(BatchGrid))]
Lengths = Annotated[LengthGrid, BeforeValidator(_grid_of(LengthGrid))]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
Count = Annotated[int, Ge(1)]
Size = Annotated[int, Ge(0)]
Seconds = Annotated[float, Gt(0), Le(86_400)]


def _dtype_of(settings: dict[str, str]) -> Dtype:
    return Dtype.FLOAT32 if settings["thinker_device"] == "cpu" else Dtype.BFLOAT16


def _all_calls(settings: dict[str, int]) -> int:
    return settings["max_calls"]


class ServerSettings(BaseModel):
    """Every option of `antiphon serve`. The order is that of the documentation."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str = Field("openbmb/MiniCPM-o-4_5", description="Checkpoint folder or hub id.")
    thinker_device: Device = Field("cpu", description="Where the thinker computes: cpu, cuda or cuda:N.")
    talker_device: Device = Field("cpu", description="The same for the talker.")
    code2wav_device: Device = Field("cpu", description="The same for flow and vocoder.")
    thinker_placement: Placement = Field(Placement.THREAD, description="Where the thinker runs.")
    talker_placement: Placement = Field(Placement.THREAD, description="The same for the talker.")
    code2wav_placement: Placement = Field(Placement.THREAD, description="The same for flow and vocoder.")
    dtype: Dtype = Field(
        default_factory=_dtype_of,
        description="Of thinker and talker. Default: float32 if `thinker_device` is the CPU, else bfloat16.",
    )
    kv_dtype: CacheDtype = Field(
        CacheDtype.MODEL,
        description="Of the thinker's keys and values: as it computes them, or a byte each: docs/kv_cache.md.",
    )
    max_calls: Count = Field(1, description="Calls whose caches fit at once.")
    speaking_share: Annotated[float, Gt(0), Le(1)] = Field(
        1.0, description="Part of them that may speak at the same time."
    )
    max_prompt_tokens: Count = Field(2048, description="Longer prompts are refused.")
    max_stored_prompt_bytes: Size = Field(1024 * MIB, description="Prompts that stay when their last user goes.")
    max_stored_voice_bytes: Size = Field(1024 * MIB, description="Voices that stay when their last user goes.")

    code2wav_retention: Retention = Field(
        _CODE2WAV.retention, description="What is remembered of an answer beside the voice: docs/code2wav.md."
    )
    code2wav_dtype: Dtype = Field(_CODE2WAV.dtype, description="Of what flow and vocoder remember.")
    code2wav_compute: Compute = Field(
        _CODE2WAV.compute,
        description="Of the flow's estimator, and of the vocoder's filter on a GPU: docs/code2wav.md.",
    )
    code2wav_voice_s: Seconds = Field(
        _CODE2WAV.voice_s, description="Voices that there is memory for; answers with longer ones take more of it."
    )
    code2wav_grid: Grid = Field(_CODE2WAV.grid, description="Numbers of calls in one solve on a GPU, by commas.")
    code2wav_chunk_tokens: Lengths = Field(
        _CODE2WAV.chunk_tokens,
        description="Codec tokens of chunks that solves are recorded for on a GPU, by commas.",
    )

    window: WindowMode = Field(WindowMode.BASIC, description="How old units leave a call that does not say it.")
    window_max_tokens: Count = Field(TRAINED_CONTEXT_TOKENS, description="off: the call ends here.")
    window_high_tokens: Count = Field(DEFAULT_HIGH_TOKENS, description="basic: slide above so many tokens.")
    window_low_tokens: Size = Field(DEFAULT_LOW_TOKENS, description="basic: slide down to so many tokens.")
    window_max_units: Count = Field(DEFAULT_MAX_UNITS, description="context: units that are kept.")
    window_previous_max_tokens: Size = Field(
        DEFAULT_PREVIOUS_MAX_TOKENS, description="context: tokens of earlier words that are kept."
    )
    slide: SlideMode = Field(SlideMode.ROTATE_QUERY, description="How a slide is done.")
    max_pictures: Size = Field(1, description="Pictures that a call may show in a second.")
    max_slices: Count = Field(1, description="Items that a picture may be cut into besides the view.")
    max_text_tokens: Size = Field(64, description="Tokens of typed text that a call reads in a second.")

    keeps_inputs: bool = Field(
        True,
        description="A call may change instructions, voice and window, for 8 KiB of the host's memory a token in it.",
    )

    max_speaking_chats: Count = Field(1, description="Chats that may speak at the same time, besides the calls.")
    max_chat_tokens: Annotated[int, Ge(2)] = Field(
        TRAINED_CONTEXT_TOKENS, description="Of a chat's conversation and answer together."
    )
    chat_answer_tokens: Count = Field(1024, description="Of a chat's answer, if its client does not say.")
    max_chat_slices: Count = Field(9, description="Items that a picture in a chat may be cut into besides the view.")

    host: Annotated[str, Field(min_length=1)] = Field("127.0.0.1", description="Address to listen at.")
    port: Annotated[int, Ge(0), Le(65_535)] = Field(8000, description="Port to listen at; 0 for any that is free.")
    tls_certificate_file: OptionalFile = Field(None, description="Certificate chain; wss and https with it.")
    tls_key_file: OptionalFile = Field(None, description="The certificate's key.")
    api_keys_file: OptionalFile = Field(None, description="Keys that may call; without it nobody is asked for one.")
    allowed_origins: Names = Field(
        (), description="Origins of foreign web pages that may call, by commas; * for all. The server's own always may."
    )
    max_calls_per_key: Count = Field(
        default_factory=_all_calls, description="Calls that one key may have at once. Default: `max_calls`."
    )

    vad_model: OptionalFile = Field(
        None, description="silero_vad.onnx, for clients that ask for `server_vad`; without it energy tells speech."
    )
    ping_s: Seconds = Field(
        20.0, description="A client is asked for a sign of life as often, and has as long to give it."
    )
    idle_s: Seconds = Field(300.0, description="A call that sends nothing for so long is closed.")
    max_message_bytes: Count = Field(
        15 * MIB, description="Of a message or a request's body; longer ones end the connection."
    )
    max_input_queue_bytes: Count = Field(32 * MIB, description="Sound of a call that may wait to be heard.")
    max_input_queue_s: Seconds = Field(300.0, description="The same in seconds of sound.")
    max_output_queue_bytes: Count = Field(4 * MIB, description="Output that a slow reader may leave waiting.")
    max_output_queue_s: Seconds = Field(30.0, description="Time that output may wait for a slow reader.")
    resume_s: Seconds = Field(30.0, description="A client whose connection was cut may come back for so long.")
    first_message_s: Seconds = Field(10.0, description="A client that comes back says to which session by then.")
    max_journal_bytes: Count = Field(8 * MIB, description="Of what a call told, kept for a client that comes back.")
    max_journal_s: Seconds = Field(60.0, description="The same in seconds.")
    drain_s: Annotated[float, Ge(0), Le(86_400)] = Field(
        30.0, description="Time that running calls have after SIGTERM."
    )
    survey_limit_s: Seconds = Field(5.0, description="An engine that says nothing for so long is not healthy.")
    log_level: LogLevel = Field(LogLevel.INFO, description="debug also writes what is said in calls.")
    log_format: LogFormat = Field(LogFormat.TEXT, description="Lines for people, or a JSON object a line.")

    @model_validator(mode="after")
    def _check_pairs(self) -> ServerSettings:
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise _conflict("belong together; give both or none", "tls_certificate_file", "tls_key_file")
        if self.window_low_tokens >= self.window_high_tokens:
            raise _conflict("must be in this order, the first one lower", "window_low_tokens", "window_high_tokens")
        if self.max_calls_per_key > self.max_calls:
            raise _conflict("must be in this order, the first one not higher", "max_calls_per_key", "max_calls")
        try:
            check_slide(self.slide, self.kv_dtype)
        except ConfigError as error:
            raise _conflict(f"do not go together: {error}", "kv_dtype", "slide") from error
        return self


@dataclass(frozen=True, slots=True)
class Given:
    """What a source says about an option. source: in words, with the option as it is spelled there."""

    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings, and by option where its value is from."""

    settings: ServerSettings
    sources: Mapping[str, str]

    def lines(self) -> Iterator[str]:
        """For people, one option each."""
        for option, value in self.settings:
            yield f"{option} = {as_text(value)}  ({self.sources[option]})"


def from_file(path: Path) -> dict[str, Given]:
    """Options of a YAML file. Raises: ConfigError if it is no mapping of options to single values or lists."""
    try:
        # Not the loader that reads the window mode `off` as a truth value.
        content = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the configuration {path} cannot be read: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"the configuration {path} is a {type(content).__name__}; write lines of option: value")
    given = {}
    for option, value in content.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        if not isinstance(text, str):
            raise ConfigError(f"{option} in file {path} is a mapping; it must be one value or a list")
        given[str(option)] = Given(text, f"{option} in file {path}")
    return given


def from_environment(variables: Mapping[str, str]) -> dict[str, Given]:
    """Options of all variables that start as ours do, also of those that are none."""
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): Given(value, f"environment variable {name}")
        for name, value in variables.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }


def from_flags(flags: Mapping[str, str | None]) -> dict[str, Given]:
    """flags: by option; None is one that was not given."""
    return {option: Given(text, f"flag {flag(option)}") for option, text in flags.items() if text is not None}


def flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def resolve(*sources: Mapping[str, Given]) -> Resolved:
    """Decide every option. sources: the first that says something about an option wins.

    Raises: ConfigError with everything that is wrong: where, which option, which value, what is allowed.
    """
    given: dict[str, Given] = {}
    for source in reversed(sources):
        given |= source
    try:
        settings = ServerSettings.model_validate_strings({option: one.value for option, one in given.items()})
    except ValidationError as error:
        complaints = [_complaint(details, given) for details in error.errors() if details["type"] not in _CONSEQUENCES]
        raise ConfigError("; ".join(complaints)) from error
    origins = {option: given[option].source if option in given else "default" for option in options()}
    return Resolved(settings, origins)


def options() -> tuple[str, ...]:
    return tuple(ServerSettings.model_fields)


def as_text(value: object) -> str:
    """A value as a source would give it; `none` for no file or name."""
    match value:
        case None | ():
            return "none"
        case Enum():
            return str(value.value)
        case bool():
            return str(value).lower()
        case BatchGrid() | LengthGrid():
            return as_text(value.sizes)
        case tuple():
            return ",".join(map(str, value))
        case _:
            return str(value)


def allowed(option: str) -> str:
    """What values an option may have, in words."""
    field = ServerSettings.model_fields[option]
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(str(member.value) for member in kind)
    bounds = []
    for limit in field.metadata:
        match limit:
            case Ge(ge=bound):
                bounds.append(f"from {bound}")
            case Gt(gt=bound):
                bounds.append(f"above {bound}")
            case Le(le=bound):
                bounds.append(f"up to {bound}")
    names: dict[object, str] = {
        bool: "true or false",
        int: "whole number",
        float: "number",
        str: "text",
        tuple[str, ...]: "texts",
    }
    names |= {BatchGrid: "whole numbers that ascend from 1", LengthGrid: "whole numbers that ascend"}
    return " ".join([names.get(kind, "file"), *bounds])


_CONSEQUENCES = ("default_factory_not_called",)
"""Complaints that only follow from others."""


def _conflict(what: str, *options: str) -> PydanticCustomError:
    return PydanticCustomError("conflict", "{names} {what}", {"names": " and ".join(options), "what": what})


def _complaint(details: ErrorDetails, given: Mapping[str, Given]) -> str:
    if details["type"] == "conflict":
        named = [given[name].source for name in given if name in details["msg"].split()]
        return f"{details['msg']} ({', '.join(named)})"
    option = str(details["loc"][0])
    one = given[option]
    if details["type"] == "extra_forbidden":
        similar = difflib.get_close_matches(option, options(), n=1)
        hint = f"did you mean {similar[0]}?" if similar else "see docs/configuration.md"
        return f"{one.source} is no option; {hint}"
    return f"{one.source} is {one.value!r}: {details['msg'][:1].lower()}{details['msg'][1:]}"
