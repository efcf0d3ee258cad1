"""Chunks of several sessions on their way through the flow, piece by piece: the encoder, then each Euler step.

Formulas of REFERENCE 9.2 and 9.3. Everything that it reads is in `SolveInputs`, and it waits for no device, so that the
same code runs alone and captured. Not who solves what: `flow.py`. Test: golden code2wav.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels.vocoder_attention.contract import Products
from antiphon.models.minicpmo.dit import DiT
from antiphon.models.minicpmo.estimator import Estimator, Modulation
from antiphon.models.minicpmo.flow_cache import Memory, Parts
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.flow_encoder import FlowEncoder
from antiphon.models.minicpmo.flow_inputs import SolveInputs
from antiphon.models.minicpmo.speech_arena import SpeechArena


def euler_times(num_steps: int) -> list[float]:
    """t_s = 1 - cos(π s / 2N), s = 0..N (REFERENCE 9.3)."""
    return [1 - math.cos(math.pi / 2 * step / num_steps) for step in range(num_steps + 1)]


@dataclass(frozen=True, slots=True)
class SolveWeights:
    """The networks of a solve, and what depends on nothing that is said.

    modulations: per Euler step. widths: of the steps. guidance: strength r, (1 + r) · conditional - r · unconditional.
    products: of the estimator's attention.
    noise: [N, M] float32, what all chunks start from. noise_frames: N.
    """

    embedding: torch.nn.Embedding
    encoder: FlowEncoder
    encoder_proj: torch.nn.Linear
    estimator: Estimator
    modulations: Sequence[Modulation]
    widths: Sequence[float]
    guidance: float
    products: Products
    noise: Tensor

    @staticmethod
    def modulations_of(dit: DiT, num_steps: int, device: torch.device) -> list[Modulation]:
        blocks, final = dit.modulations(torch.tensor(euler_times(num_steps)[:-1], device=device))
        return [Modulation(*pair) for pair in zip(blocks, final, strict=True)]


class Solve:
    """One chunk of each of B sessions.

    mel:  [B, T, M] float32, once it is done; behind a row's own length there is anything
    ends: the encoder's tails where the chunks end, as the inputs' lookahead and upsampling, once they are encoded;
          those of the estimator are stored as they come
    """

    def __init__(self, weights: SolveWeights, arena: SpeechArena, inputs: SolveInputs) -> None:
        self._weights = weights
        self._inputs = inputs
        readings, sinks = inputs.readings(arena), inputs.sinks
        self._memories = Parts(
            Memory(readings.tokens, sinks.tokens, Products.FLOAT32),
            Memory(readings.frames, sinks.frames, Products.FLOAT32),
            Memory(readings.steps, sinks.steps, weights.products),
        )
        self._conv_tails = inputs.conv_tails
        self._num_done = 0
        self._features = torch.empty(0)
        self.mel = torch.empty(0)
        self.ends = inputs.lookahead, inputs.upsampling

    @property
    def is_done(self) -> bool:
        return self._num_done > len(self._weights.widths)

    def run(self, while_estimating: AbstractContextManager[None]) -> Tensor:
        """All of it. while_estimating: is entered around the Euler steps."""
        self.advance()
        with while_estimating:
            while not self.is_done:
                self.advance()
        return self.mel

    def advance(self) -> None:
        """The next piece."""
        if self._num_done:
            self._step(self._num_done - 1)
        else:
            self._encode()
        self._num_done += 1

    def _encode(self) -> None:
        """Mel conditions of the tokens, and the noise to start from."""
        weights, inputs, numbers = self._weights, self._inputs, self._inputs.numbers
        hidden, self.ends = weights.encoder(
            weights.embedding(numbers.tokens),
            numbers.nums_tokens,
            (inputs.lookahead, inputs.upsampling),
            (self._memories.tokens, self._memories.frames),
            inputs.positions,
        )
        mu = weights.encoder_proj(hidden)
        parts = (mu, inputs.speakers[:, None], inputs.condition)
        features = torch.cat([part.expand_as(mu) for part in parts], dim=-1)
        # Per session the conditional row, then the unconditional one, which knows nothing.
        self._features = torch.stack((features, torch.zeros_like(features)), dim=1).flatten(0, 1)
        frames = numbers.noise_starts[:, None] + torch.arange(mu.shape[1], device=mu.device)
        # Behind a row's own length there may be no noise left; nobody hears what is there.
        self.mel = weights.noise[frames.clamp(max=len(weights.noise) - 1)]

    def _step(self, step: int) -> None:
        """One Euler step, guided by the difference of the two rows of each session."""
        weights, x = self._weights, self.mel
        stacked = torch.cat((x.repeat_interleave(2, dim=0), self._features), dim=-1)
        velocity = weights.estimator(stacked, weights.modulations[step], self._memories.steps, step, self._conv_tails)
        conditional, unconditional = velocity[0::2], velocity[1::2]
        rate = weights.guidance
        self.mel = x + weights.widths[step] * ((1 + rate) * conditional - rate * unconditional)


def products_of(compute: Compute) -> Products:
    return Products.TF32 if compute is Compute.TF32 else Products.FLOAT32
