"""All networks of MiniCPM-o 4.5, built by a checkpoint's configuration and filled with its weights. Runs nothing.

What the files decide instead of config.json is decided here: the vision tower's depth, the vocoder's sizes and the
generation of flow and vocoder.
Shown by tests/models/test_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

import torch
from torch import Tensor

from antiphon.models.minicpmo.audio_encoder import AudioEncoder
from antiphon.models.minicpmo.causal_hift import CausalHift
from antiphon.models.minicpmo.causal_vocoder import CausalVocoder
from antiphon.models.minicpmo.checkpoint import Checkpoint, Part, Stores, WeightFile, load, require_fit
from antiphon.models.minicpmo.config import (
    AudioConfig,
    TalkerConfig,
    ThinkerConfig,
    VisionConfig,
    audio_config,
    talker_config,
    thinker_config,
    vision_config,
)
from antiphon.models.minicpmo.flow import Flow, MelSynthesizer
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.flow_config import FlowConfig, read_flow_yaml
from antiphon.models.minicpmo.hift import Hift
from antiphon.models.minicpmo.hift_config import Generation, HiftConfig, hift_config
from antiphon.models.minicpmo.resampler import Resampler
from antiphon.models.minicpmo.speech_arena import SpeechArena
from antiphon.models.minicpmo.talker import TalkerNetwork
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.models.minicpmo.vision import VisionEncoder, VisionTower, count_layers
from antiphon.models.minicpmo.vocoder import SpeechVocoder, Vocoder


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that shapes the networks. num_vision_layers: those that the tower really has."""

    thinker: ThinkerConfig
    vision: VisionConfig
    num_vision_layers: int
    audio: AudioConfig
    talker: TalkerConfig
    flow: FlowConfig
    hift: HiftConfig


class Section(Enum):
    """Networks that are always used together, so that they stand on one device."""

    THINKER = "thinker"
    """The language model with its ears and eyes."""
    TALKER = "talker"
    VOCODER = "vocoder"


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """The networks. They share no weights."""

    config: ModelConfig
    thinker: ThinkerNetwork
    vision: VisionEncoder
    audio: AudioEncoder
    talker: TalkerNetwork
    flow: Flow
    hift: Hift | CausalHift

    def synthesizer(self, noise: Tensor, arena: SpeechArena, compute: Compute = Compute.FLOAT32) -> MelSynthesizer:
        """What runs the flow as the checkpoint's generation does; arguments as of `MelSynthesizer`."""
        return MelSynthesizer(self.flow, noise, arena, self.config.hift.generation, compute)

    def vocoder(self, compute: Compute = Compute.FLOAT32) -> SpeechVocoder:
        """What runs the vocoder of the checkpoint's generation; compute: as in `Vocoder`."""
        match self.hift:
            case Hift():
                return Vocoder(self.hift, compute)
            case CausalHift():
                return CausalVocoder(self.hift, compute)
            case never:
                assert_never(never)

    def parts(self) -> tuple[Part, ...]:
        """Which network's weights are where; together they use every tensor of a checkpoint."""
        return tuple(part for section in Section for part in self.section(section))

    def section(self, section: Section) -> tuple[Part, ...]:
        match section:
            case Section.THINKER:
                return (
                    Part("thinker", self.thinker, WeightFile.MAIN, "llm."),
                    Part("vision tower", self.vision.tower, WeightFile.MAIN, "vpm."),
                    Part("resampler", self.vision.resampler, WeightFile.MAIN, "resampler."),
                    Part("audio encoder", self.audio, WeightFile.MAIN, ""),
                )
            case Section.TALKER:
                return (Part("talker", self.talker, WeightFile.MAIN, "tts."),)
            case Section.VOCODER:
                return (
                    Part("flow", self.flow, WeightFile.FLOW, ""),
                    Part("vocoder", self.hift, WeightFile.HIFT, ""),
                )

    def prepare(self, section: Section) -> None:
        """Bring loaded weights into the form that runs; once. Their names are the checkpoint's no more."""
        match section:
            case Section.THINKER:
                self.thinker.prepare()
                self.audio.prepare()
            case Section.TALKER:
                self.talker.prepare()
            case Section.VOCODER:
                self.hift.prepare()


def load_model(checkpoint: Checkpoint, devices: Mapping[Section, torch.device], dtype: torch.dtype) -> Model:
    """Build all networks and fill those of the named sections, one tensor after the other; the rest stay empty.

    dtype: of everything but flow and vocoder, which are float32.
    Raises: CheckpointError if the configuration is not implemented, or files and networks do not fit each other.
    """
    return filled_model(model_config(checkpoint), checkpoint.stores, devices, dtype)


def filled_model(
    config: ModelConfig, stores: Stores, devices: Mapping[Section, torch.device], dtype: torch.dtype
) -> Model:
    """As `load_model`, from tensors wherever they come from."""
    model = build_model(config)
    require_fit(model.parts(), stores)
    for section, device in devices.items():
        load(model.section(section), stores, device, dtype)
        model.prepare(section)
    return model


def model_config(checkpoint: Checkpoint) -> ModelConfig:
    """Raises: CheckpointError if a configuration lacks a field or has a value that the code does not implement."""
    raw, main, hift = checkpoint.config, checkpoint.stores[WeightFile.MAIN], checkpoint.stores[WeightFile.HIFT]
    vision = vision_config(raw)
    # All layers, or all but the last if the checkpoint lacks it: REFERENCE 1.2, quirk 27.
    num_vision_layers = vision.num_layers - int(count_layers(main.headers) < vision.num_layers)
    return ModelConfig(
        thinker=thinker_config(raw),
        vision=vision,
        num_vision_layers=num_vision_layers,
        audio=audio_config(raw),
        talker=talker_config(raw),
        flow=read_flow_yaml(checkpoint.vocoder_folder / "flow.yaml"),
        hift=hift_config({name: header.shape for name, header in hift.headers.items()}),
    )


def build_model(config: ModelConfig) -> Model:
    """The networks on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        return Model(
            config=config,
            thinker=ThinkerNetwork(config.thinker),
            vision=VisionEncoder(
                config.vision, VisionTower(config.vision, config.num_vision_layers), Resampler(config.vision)
            ),
            audio=AudioEncoder(config.audio),
            talker=TalkerNetwork(config.talker),
            flow=Flow(config.flow),
            hift=_hift(config.hift),
        )


def _hift(config: HiftConfig) -> Hift | CausalHift:
    match config.generation:
        case Generation.V1_0_5:
            return Hift(config)
        case Generation.V1_0_7:
            return CausalHift(config)
        case never:
            assert_never(never)
