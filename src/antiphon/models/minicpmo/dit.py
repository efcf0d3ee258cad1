"""The DiT that estimates the flow's velocity for a chunk of mel frames, given the frames before it.

No positions and no mask: every frame of the chunk attends to the chunk and to all remembered frames. Chunks of several
sessions are one batch if they are equally long; each attends to its own past, of any length (`Memory`). Official names
(REFERENCE 2.7); formulas of REFERENCE 9.4. Not the solver: `flow.py`. Test: golden code2wav (`velocity_step0`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from antiphon.models.minicpmo.feed_forward import GeluFeedForward
from antiphon.models.minicpmo.flow_cache import Memory
from antiphon.models.minicpmo.flow_config import EstimatorConfig

_TIME_CHANNELS = 256
_TIME_SCALE = 1000.0
_MODULATED_EPS = 1e-6
_CONV_KERNEL = 3


@dataclass(frozen=True, slots=True, eq=False)
class Modulation:
    """How one point of time changes the network: it depends on nothing else, so it is computed once for all chunks.

    blocks: [L, 9, C] floating; shift, scale and gate of attention, then of the MLP, then of the convolution
    final:  [2, C] floating; shift and scale before the last projection
    """

    blocks: Tensor
    final: Tensor


class DiT(nn.Module):
    def __init__(self, config: EstimatorConfig, num_mel_bins: int) -> None:
        super().__init__()
        self.t_embedder = _TimeEmbedding(config.hidden_size)
        self.in_proj = nn.Linear(config.in_channels, config.hidden_size)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.final_layer = _FinalLayer(config.hidden_size, num_mel_bins)

    def modulations(self, times: Tensor) -> list[Modulation]:
        """times: [S] float32 in 0..1 -> one modulation per time."""
        embedded: Tensor = self.t_embedder(times)
        heads = [block.get_submodule("adaLN_modulation") for block in self.blocks]
        blocks = torch.stack([head(embedded).unflatten(-1, (9, -1)) for head in heads], dim=1)
        final: Tensor = self.final_layer.adaLN_modulation(embedded).unflatten(-1, (2, -1))
        return [Modulation(*pair) for pair in zip(blocks, final, strict=True)]

    def forward(
        self, x: Tensor, modulation: Modulation, memory: Memory, step: int, conv_tails: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Estimate the velocity of one chunk of each session in one Euler step.

        x:          [B, T, 4 M] floating; noisy mel, mu, speaker, condition; equally many rows per session
        memory:     what the sessions read, in any order, and where their new entries go; in all layers of all steps
        conv_tails: [L, 2, B, C, 2] floating; of the chunks before
        Returns: velocity [B, T, M] and the tails of these chunks.
        """
        x = self.in_proj(x)
        tails: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            layer = step * len(self.blocks) + index
            x, tail = block(x, modulation.blocks[index], memory, layer, conv_tails[index])
            tails.append(tail)
        return self.final_layer(x, modulation.final), torch.stack(tails)


class _TimeEmbedding(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(_TIME_CHANNELS, size), nn.SiLU(), nn.Linear(size, size))

    def forward(self, times: Tensor) -> Tensor:
        """times: [S] float32 -> [S, C] floating."""
        half = _TIME_CHANNELS // 2
        index = torch.arange(half, device=times.device, dtype=torch.float32)
        angles = _TIME_SCALE * times[:, None] * torch.exp(index * (-math.log(10000.0) / half))
        waves = torch.cat((angles.cos(), angles.sin()), dim=-1)
        out: Tensor = self.mlp(waves.to(next(self.parameters()).dtype))
        return out


def _modulation_head(size: int, num_chunks: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), nn.Linear(size, num_chunks * size))


def _modulated(x: Tensor, modulation: Tensor) -> Tensor:
    """norm(x) · (1 + scale) + shift, the norm without weights.

    x: [B, T, C], modulation: [2 or 3, C] floating; shift, scale and perhaps a gate, which is not used here.
    """
    return F.layer_norm(x, x.shape[-1:], eps=_MODULATED_EPS) * (1 + modulation[1]) + modulation[0]


class _Block(nn.Module):
    """Attention, then convolution, then MLP; the modulation lists the MLP before the convolution."""

    def __init__(self, config: EstimatorConfig) -> None:
        super().__init__()
        self.attn = _Attention(config)
        self.mlp = GeluFeedForward(config.hidden_size, config.intermediate_size)
        self.conv = _CausalConvs(config.hidden_size)
        self.adaLN_modulation = _modulation_head(config.hidden_size, 9)

    def forward(
        self, x: Tensor, modulation: Tensor, memory: Memory, layer: int, tails: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x: [B, T, C], modulation: [9, C], tails: [2, B, C, 2] floating -> the same, new tails."""
        for_attention, for_mlp, for_conv = modulation.reshape(3, 3, -1)
        x = x + for_attention[2] * self.attn(_modulated(x, for_attention), memory, layer)
        convolved, tails = self.conv(_modulated(x, for_conv), tails)
        x = x + for_conv[2] * convolved
        x = x + for_mlp[2] * self.mlp(_modulated(x, for_mlp))
        return x, tails


class _Attention(nn.Module):
    def __init__(self, config: EstimatorConfig) -> None:
        super().__init__()
        inner = config.num_heads * config.head_dim
        self.num_heads = config.num_heads
        self.to_q = nn.Linear(config.hidden_size, inner)
        self.to_k = nn.Linear(config.hidden_size, inner)
        self.to_v = nn.Linear(config.hidden_size, inner)
        self.q_norm = nn.LayerNorm(config.head_dim)
        self.k_norm = nn.LayerNorm(config.head_dim)
        self.proj = nn.Linear(inner, config.hidden_size)

    def forward(self, x: Tensor, memory: Memory, layer: int) -> Tensor:
        """x: [B, T, C] floating -> the same."""
        q = self.q_norm(self._heads(self.to_q(x)))
        k, v = self.k_norm(self._heads(self.to_k(x))), self._heads(self.to_v(x))
        out = memory.attend(layer, q, k, v, bias=None, scale=q.shape[-1] ** -0.5)
        projected: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], self.num_heads, -1).transpose(1, 2)


class _CausalConvs(nn.Module):
    """Causal convolution, LayerNorm, Mish, causal convolution. The numbers are the official names of `block`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.block = nn.ModuleDict(
            {
                "1": nn.Conv1d(size, size, _CONV_KERNEL),
                "3": nn.LayerNorm(size),
                "6": nn.Conv1d(size, size, _CONV_KERNEL),
            }
        )

    def forward(self, x: Tensor, tails: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, T, C], tails: [2, B, C, 2] floating -> the same, new tails."""
        first = torch.cat((tails[0], x.mT), dim=-1)
        hidden = F.mish(self.block["3"](self.block["1"](first).mT))
        second = torch.cat((tails[1], hidden.mT), dim=-1)
        out: Tensor = self.block["6"](second)
        length = tails.shape[-1]
        return out.mT, torch.stack((first[..., -length:], second[..., -length:]))


class _FinalLayer(nn.Module):
    def __init__(self, size: int, num_mel_bins: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, num_mel_bins)
        self.adaLN_modulation = _modulation_head(size, 2)

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """x: [B, T, C], modulation: [2, C] floating -> [B, T, M]."""
        out: Tensor = self.linear(_modulated(x, modulation))
        return out
