"""The flow's encoder: codec tokens to hidden states per mel frame, chunk by chunk, by a conformer without convolutions.

Streaming with a lookahead of a few tokens; earlier chunks are read through caches that the caller holds. Chunks of
several sessions are one batch, filled up to the longest; each attends to its own past, of any length. Official names
(REFERENCE 2.7); formulas of REFERENCE 9.2. Not the mel itself: `dit.py`. Test: golden code2wav (`mu`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from antiphon.kernels.entry_store.op import store
from antiphon.models.minicpmo.flow_cache import Memory
from antiphon.models.minicpmo.flow_config import EncoderConfig

_LAYER_EPS = 1e-12
_EMBED_EPS = 1e-5
_LOOKAHEAD_SLOPE = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Sinusoids of all distances that chunks can have to what is read, as each layer sees them.

    tokens, frames: per layer [H, W, D] float32, of the token-rate and the frame-rate layers; column c of W is the
    distance M + L - 1 - c, with at most M entries read and chunks of L
    """

    tokens: tuple[Tensor, ...]
    frames: tuple[Tensor, ...]


class FlowEncoder(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = _Embedding(config)
        self.pre_lookahead_layer = _Lookahead(config)
        self.encoders = nn.ModuleList(_Layer(config) for _ in range(config.num_token_layers))
        self.up_layer = _Upsampling(config)
        self.up_embed = _Embedding(config)
        self.up_encoders = nn.ModuleList(_Layer(config) for _ in range(config.num_frame_layers))
        self.after_norm = nn.LayerNorm(config.hidden_size, eps=_EMBED_EPS)

    def positions(self, max_tokens: int, max_frames: int, num_tokens: int) -> Positions:
        """Of chunks so long. max_tokens, max_frames: that the layers of either rate read besides."""
        num_frames = num_tokens * self.config.frames_per_token
        channels, device = self.config.hidden_size, self.after_norm.weight.device
        of_tokens = _sinusoids(max_tokens, num_tokens, channels, device)
        of_frames = _sinusoids(max_frames, num_frames, channels, device)
        return Positions(
            tuple(layer.self_attn.positions(of_tokens) for layer in _layers(self.encoders)),
            tuple(layer.self_attn.positions(of_frames) for layer in _layers(self.up_encoders)),
        )

    def forward(
        self,
        x: Tensor,
        nums_tokens: Tensor,
        tails: tuple[Tensor, Tensor],
        memories: tuple[Memory, Memory],
        positions: Positions,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Encode one chunk of each of B sessions, the longest of L tokens.

        x:           [B, L + lookahead, C] floating, embedded tokens
        nums_tokens: [B] int64, how many of them are real; zeros stand for the others, at a turn's end and as padding
        tails:       [B, C, 2] and [B, C, 4] floating, of the lookahead and of the upsampling, from the chunk before
        memories:    of tokens and of frames: what the layers read, old before new, and where their new entries go
        positions:   for as many entries as the memories list
        Returns: hidden states [B, 2 L, C], and the tails where each chunk ends (`Reading.lengths`).
        """
        lookahead_tail, upsampling_tail = tails
        of_tokens, of_frames = memories
        is_real = torch.arange(x.shape[1], device=x.device) < nums_tokens[:, None]
        x = torch.where(is_real[..., None], self.embed(x), 0.0)
        x, lookahead_tail = self.pre_lookahead_layer(x, lookahead_tail, of_tokens.reading.lengths)
        for index, layer in enumerate(self.encoders):
            x = layer(x, positions.tokens[index], of_tokens, index)
        x, upsampling_tail = self.up_layer(x, upsampling_tail, of_frames.reading.lengths)
        x = self.up_embed(x)
        for index, layer in enumerate(self.up_encoders):
            x = layer(x, positions.frames[index], of_frames, index)
        return self.after_norm(x), (lookahead_tail, upsampling_tail)


def _layers(modules: nn.ModuleList) -> Iterator[_Layer]:
    for layer in modules:
        assert isinstance(layer, _Layer), f"{type(layer).__name__} is no layer"
        yield layer


def _sinusoids(max_past: int, num_queries: int, channels: int, device: torch.device) -> Tensor:
    """REFERENCE 9.2: pe(r)[2k] = sin(r · 10000^(-2k/C)), pe(r)[2k+1] = cos. Distances are not bounded by a table.

    Returns: [max_past + 2 num_queries - 1, C] float32, the largest distance first.
    """
    distances = torch.arange(max_past + num_queries - 1, -num_queries, -1, device=device, dtype=torch.float32)
    even = torch.arange(0, channels, 2, device=device, dtype=torch.float32)
    angles = distances[:, None] * torch.exp(even * (-math.log(10000.0) / channels))
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


class _Layer(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.self_attn = _RelativeAttention(config)
        self.feed_forward = _FeedForward(config)
        self.norm_mha = nn.LayerNorm(config.hidden_size, eps=_LAYER_EPS)
        self.norm_ff = nn.LayerNorm(config.hidden_size, eps=_LAYER_EPS)

    def forward(self, x: Tensor, positions: Tensor, memory: Memory, layer: int) -> Tensor:
        """x: [B, L, C] floating -> the same. positions: of this layer."""
        x = x + self.self_attn(self.norm_mha(x), positions, memory, layer)
        return x + self.feed_forward(self.norm_ff(x))


class _RelativeAttention(nn.Module):
    """score(i, j) = ((q_i + u) · k_j + (q_i + v) · W_pos pe(distance)) / √D; keys are remembered without positions."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self.pos_bias_u = nn.Parameter(torch.empty(heads, size // heads))
        self.pos_bias_v = nn.Parameter(torch.empty(heads, size // heads))
        self.linear_q = nn.Linear(size, size)
        self.linear_k = nn.Linear(size, size)
        self.linear_v = nn.Linear(size, size)
        self.linear_out = nn.Linear(size, size)
        self.linear_pos = nn.Linear(size, size, bias=False)

    def positions(self, table: Tensor) -> Tensor:
        """table: [W, C] floating -> [H, W, D]."""
        return self._heads(self.linear_pos(table)).transpose(0, 1).contiguous()

    def forward(self, x: Tensor, positions: Tensor, memory: Memory, layer: int) -> Tensor:
        """x: [B, L, C] floating -> the same. positions: of this layer."""
        qkv = torch.stack([self._heads(linear(x)) for linear in (self.linear_q, self.linear_k, self.linear_v)], dim=2)
        store(qkv, layer, memory.sink)
        q, k, v = qkv.unbind(2)
        by_head = (q + self.pos_bias_v).permute(2, 0, 1, 3)  # [H, B, L, D]
        by_distance = (by_head.flatten(1, 2) @ positions.mT).view(*by_head.shape[:3], -1)
        q = q + self.pos_bias_u
        out = memory.attend(layer, q, k, v, by_distance=by_distance, scale=q.shape[-1] ** -0.5)
        projected: Tensor = self.linear_out(out.flatten(2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        """x: [..., C] -> [..., H, D]."""
        return x.reshape(*x.shape[:-1], *self.pos_bias_u.shape)


class _FeedForward(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.w_1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.w_2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w_2(F.silu(self.w_1(x)))
        return out


class _Embedding(nn.Module):
    """Linear, LayerNorm, times √C."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.out = nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size, eps=_EMBED_EPS))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x)
        return out * math.sqrt(x.shape[-1])


class _Lookahead(nn.Module):
    """Mixes each token with the few after it, then with the two before it, and adds the result to the token."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.conv1 = nn.Conv1d(size, size, config.lookahead_tokens + 1)
        self.conv2 = nn.Conv1d(size, size, 3)

    def forward(self, x: Tensor, tail: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, L + lookahead, C], tail: [B, C, 2] floating -> [B, L, C] and the tail where each chunk ends."""
        ahead = F.leaky_relu(self.conv1(x.mT), _LOOKAHEAD_SLOPE)
        context = torch.cat((tail, ahead), dim=-1)
        mixed: Tensor = self.conv2(context)
        return x[:, : ahead.shape[-1]] + mixed.mT, _end_of(context, tail, lengths)


class _Upsampling(nn.Module):
    """Repeats every token for each of its frames, then a causal convolution."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.frames_per_token = config.frames_per_token
        self.conv = nn.Conv1d(config.hidden_size, config.hidden_size, 2 * config.frames_per_token + 1)

    def forward(self, x: Tensor, tail: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, L, C], tail: [B, C, 4] floating -> [B, 2 L, C] and the tail where each chunk ends."""
        context = torch.cat((tail, x.mT.repeat_interleave(self.frames_per_token, dim=-1)), dim=-1)
        out: Tensor = self.conv(context)
        return out.mT, _end_of(context, tail, lengths)


def _end_of(context: Tensor, tail: Tensor, lengths: Tensor) -> Tensor:
    """The last steps of each chunk and of the tail before it, as many as the tail has.

    context: [B, C, K + L], tail: [B, C, K] floating, lengths: [B] int64, of the chunks -> [B, C, K]
    """
    steps = lengths[:, None] + torch.arange(tail.shape[-1], device=tail.device)
    return context.gather(-1, steps[:, None].expand_as(tail))
