"""The networks of code2wav, small and with random weights: what a property test can afford."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from antiphon.models.minicpmo.causal_hift import CausalHift
from antiphon.models.minicpmo.causal_vocoder import CausalVocoder
from antiphon.models.minicpmo.flow import Flow, MelSynthesizer, draw_noise
from antiphon.models.minicpmo.flow_cache import FlowShape, Voice
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.flow_config import EncoderConfig, EstimatorConfig, FlowConfig
from antiphon.models.minicpmo.flow_membership import Retention
from antiphon.models.minicpmo.hift import Hift, HiftNetwork, fold_weight_norms
from antiphon.models.minicpmo.hift_config import Generation, HiftConfig
from antiphon.models.minicpmo.speech_arena import ArenaSize, SpeechArena
from antiphon.models.minicpmo.vocoder import SpeechVocoder, Vocoder
from antiphon.models.minicpmo.voice_prompt import VoicePrompt

CPU = torch.device("cpu")
BINS = 4
FLOW = FlowConfig(
    vocab_size=5000,
    num_mel_bins=BINS,
    speaker_size=6,
    cfg_rate=0.7,
    encoder=EncoderConfig(
        hidden_size=8,
        num_token_layers=2,
        num_frame_layers=1,
        num_heads=2,
        intermediate_size=12,
        lookahead_tokens=3,
        frames_per_token=2,
    ),
    estimator=EstimatorConfig(
        in_channels=4 * BINS, hidden_size=6, num_layers=2, num_heads=2, head_dim=4, intermediate_size=10
    ),
)
HIFT = HiftConfig(
    generation=Generation.V1_0_5,
    num_mel_bins=BINS,
    base_channels=16,
    num_harmonics=9,
    pitch_channels=6,
    num_pitch_convs=2,
    upsampling_kernels=(16, 11, 7),
    source_resblock_kernels=(7, 7, 11),
    resblock_kernels=(3, 5),
)
CAUSAL_HIFT = replace(HIFT, generation=Generation.V1_0_7)
FLOW_NOISE_FRAMES = 400
PITCH_HZ = 120.0


ROOMY = ArenaSize(max_speaking=32, max_frames=4000, max_windows=32)


def synthesizer(
    num_steps: int = 3,
    device: torch.device = CPU,
    *,
    generation: Generation = Generation.V1_0_5,
    size: ArenaSize = ROOMY,
    retention: Retention = Retention.REFERENCE,
    dtype: torch.dtype = torch.float32,
    compute: Compute = Compute.FLOAT32,
) -> MelSynthesizer:
    flow = Flow(FLOW)
    _randomise(flow, 0.3)
    arena = SpeechArena(FlowShape(FLOW, num_steps), retention, size, dtype, device)
    # What nobody wrote must not be heard.
    for entries in arena.entries.all:
        entries.keys.fill_(torch.nan)
        entries.values.fill_(torch.nan)
    noise = draw_noise(BINS, 0, device)[:, :FLOW_NOISE_FRAMES]
    return MelSynthesizer(flow.to(device), noise, arena, generation, compute)


def hift() -> Hift:
    """With a voice of about `PITCH_HZ`, far from where voiced sound ends, and its weight norms folded."""
    folded = unfolded_hift()
    fold_weight_norms(folded)
    return folded


def vocoder(generation: Generation, device: torch.device = CPU, compute: Compute = Compute.FLOAT32) -> SpeechVocoder:
    match generation:
        case Generation.V1_0_5:
            return Vocoder(hift().to(device), compute)
        case Generation.V1_0_7:
            return CausalVocoder(causal_hift().to(device), compute)


def unfolded_hift() -> Hift:
    """As it comes from a checkpoint."""
    hift = Hift(HIFT)
    _give_voice(hift)
    return hift


def causal_hift() -> CausalHift:
    """The same of 1.0.7, ready to run."""
    hift = unprepared_causal_hift()
    hift.prepare()
    return hift


def unprepared_causal_hift() -> CausalHift:
    """As it comes from a checkpoint."""
    hift = CausalHift(CAUSAL_HIFT)
    _give_voice(hift)
    return hift


def prompt(num_tokens: int, *, seed: int = 0) -> VoicePrompt:
    """A voice of random numbers that fits the small flow."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(FLOW.vocab_size, (num_tokens,), generator=generator)
    mel = torch.randn(2 * num_tokens, BINS, generator=generator)
    return VoicePrompt(tuple(tokens.tolist()), mel, torch.randn(FLOW.speaker_size, generator=generator))


def tensors(voice: Voice) -> Iterator[Tensor]:
    """All that a voice remembers."""
    yield from (voice.speaker, voice.tails.lookahead, voice.tails.upsampling, voice.tails.convs)
    for entries in voice.entries.all:
        yield from (entries.keys, entries.values)


def _give_voice(hift: HiftNetwork) -> None:
    _randomise(hift, 0.4)
    hift.f0_predictor.classifier.bias.fill_(PITCH_HZ)


def _randomise(module: nn.Module, deviation: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for weight in module.requires_grad_(requires_grad=False).parameters():
        weight.normal_(0, deviation, generator=generator)
