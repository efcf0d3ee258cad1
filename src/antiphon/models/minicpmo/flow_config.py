"""Reads the flow network's dimensions from `flow.yaml` (or the same fields as a mapping) into frozen dataclasses.

Every dimension comes from the file; what the code does not implement is refused. Not the vocoder's sizes: those
follow from its weights (`hift_config.py`). Source: REFERENCE 1.5. Test: tests/models/test_flow.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from antiphon.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The conformer that turns codec tokens into mel conditions.

    num_token_layers, num_frame_layers: layers before and after the upsampling to mel frames.
    """

    hidden_size: int
    num_token_layers: int
    num_frame_layers: int
    num_heads: int
    intermediate_size: int
    lookahead_tokens: int
    frames_per_token: int


@dataclass(frozen=True, slots=True)
class EstimatorConfig:
    """The DiT that estimates the velocity of the flow."""

    in_channels: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class FlowConfig:
    """cfg_rate: strength r of the guidance, (1 + r) · conditional - r · unconditional."""

    vocab_size: int
    num_mel_bins: int
    speaker_size: int
    cfg_rate: float
    encoder: EncoderConfig
    estimator: EstimatorConfig


def read_flow_yaml(path: Path) -> FlowConfig:
    """The configuration in a checkpoint's `assets/token2wav/flow.yaml`.

    Raises: CheckpointError if the file is no such YAML, a field is missing or a value is not implemented.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as the flow's YAML: {error}; fetch the file again") from error
    return parse_flow_yaml(text, str(path))


def parse_flow_yaml(text: str, source: str) -> FlowConfig:
    """The same from the file's text. source: where it is from, for messages. Raises: CheckpointError."""
    try:
        document = yaml.load(text, Loader=_TagsAsMappings)
    except yaml.YAMLError as error:
        raise CheckpointError(f"{source} cannot be read as the flow's YAML: {error}; fetch the file again") from error
    if not isinstance(document, Mapping) or not isinstance(document.get("flow"), Mapping):
        raise CheckpointError(f"{source} has no mapping `flow` at its top; is it the flow.yaml of assets/token2wav?")
    return flow_config(document["flow"])


def flow_config(raw: Mapping[str, object]) -> FlowConfig:
    """The configuration from the constructor arguments under `flow:`.

    Raises: CheckpointError, as `read_flow_yaml`.
    """
    try:
        flow = _Flow.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r:.60})" for e in error.errors()
        )
        raise CheckpointError(f"flow.yaml is not a flow that this code implements: {problems}") from error
    encoder, estimator = flow.encoder, flow.decoder.estimator
    _check_sizes(flow)
    return FlowConfig(
        vocab_size=flow.vocab_size,
        num_mel_bins=flow.output_size,
        speaker_size=flow.spk_embed_dim,
        cfg_rate=flow.decoder.inference_cfg_rate,
        encoder=EncoderConfig(
            hidden_size=encoder.output_size,
            num_token_layers=encoder.num_blocks,
            num_frame_layers=encoder.num_up_blocks,
            num_heads=encoder.attention_heads,
            intermediate_size=encoder.linear_units,
            lookahead_tokens=encoder.pre_lookahead_len,
            frames_per_token=encoder.up_stride,
        ),
        estimator=EstimatorConfig(
            in_channels=estimator.in_channels,
            hidden_size=estimator.hidden_size,
            num_layers=estimator.depth,
            num_heads=estimator.num_heads,
            head_dim=estimator.head_dim,
            intermediate_size=int(estimator.hidden_size * estimator.mlp_ratio),
        ),
    )


class _TagsAsMappings(yaml.SafeLoader):
    """Reads `!new:some.python.Class` as the plain mapping of its arguments; nothing is imported or built."""

    yaml_multi_constructors = {
        **yaml.SafeLoader.yaml_multi_constructors,
        "!new:": lambda loader, _class_name, node: loader.construct_mapping(node, deep=True),
    }


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class _Encoder(_Part):
    input_layer: Literal["linear"]
    pos_enc_layer_type: Literal["rel_pos_espnet"]
    selfattention_layer_type: Literal["rel_selfattn"]
    key_bias: Literal[True]
    normalize_before: Literal[True]
    up_stride: Literal[2]
    up_scale_factor: float
    input_size: int
    output_size: int
    pre_lookahead_len: int = Field(gt=0)
    num_blocks: int
    num_up_blocks: int
    attention_heads: int = Field(gt=0)
    linear_units: int


class _Estimator(_Part):
    in_channels: int
    out_channels: int
    hidden_size: int
    depth: int
    num_heads: int
    head_dim: int
    mlp_ratio: float


class _Decoder(_Part):
    inference_cfg_rate: float
    estimator: _Estimator


class _Flow(_Part):
    output_type: Literal["mel"]
    input_size: int
    output_size: int
    spk_embed_dim: int
    vocab_size: int
    encoder: _Encoder
    decoder: _Decoder


def _check_sizes(flow: _Flow) -> None:
    """The parts must fit: one width through the encoder, four stacked mels into the estimator (REFERENCE 9.4)."""
    encoder, estimator = flow.encoder, flow.decoder.estimator
    pairs = (
        ("encoder.input_size", encoder.input_size, flow.input_size),
        ("encoder.output_size", encoder.output_size, encoder.input_size),
        ("encoder.up_scale_factor", encoder.up_scale_factor, encoder.up_stride),
        ("encoder.output_size modulo encoder.attention_heads", encoder.output_size % encoder.attention_heads, 0),
        ("decoder.estimator.in_channels", estimator.in_channels, 4 * flow.output_size),
        ("decoder.estimator.out_channels", estimator.out_channels, flow.output_size),
    )
    for name, value, wanted in pairs:
        if value != wanted:
            raise CheckpointError(f"flow.yaml: {name} is {value}, the rest of the file needs {wanted}")
