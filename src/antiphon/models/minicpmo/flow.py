"""Codec tokens to mel frames by flow matching: the network with its official names, and the Euler solver around it.

A voice is computed once and shared; a session's chunks then read it beside their own past. Equally long chunks of
several sessions are solved together. Formulas of REFERENCE 9.1 to 9.3. Not the waveform: `hift.py`. Tests: golden
code2wav, tests/models/test_flow.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from antiphon.errors import AudioError
from antiphon.models.minicpmo.dit import DiT
from antiphon.models.minicpmo.flow_cache import EncoderCache, FlowCache, KeysValues, Past, SpeechState, StepCache, Voice
from antiphon.models.minicpmo.flow_config import FlowConfig
from antiphon.models.minicpmo.flow_encoder import FlowEncoder
from antiphon.models.minicpmo.flow_retention import PINNED_FRAMES
from antiphon.models.minicpmo.flow_rules import FlowRules
from antiphon.models.minicpmo.voice_prompt import VoicePrompt

SILENCE_TOKEN = 4218
"""Stands for what is not said yet after a voice's prompt, and before a turn (REFERENCE 9.1, 9.7)."""

NOISE_FRAMES = 30_000
"""Length of the noise that all chunks start from (REFERENCE 9.3)."""

LONGEST_CHUNK_FRAMES = 56
"""What a chunk may need of the noise beside the prompt and the retained frames: two frames for each of 28 tokens."""


def draw_noise(num_mel_bins: int, seed: int, device: torch.device) -> Tensor:
    """The engine's flow noise, [M, 30000] float32: the same for a seed on every device, drawn once."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_mel_bins, NOISE_FRAMES, generator=generator).to(device)


class Flow(nn.Module):
    """The weights of `flow.pt`."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.config = config
        self.input_embedding = nn.Embedding(config.vocab_size, config.encoder.hidden_size)
        self.spk_embed_affine_layer = nn.Linear(config.speaker_size, config.num_mel_bins)
        self.encoder = FlowEncoder(config.encoder)
        self.encoder_proj = nn.Linear(config.encoder.hidden_size, config.num_mel_bins)
        self.decoder = _Decoder(config)

    def speaker(self, embedding: Tensor) -> Tensor:
        """embedding: [B, S] floating, of any length -> [B, M]."""
        out: Tensor = self.spk_embed_affine_layer(F.normalize(embedding, dim=-1))
        return out


class _Decoder(nn.Module):
    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.estimator = DiT(config.estimator, config.num_mel_bins)


@dataclass(frozen=True, slots=True, eq=False)
class FlowRow:
    """One session's chunk in a common solve: its codec tokens, and what they are read beside.

    tokens: unless the chunk is a turn's last, the final ones are only looked at and must come again
    """

    tokens: Sequence[int]
    voice: Voice
    speech: SpeechState

    @property
    def past_tokens(self) -> Past:
        return self.speech.past_tokens(self.voice)

    @property
    def past_frames(self) -> Past:
        return self.speech.past_frames(self.voice)


class MelSynthesizer:
    """Runs the flow, its weights loaded, with a fixed number of Euler steps and a fixed noise. Holds no session.

    The noise is read from the length of the past on, which stops growing: later chunks of a turn all start from the
    same slice, as in the reference.
    """

    def __init__(self, flow: Flow, noise: Tensor, num_steps: int, rules: FlowRules) -> None:
        """noise: [M, N] float32, on the flow's device; N frames for prompt, retained frames and chunk together."""
        self.flow = flow
        self.noise = noise
        self.num_steps = num_steps
        self.rules = rules
        times = [1 - math.cos(math.pi / 2 * step / num_steps) for step in range(num_steps + 1)]
        self._widths = [after - before for before, after in zip(times, times[1:], strict=False)]
        self._modulations = flow.decoder.estimator.modulations(torch.tensor(times[:-1], device=noise.device))

    def build_voice(self, prompt: VoicePrompt) -> Voice:
        """Condition the flow on a prompt. The mel it generates on the way is of no use.

        Raises: AudioError if the prompt does not fit this model.
        """
        weight = self.flow.encoder_proj.weight
        self._check_prompt(prompt)
        nobody = self.nobody(prompt.speaker.to(weight)[None])
        condition = prompt.mel.to(weight)[None]
        silence = [SILENCE_TOKEN] * self.flow.config.encoder.lookahead_tokens
        ahead = self.rules.after_prompt(prompt.tokens, silence)
        if len(ahead) < len(silence):
            raise AudioError(
                f"the voice has {len(ahead)} codec tokens, {len(silence)} are needed; use a longer recording"
            )
        tokens = (*prompt.tokens, *ahead)
        row = FlowRow(tokens, nobody, SpeechState.at_turn_start(nobody))
        _, (cache,) = self.render([row], condition, is_last=False)
        return Voice(nobody.speaker, cache)

    def speak(self, rows: Sequence[FlowRow], *, is_last: bool) -> list[tuple[Tensor, SpeechState]]:
        """The next mel frames of a turn, for each of several sessions.

        rows: with equally many tokens
        Returns: per row mel [1, T, M] floating, two frames per rendered token, and the state after them.
        """
        no_condition = self.flow.encoder_proj.weight.new_zeros(1, 1, self.flow.config.num_mel_bins)
        mel, caches = self.render(rows, no_condition, is_last=is_last)
        spoken = zip(rows, mel.chunk(len(rows)), caches, strict=True)
        return [(own, row.speech.followed_by(cache, row.voice, self.rules.kept_tokens)) for row, own, cache in spoken]

    def render(self, rows: Sequence[FlowRow], condition: Tensor, *, is_last: bool) -> tuple[Tensor, list[FlowCache]]:
        """One chunk of each of B sessions, read beside its voice and the speech before it.

        condition: [B, T, M] floating, the known mel of these frames; [1, 1, M] zeros where nothing is known
        Returns: mel [B, T, M] floating, and per row the cache of this chunk alone.
        """
        mu, encoder_cache = self._encode(rows, is_last=is_last)
        speaker = torch.cat([row.voice.speaker for row in rows])[:, None]
        features = torch.cat([part.expand_as(mu) for part in (mu, speaker, condition)], dim=-1)
        x = torch.stack([self._start(row, num_frames=mu.shape[1]) for row in rows])
        steps: list[StepCache] = []
        for step, width in enumerate(self._widths):
            velocity, cache = self._velocity(step, x, features, rows)
            conditional, unconditional = velocity.to(x.dtype)[0::2], velocity.to(x.dtype)[1::2]
            rate = self.flow.config.cfg_rate
            x = x + width * ((1 + rate) * conditional - rate * unconditional)
            steps.append(cache)
        return x, FlowCache(encoder_cache, tuple(steps)).split(len(rows))

    def nobody(self, speaker: Tensor) -> Voice:
        """A voice of no frames, to start from. speaker: [1, S] floating, the raw embedding."""
        encoder, estimator = self.flow.config.encoder, self.flow.config.estimator
        new = speaker.new_zeros

        def no_entries(num_layers: int, rows: int, heads: int, head_dim: int) -> KeysValues:
            empty = new(num_layers, rows, heads, 0, head_dim)
            return KeysValues(empty, empty)

        head_dim = encoder.hidden_size // encoder.num_heads
        step = StepCache(
            no_entries(estimator.num_layers, 2, estimator.num_heads, estimator.head_dim),
            new(estimator.num_layers, 2, 2, estimator.hidden_size, 2),
        )
        encoder_cache = EncoderCache(
            new(1, encoder.hidden_size, 2),
            new(1, encoder.hidden_size, 2 * encoder.frames_per_token),
            no_entries(encoder.num_token_layers, 1, encoder.num_heads, head_dim),
            no_entries(encoder.num_frame_layers, 1, encoder.num_heads, head_dim),
        )
        return Voice(self.flow.speaker(speaker), FlowCache(encoder_cache, (step,) * self.num_steps))

    def _encode(self, rows: Sequence[FlowRow], *, is_last: bool) -> tuple[Tensor, EncoderCache]:
        """Mel conditions `mu` [B, T, M] floating of the tokens, and the encoder's cache of them."""
        lookahead = self.flow.config.encoder.lookahead_tokens
        nums_tokens = {len(row.tokens) for row in rows}
        assert len(nums_tokens) == 1, f"chunks of {sorted(nums_tokens)} tokens cannot share a solve"
        assert min(nums_tokens) > (0 if is_last else lookahead), f"{nums_tokens} tokens give no frame; hold them"
        ids = torch.tensor([row.tokens for row in rows], device=self.noise.device)
        hidden, cache = self.flow.encoder(
            self.flow.input_embedding(ids),
            [row.speech.cache.encoder for row in rows],
            [row.past_tokens for row in rows],
            [row.past_frames for row in rows],
            is_last=is_last,
        )
        return self.flow.encoder_proj(hidden), cache

    def _start(self, row: FlowRow, *, num_frames: int) -> Tensor:
        """[T, M] float32, the noise that a row's chunk starts from."""
        start = row.speech.num_past_frames(row.voice)
        end = start + num_frames
        assert end <= self.noise.shape[1], f"noise of {self.noise.shape[1]} frames, wanted {start} to {end}"
        return self.noise.T[start:end]

    def _velocity(self, step: int, x: Tensor, features: Tensor, rows: Sequence[FlowRow]) -> tuple[Tensor, StepCache]:
        """The estimator in one Euler step.

        x:        [B, T, M] float32, the noisy mel
        features: [B, T, 3 M] floating; mu, speaker, condition. The unconditional rows have zeros instead
        Returns: velocity [2 B, T, M] floating, per session conditional then unconditional, and the step's cache of
        these frames.
        """
        pairs = torch.stack((features, torch.zeros_like(features)), dim=1).flatten(0, 1)
        stacked = torch.cat((x.to(pairs.dtype).repeat_interleave(2, dim=0), pairs), dim=-1)
        pasts = [row.speech.past_of_step(step, row.voice) for row in rows]
        conv_tails = torch.cat([row.speech.cache.steps[step].conv_tails for row in rows], dim=2)
        velocity, cache = self.flow.decoder.estimator(stacked, self._modulations[step], pasts, conv_tails)
        return velocity, cache

    def _check_prompt(self, prompt: VoicePrompt) -> None:
        config = self.flow.config
        max_frames = self.noise.shape[1] - PINNED_FRAMES - LONGEST_CHUNK_FRAMES
        if prompt.mel.shape[0] > max_frames:
            raise AudioError(
                f"the voice has {prompt.mel.shape[0]} mel frames; the flow's noise leaves room for {max_frames}; use a "
                "shorter recording"
            )
        sizes = (prompt.mel.shape[1], prompt.speaker.shape[0])
        if sizes != (config.num_mel_bins, config.speaker_size):
            raise AudioError(
                f"the voice has {sizes[0]} mel bins and a speaker embedding of {sizes[1]}; this model takes "
                f"{config.num_mel_bins} and {config.speaker_size}; prepare it with this model's files"
            )
        if not 0 <= min(prompt.tokens) <= max(prompt.tokens) < config.vocab_size:
            raise AudioError(
                f"the voice has codec tokens from {min(prompt.tokens)} to {max(prompt.tokens)}; this model's go from 0 "
                f"to {config.vocab_size - 1}; prepare it with this model's files"
            )
