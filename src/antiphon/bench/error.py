"""`antiphon bench error`: what fewer bits cost in sound, as results. Computed in `vocoder_error.py`.

Shown by tests/bench/test_commands.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from antiphon.bench.results import BenchResult, Figure, Quantity, Unit
from antiphon.bench.target import Target
from antiphon.bench.vocoder_error import PRECISIONS, VocoderError, vocoder_errors
from antiphon.models.minicpmo.model import Section


def run_error(target: Target, num_seconds: int) -> BenchResult:
    """Of a turn of so many seconds, in every precision."""
    if target.device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # as in an engine: `Code2WavBuilder`
    model = target.source.load(Section.VOCODER, target.device, target.torch_dtype)
    errors = vocoder_errors(model, target.device, num_seconds, PRECISIONS)
    return BenchResult(
        name="error",
        environment=target.environment(),
        figures=tuple(figure for error in errors for figure in _figures(error, num_seconds)),
        notes=(
            "Against float32, over a whole turn: distances of the flow's mel and of the samples' mel, root mean "
            "squares over bands and their mean over frames; the samples' power over that of their error, also of the "
            "vocoder alone. Where nothing differs there is no ratio.",
        ),
    )


def _figures(error: VocoderError, num_seconds: int) -> Iterator[Figure]:
    precision = f"{error.precision.compute.value}, remembers in {error.precision.kept_in.value}"
    for quantity, what, value in (
        (Quantity.MEL_ERROR, "of the flow", error.mel_db),
        (Quantity.MEL_ERROR, "of the samples", error.sound_db),
        (Quantity.SAMPLES_TO_ERROR, "all", error.samples_to_error_db),
        (Quantity.SAMPLES_TO_ERROR, "vocoder alone", error.filter_to_error_db),
    ):
        if math.isfinite(value):
            yield Figure.of(quantity, f"{precision}: {what}", ("seconds", num_seconds), Unit.DB, [[value]])
