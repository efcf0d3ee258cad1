"""The folder of golden `code2wav`: what its files hold, and the models with its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file
from torch import Tensor

from antiphon.models.minicpmo.flow import LONGEST_CHUNK_FRAMES, Flow, MelSynthesizer
from antiphon.models.minicpmo.flow_cache import FlowShape
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.flow_config import flow_config
from antiphon.models.minicpmo.flow_membership import Retention
from antiphon.models.minicpmo.hift import Hift, fold_weight_norms
from antiphon.models.minicpmo.hift_config import Generation, hift_config
from antiphon.models.minicpmo.speech_arena import SpeechArena
from antiphon.models.minicpmo.vocoder import NoNoise, Vocoder
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from golden_kinds.company import ROOM
from golden_kinds.weights import filled


class _Described(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ChunkFacts(_Described):
    tokens: int
    last_chunk: bool
    mel_frames: int
    hift_input_frames: int
    wav_samples: int
    noise_offset: int
    estimator_att_len: tuple[int, int, int]
    conformer_att_len: tuple[int, int, int]
    min_distance_of_f0_to_10_hz: float


class StreamFacts(_Described):
    prompt_tokens: int
    prompt_frames: int
    turns: list[list[ChunkFacts]]
    order_proof: Mapping[str, float] = {}  # how the README's frame order was found, not a result of the model


class PostFacts(_Described):
    mel_frames: int
    last_chunk: bool
    samples_in: int
    samples_out: int


class CallFacts(_Described):
    tokens: tuple[int, ...]
    last_chunk: bool
    pcm_samples: int
    pcm_value: int


class PushFacts(_Described):
    new_tokens: list[int]
    is_last: bool
    force_flush: bool
    calls: list[CallFacts]
    buffer_after: list[int]
    waveform_samples: int | None
    left_padding: int = 0


class BufferingFacts(_Described):
    name: str
    initialized: bool
    steps: list[PushFacts]


class Cases(_Described):
    streams: Mapping[str, StreamFacts]
    post: list[PostFacts]
    buffering: list[BufferingFacts]
    max_abs_difference_from_float64: Mapping[str, float]  # where the tolerances come from


class Golden:
    """The folder's data, with a note of the tensors read, and the models."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.cases = Cases.model_validate_json((folder / "cases.json").read_text())
        self._tensors = load_file(folder / "cases.safetensors")
        self._unread = set(self._tensors)
        weights = load_file(folder / "weights.safetensors")
        config = flow_config(self.config["flow"])
        self.flow = filled(lambda: Flow(config), weights, "flow.")
        prefix = "hift."
        shapes = {name.removeprefix(prefix): t.shape for name, t in weights.items() if name.startswith(prefix)}
        self.hift = filled(lambda: Hift(hift_config(shapes)), weights, prefix)
        fold_weight_norms(self.hift)
        unknown = F.pad(self.read("rand_noise"), (0, LONGEST_CHUNK_FRAMES), value=torch.nan)  # reading it would show
        shape, cpu = FlowShape(config, self.config["n_timesteps"]), torch.device("cpu")
        arena = SpeechArena(shape, Retention.REFERENCE, ROOM, torch.float32, cpu)
        self.synthesizer = MelSynthesizer(self.flow, unknown, arena, Generation.V1_0_5, Compute.FLOAT32)
        self.vocoder = Vocoder(self.hift)
        self.no_noise = NoNoise(cpu)

    def read(self, name: str) -> Tensor:
        self._unread.discard(name)
        return self._tensors[name]

    def under(self, prefix: str) -> list[str]:
        """What is recorded of a chunk or voice, by its last name."""
        return [name.removeprefix(prefix) for name in self._tensors if name.startswith(prefix)]

    def prompt(self, stream: str) -> VoicePrompt:
        tokens = tuple(self.read(f"{stream}.prompt_tokens").tolist())
        return VoicePrompt(tokens, self.read(f"{stream}.prompt_mel"), self.read(f"{stream}.spk"))

    def stranger(self) -> VoicePrompt:
        """A voice of the first recorded stream's second half: shorter than all that are recorded."""
        whole = self.prompt(next(iter(self.cases.streams)))
        half = len(whole.tokens) // 2
        return VoicePrompt(whole.tokens[half:], whole.mel[2 * half :], -whole.speaker)

    def check_all_read(self) -> None:
        assert not self._unread, f"recorded but not compared: {sorted(self._unread)}"
