"""The weights of the DiT that estimates the flow's velocity, with their official names, and what depends on time alone.

Official names are those of REFERENCE 2.7, formulas those of 9.4. How it runs: `estimator.py`. Test: golden code2wav.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from antiphon.kernels.frame_norm.contract import CONV_KERNEL
from antiphon.models.minicpmo.feed_forward import GeluFeedForward
from antiphon.models.minicpmo.flow_config import EstimatorConfig

MODULATED_EPS = 1e-6

_TIME_CHANNELS = 256
_TIME_SCALE = 1000.0


class DiT(nn.Module):
    def __init__(self, config: EstimatorConfig, num_mel_bins: int) -> None:
        super().__init__()
        self.t_embedder = _TimeEmbedding(config.hidden_size)
        self.in_proj = nn.Linear(config.in_channels, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_layer = FinalLayer(config.hidden_size, num_mel_bins)

    @property
    def layers(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block), f"{type(block).__name__} is no block"
            yield block

    def modulations(self, times: Tensor) -> tuple[Tensor, Tensor]:
        """How points of time change the blocks and the last projection.

        times: [S] float32 in 0..1
        Returns: [S, L, 9, C] and [S, 2, C] float32; shift, scale and gate of attention, MLP and convolution; shift
        and scale.
        """
        embedded: Tensor = self.t_embedder(times)
        blocks = torch.stack([block.adaLN_modulation(embedded).unflatten(-1, (9, -1)) for block in self.layers], dim=1)
        final: Tensor = self.final_layer.adaLN_modulation(embedded).unflatten(-1, (2, -1))
        return blocks.float(), final.float()


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


class Block(nn.Module):
    """Attention, then convolution, then MLP; the modulation lists the MLP before the convolution."""

    def __init__(self, config: EstimatorConfig) -> None:
        super().__init__()
        self.attn = Attention(config)
        self.mlp = GeluFeedForward(config.hidden_size, config.intermediate_size)
        self.conv = CausalConvs(config.hidden_size)
        self.adaLN_modulation = _modulation_head(config.hidden_size, 9)


class Attention(nn.Module):
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


class CausalConvs(nn.Module):
    """Causal convolution, LayerNorm, Mish, causal convolution. The numbers are the official names of `block`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm_name = "3"
        self.block = nn.ModuleDict(
            {
                "1": nn.Conv1d(size, size, CONV_KERNEL),
                self.norm_name: nn.LayerNorm(size),
                "6": nn.Conv1d(size, size, CONV_KERNEL),
            }
        )

    @property
    def norm(self) -> nn.LayerNorm:
        norm = self.block[self.norm_name]
        assert isinstance(norm, nn.LayerNorm), f"{type(norm).__name__} is no norm"
        return norm


class FinalLayer(nn.Module):
    def __init__(self, size: int, num_mel_bins: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, num_mel_bins)
        self.adaLN_modulation = _modulation_head(size, 2)
