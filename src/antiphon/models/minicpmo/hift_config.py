"""The HiFT vocoder's dimensions, read from the shapes of its weights: `hift.pt` comes without a configuration.

What shapes do not show is a named constant, here or in `hift.py`. Names are without the file's `generator.` prefix.
Source: REFERENCE 2.8. Test: tests/models/test_hift.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count, takewhile

from antiphon.errors import CheckpointError

UPSAMPLING_RATES = (8, 5, 3)
"""Steps of one mel frame up to the frames of the short Fourier transform, stage by stage; not visible in shapes."""


class Generation(Enum):
    """Which minicpmo-utils a checkpoint is made for. Its vocoder tells; flow and vocoder of one folder go together."""

    V1_0_5 = "1.0.5"
    V1_0_7 = "1.0.7"


_GENERATIONS = {7: Generation.V1_0_5, 5: Generation.V1_0_7}
"""By the kernel width of `conv_pre`."""


@dataclass(frozen=True, slots=True)
class HiftConfig:
    """Sizes of the vocoder; tuples go stage by stage.

    resblock_kernels: of the parallel blocks of every stage
    """

    generation: Generation
    num_mel_bins: int
    base_channels: int
    num_harmonics: int
    pitch_channels: int
    num_pitch_convs: int
    upsampling_kernels: tuple[int, ...]
    source_resblock_kernels: tuple[int, ...]
    resblock_kernels: tuple[int, ...]


Shapes = Mapping[str, Sequence[int]]

_DOUBT = "is this a MiniCPM-o 4.5 vocoder?"


def hift_config(shapes: Shapes) -> HiftConfig:
    """shapes: of all weights by official name.

    Raises: CheckpointError if a weight is missing or the weights are no HiFT vocoder.
    """
    base_channels, num_mel_bins, width = _shape(shapes, "conv_pre")
    if width not in _GENERATIONS:
        known = ", ".join(str(one) for one in _GENERATIONS)
        raise CheckpointError(f"hift.pt: conv_pre has a kernel of {width}, known are {known}; {_DOUBT}")
    upsampling_kernels = _kernels(shapes, "ups.{}")
    source_resblock_kernels = _kernels(shapes, "source_resblocks.{}.convs1.0")
    resblock_kernels = _kernels(shapes, "resblocks.{}.convs1.0")
    num_stages = len(UPSAMPLING_RATES)
    num_parallel, num_left = divmod(len(resblock_kernels), num_stages)
    if len(upsampling_kernels) != num_stages or len(source_resblock_kernels) != num_stages or num_left:
        raise CheckpointError(
            f"hift.pt has {len(upsampling_kernels)} upsamplings, {len(source_resblock_kernels)} source resblocks and "
            f"{len(resblock_kernels)} resblocks; {num_stages} stages need {num_stages}, {num_stages} and a multiple"
        )
    return HiftConfig(
        generation=_GENERATIONS[width],
        num_mel_bins=num_mel_bins,
        base_channels=base_channels,
        num_harmonics=_plain_shape(shapes, "m_source.l_linear.weight")[1],
        pitch_channels=_plain_shape(shapes, "f0_predictor.classifier.weight")[1],
        num_pitch_convs=sum(name.startswith("f0_predictor.condnet.") and name.endswith(".bias") for name in shapes),
        upsampling_kernels=upsampling_kernels,
        source_resblock_kernels=source_resblock_kernels,
        resblock_kernels=resblock_kernels[:num_parallel],
    )


def _kernels(shapes: Shapes, pattern: str) -> tuple[int, ...]:
    """Kernel widths of the numbered convolutions `pattern`, from 0 as far as there are any."""
    names = (pattern.format(index) for index in count())
    return tuple(_shape(shapes, name)[2] for name in takewhile(lambda name: f"{name}.bias" in shapes, names))


def _shape(shapes: Shapes, name: str) -> Sequence[int]:
    """Of the direction tensor of a weight-normed convolution."""
    return _plain_shape(shapes, f"{name}.parametrizations.weight.original1")


def _plain_shape(shapes: Shapes, name: str) -> Sequence[int]:
    try:
        return shapes[name]
    except KeyError as error:
        raise CheckpointError(f"hift.pt has no weight {name!r}; {_DOUBT}") from error
