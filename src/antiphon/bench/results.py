"""What a measurement found, as data: figures, counts, series over time, and where it ran. JSON at the edge.

Different quantities are never blended: each figure says what it is the time of. What did not succeed is a count beside
it. Shown by tests/bench/test_results.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from antiphon.errors import ConfigError


class Quantity(Enum):
    """What a figure is of. Times of different kinds of things are different quantities."""

    KERNEL_TIME = "time of one operator"
    STEP_DEVICE_TIME = "time of a step on the device, by events"
    STEP_HOST_TIME = "time of a step on the host, until all is launched"
    STEP_TIME = "time of a step, until the device is done"
    STEP_IN_A_ROW_TIME = "time of a step among steps that follow one another"
    SLIDE_HOST_TIME = "time of a slide on the host"
    SLIDE_TIME = "time of a slide, until the device is done"
    DECIDED = "unit complete to decided"
    FIRST_PCM = "unit complete to its first PCM"
    FIRST_AUDIO = "unit complete to the first PCM of a turn"
    LATENESS = "lateness of a unit"
    NEEDED_LEAD = "lead that a turn's listener needs"
    SENDING = "lateness of the generator"
    LOADING = "loading"
    MEL_ERROR = "distance of log-mel from float32"
    SAMPLES_TO_ERROR = "power of samples over that of their error against float32"
    STATE_ERROR = "relative error of final states with keys and values in float8"
    STATE_TO_ERROR = "power of final states over that of their error with keys and values in float8"
    SAME_TOKENS = "tokens whose most likely successor is the same with keys and values in float8"
    DIVERGENCE = "divergence of the head's softmax with keys and values in float8"
    STAGE_TIME = "time of a unit in one stage, waiting included"
    BUSY_TIME = "time of a unit in all stages, waiting included"


class Unit(Enum):
    """Of a figure's numbers."""

    US = "us"
    MS = "ms"
    S = "s"
    DB = "dB"
    PERCENT = "%"
    NATS = "nat"


@dataclass(frozen=True, slots=True)
class Summary:
    """Of observed values: every percentile is one of them. num: how many there were."""

    num: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Summary:
        """values: at least one."""
        assert values, "nothing was measured"
        ordered = sorted(values)
        return Summary(
            num=len(ordered),
            mean=math.fsum(ordered) / len(ordered),
            p50=percentile(ordered, 50),
            p90=percentile(ordered, 90),
            p99=percentile(ordered, 99),
            max=ordered[-1],
        )


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent of all are not above. ordered: ascending, at least one."""
    assert 0 < percent <= 100, f"{percent} percent"
    return ordered[-(-percent * len(ordered) // 100) - 1]


@dataclass(frozen=True, slots=True)
class Limit:
    """What a figure is compared with, in its unit. name: says where the number comes from."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity of one case. per, number: what the case is repeated over, as sessions or tokens.

    repetition_p50s: the medians of repetitions that ran one after the other; all values are in the summary.
    """

    quantity: Quantity
    case: str
    per: str
    number: int
    unit: Unit
    summary: Summary
    repetition_p50s: tuple[float, ...]
    limits: tuple[Limit, ...] = ()

    @staticmethod
    def of(
        quantity: Quantity,
        case: str,
        size: tuple[str, int],
        unit: Unit,
        repetitions: Sequence[Sequence[float]],
        limits: Iterable[Limit] = (),
    ) -> Figure:
        """repetitions: their values, each at least one."""
        medians = tuple(Summary.of(values).p50 for values in repetitions)
        summary = Summary.of([value for values in repetitions for value in values])
        return Figure(quantity, case, *size, unit, summary, medians, tuple(limits))

    @property
    def spread(self) -> float:
        """How far the medians of the repetitions are apart, as a part of their middle one; 0 for a single one."""
        ordered = sorted(self.repetition_p50s)
        middle = percentile(ordered, 50)
        return (ordered[-1] - ordered[0]) / middle if middle else 0.0


@dataclass(frozen=True, slots=True)
class Count:
    """How often something happened, or how much there was of it. unit: of the value; empty for a plain number."""

    name: str
    case: str
    per: str
    number: int
    value: float
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Something over time. times_s, values: as many of one as of the other. unit: of the values."""

    name: str
    case: str
    unit: str
    times_s: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a measurement ran. device: in words. driver, triton, commit: `unknown` or `none` where there is none.

    command: as it was given. started_at: ISO 8601, UTC.
    """

    device: str
    driver: str
    torch: str
    cuda: str
    triton: str
    python: str
    commit: str
    model: str
    dtype: str
    command: str
    started_at: str


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One run of one command. notes: what a reader has to know to read the numbers."""

    name: str
    environment: Environment
    figures: tuple[Figure, ...]
    counts: tuple[Count, ...] = ()
    series: tuple[Series, ...] = ()
    notes: tuple[str, ...] = ()


_JSON = TypeAdapter(BenchResult)


def write_result(folder: Path, result: BenchResult) -> Path:
    """`NAME.json` in a folder; an earlier one of the same name is replaced. Raises: ConfigError."""
    path = folder / f"{result.name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_JSON.dump_json(result, indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; choose another folder") from error
    return path


def read_results(folder: Path) -> tuple[BenchResult, ...]:
    """All in a folder, by name. Raises: ConfigError if there is none, or one is something else."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ConfigError(f"{folder} holds no result; run a measurement with --out {folder} first")
    results = []
    for path in paths:
        try:
            results.append(_JSON.validate_json(path.read_bytes()))
        except (OSError, ValidationError) as error:
            raise ConfigError(f"{path} is no result of a measurement: {error}") from error
    return tuple(results)
