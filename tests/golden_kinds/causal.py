"""Golden `causal`: flow and vocoder of minicpmo-utils 1.0.7, streams of chunks with a table of noise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, TypeAdapter
from safetensors.torch import load_file
from torch import Tensor

from antiphon.models.minicpmo.causal_hift import CausalHift
from antiphon.models.minicpmo.causal_vocoder import CausalState, CausalVocoder
from antiphon.models.minicpmo.flow import LONGEST_CHUNK_FRAMES, Flow, MelSynthesizer
from antiphon.models.minicpmo.flow_cache import FlowShape, SpeechState, Voice
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.flow_config import flow_config
from antiphon.models.minicpmo.flow_inputs import FlowRow
from antiphon.models.minicpmo.flow_membership import Retention
from antiphon.models.minicpmo.hift_config import Generation, hift_config
from antiphon.models.minicpmo.speech_arena import SpeechArena
from antiphon.models.minicpmo.vocoder import SourceNoise, TurnState, VocoderRow
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from golden_kinds.company import ROOM, Company, Turn, remembered
from golden_kinds.report import Comparison, Outcome, scaled
from golden_kinds.weights import filled

KIND = "causal"
TOLERANCE = 1e-4
"""Times the largest value; README. The vocoder gets the recorded mel, so that its phase does not sum up the flow's
roundings."""


class _ChunkFacts(BaseModel):
    model_config = ConfigDict(extra="forbid")

    is_last: bool
    mel_frames: int
    wav_samples: int
    estimator_att_len: int
    token_att_len: int


@dataclass(frozen=True, slots=True)
class _NoiseTable:
    """The reference's fixed table, read from the start in every turn."""

    table: Tensor
    position: int = 0

    def draw(self, num_samples: int, num_harmonics: int) -> tuple[Tensor, SourceNoise]:
        raise AssertionError(f"{num_samples} samples of normal noise for {num_harmonics} harmonics")

    def draw_uniform(self, num_samples: int, num_harmonics: int) -> tuple[Tensor, SourceNoise]:
        after = replace(self, position=self.position + num_samples)
        rows = torch.arange(self.position, after.position) % len(self.table)
        return self.table[None, rows, :num_harmonics], after


class _Golden:
    """The folder's data and the models with its weights."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        facts = TypeAdapter(dict[str, list[list[_ChunkFacts]]])
        self.turns = facts.validate_json((folder / "cases.json").read_text())
        self.tensors = load_file(folder / "cases.safetensors")
        weights = load_file(folder / "weights.safetensors")
        prefix = "causal.hift."
        shapes = {name.removeprefix(prefix): t.shape for name, t in weights.items() if name.startswith(prefix)}
        hift = filled(lambda: CausalHift(hift_config(shapes)), weights, prefix)
        hift.prepare()
        self.vocoder = CausalVocoder(hift)
        flow = flow_config(config["flow"])
        shape = FlowShape(flow, config["n_timesteps"])
        self.synthesizer = MelSynthesizer(
            filled(lambda: Flow(flow), weights, "causal.flow."),
            # Reading what is not recorded would show.
            F.pad(self.tensors["rand_noise"], (0, LONGEST_CHUNK_FRAMES), value=torch.nan),
            SpeechArena(shape, Retention.REFERENCE, ROOM, torch.float32, torch.device("cpu")),
            Generation.V1_0_7,
            Compute.FLOAT32,
        )

    def prompt(self, stream: str) -> VoicePrompt:
        tokens = tuple(self.tensors[f"{stream}.prompt_tokens"].tolist())
        return VoicePrompt(tokens, self.tensors[f"{stream}.prompt_mel"], self.tensors[f"{stream}.spk"])

    def voice(self, stream: str) -> Voice:
        return self.synthesizer.build_voice(self.prompt(stream))

    def stranger(self) -> Voice:
        """Of the first recorded stream's second half: shorter than all that are recorded."""
        whole = self.prompt(next(iter(self.turns)))
        half = len(whole.tokens) // 2
        return self.synthesizer.build_voice(VoicePrompt(whole.tokens[half:], whole.mel[2 * half :], -whole.speaker))


def run(folder: Path, company: Company = Company.ALONE) -> Iterator[Outcome]:
    """Every chunk of every turn. company: in which the streams speak."""
    golden = _Golden(folder)
    for stream, turns in golden.turns.items():
        voices = golden.voice(stream), golden.stranger()
        for number, chunks in enumerate(turns):
            noise = _NoiseTable(golden.tensors["noise_table"])
            turn = Turn(company, golden.synthesizer, golden.vocoder, voices, noise)
            yield from _turn(golden, voices[0], turn, f"{stream}.turn{number}", chunks)


def _turn(golden: _Golden, voice: Voice, turn: Turn, name: str, chunks: list[_ChunkFacts]) -> Iterator[Outcome]:
    speech = SpeechState.at_turn_start(voice)
    state: TurnState = golden.vocoder.at_turn_start(_NoiseTable(golden.tensors["noise_table"]))
    for number, facts in enumerate(chunks):
        case = f"{name}.chunk{number}"
        found, read = Comparison(KIND, case), {key: golden.tensors[f"{case}.{key}"] for key in _RECORDED}
        tokens = read["tokens"].tolist()
        if tokens:
            row = FlowRow(tokens, voice, speech, facts.is_last)
            mel, speech = turn.sing(row)
            found.close(mel[0].mT, read["mel"], scaled(TOLERANCE, read["mel"]))
            if facts.is_last:
                _, speech = remembered(golden.synthesizer, row)
        found.equal(speech.num_past_frames, facts.estimator_att_len)
        found.equal(len(speech.reads.tokens), facts.token_att_len)
        wav, state = turn.vocode(VocoderRow(read["mel"][None], state, facts.is_last))
        found.equal([read["mel"].shape[1], wav.shape[1]], [facts.mel_frames, facts.wav_samples])
        found.close(wav[0, ::4], read["wav_every_4"], scaled(TOLERANCE, read["wav_every_4"]))
        if not facts.is_last:
            assert isinstance(state, CausalState), state
            distance = (state.phase[0] - read["phase"]).abs()
            found.close(torch.minimum(distance, 1 - distance), torch.zeros(len(distance)), 1e-9)
        yield found.outcome()


_RECORDED = ("tokens", "mel", "wav_every_4", "phase")
