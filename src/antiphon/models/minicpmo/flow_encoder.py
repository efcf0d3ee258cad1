"""The flow's encoder: codec tokens to hidden states per mel frame, chunk by chunk, by a conformer without convolutions.

Streaming with a lookahead of a few tokens; earlier chunks are read through caches that the caller holds. Chunks of
several sessions are one batch if they are equally long; each attends to its own past, of any length. Official names
(REFERENCE 2.7); formulas of REFERENCE 9.2. Not the mel itself: `dit.py`. Test: golden code2wav (`mu`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from antiphon.models.minicpmo.flow_cache import Memory
from antiphon.models.minicpmo.flow_config import EncoderConfig

_LAYER_EPS = 1e-12
_EMBED_EPS = 1e-5
_LOOKAHEAD_SLOPE = 0.01


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

    def forward(
        self, x: Tensor, tails: tuple[Tensor, Tensor], tokens: Memory, frames: Memory, *, is_last: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Encode one chunk of each of B sessions.

        x:     [B, L + lookahead, C] floating, embedded tokens; [B, L, C] if `is_last` (zeros stand for the rest)
        tails: [B, C, 2] and [B, C, 4] floating, of the lookahead and of the upsampling, from the chunk before
        tokens, frames: what the layers read, old before new, and where their new entries go
        Returns: hidden states [B, 2 L, C] and the tails of these chunks.
        """
        lookahead_tail, upsampling_tail = tails
        x = self.embed(x)
        if is_last:
            x = F.pad(x, (0, 0, 0, self.config.lookahead_tokens))
        x, lookahead_tail = self.pre_lookahead_layer(x, lookahead_tail)
        x = _run(self.encoders, x, tokens)
        x, upsampling_tail = self.up_layer(x, upsampling_tail)
        x = _run(self.up_encoders, self.up_embed(x), frames)
        return self.after_norm(x), (lookahead_tail, upsampling_tail)


@dataclass(frozen=True, slots=True, eq=False)
class _Positions:
    """Distances of the queries of B chunks of L entries to the entries before them and in them; T of the longest.

    table: [T + L - 1, C] floating; sinusoids of the distances T-1, T-2, ..., 1-L
    rows:  [B, L, T] int64; rows[b, i, j] = place in `table` of the distance from query i to key j of session b
    """

    table: Tensor
    rows: Tensor


def _positions(num_queries: int, nums_keys: Sequence[int], like: Tensor) -> _Positions:
    """REFERENCE 9.2: pe(r)[2k] = sin(r · 10000^(-2k/C)), pe(r)[2k+1] = cos. Distances are not bounded by a table.

    nums_keys: per session, those of its chunk included; the distance from query i to key j of T is T - L + i - j.
    """
    channels, device, longest = like.shape[-1], like.device, max(nums_keys)
    distances = torch.arange(longest - 1, -num_queries, -1, device=device, dtype=torch.float32)
    even = torch.arange(0, channels, 2, device=device, dtype=torch.float32)
    angles = distances[:, None] * torch.exp(even * (-math.log(10000.0) / channels))
    table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).to(like.dtype)
    queries, keys = torch.arange(num_queries, device=device), torch.arange(longest, device=device)
    shorter = longest - torch.tensor(nums_keys, device=device)
    rows = shorter[:, None, None] + num_queries - 1 - queries[:, None] + keys
    # Beyond a session's own keys nothing is read; any place will do.
    return _Positions(table, rows.clamp(max=len(table) - 1))


def _run(layers: nn.ModuleList, x: Tensor, memory: Memory) -> Tensor:
    """x: [B, L, C] floating -> the same through all layers."""
    positions = _positions(x.shape[1], [count + x.shape[1] for count in memory.reading.counts], x)
    for index, layer in enumerate(layers):
        x = layer(x, positions, memory, index)
    return x


class _Layer(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.self_attn = _RelativeAttention(config)
        self.feed_forward = _FeedForward(config)
        self.norm_mha = nn.LayerNorm(config.hidden_size, eps=_LAYER_EPS)
        self.norm_ff = nn.LayerNorm(config.hidden_size, eps=_LAYER_EPS)

    def forward(self, x: Tensor, positions: _Positions, memory: Memory, layer: int) -> Tensor:
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

    def forward(self, x: Tensor, positions: _Positions, memory: Memory, layer: int) -> Tensor:
        """x: [B, L, C] floating -> the same."""
        q, k, v = (self._heads(linear(x)) for linear in (self.linear_q, self.linear_k, self.linear_v))
        scale = q.shape[-1] ** -0.5
        distances = self._heads(self.linear_pos(positions.table))  # [H, T + L - 1, D]
        by_distance = (q + self.pos_bias_v[:, None]) @ distances.mT
        rows = positions.rows[:, None].expand(-1, q.shape[1], -1, -1)
        bias = by_distance.gather(-1, rows) * scale
        out = memory.attend(layer, q + self.pos_bias_u[:, None], k, v, bias=bias, scale=scale)
        projected: Tensor = self.linear_out(out.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        """x: [..., T, C] -> [..., H, T, D]."""
        return x.reshape(*x.shape[:-1], *self.pos_bias_u.shape).transpose(-3, -2)


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

    def forward(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, L + lookahead, C], tail: [B, C, 2] floating -> [B, L, C] and the new tail."""
        ahead = F.leaky_relu(self.conv1(x.mT), _LOOKAHEAD_SLOPE)
        context = torch.cat((tail, ahead), dim=-1)
        mixed: Tensor = self.conv2(context)
        return x[:, : ahead.shape[-1]] + mixed.mT, _end_of(context, tail)


class _Upsampling(nn.Module):
    """Repeats every token for each of its frames, then a causal convolution."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.frames_per_token = config.frames_per_token
        self.conv = nn.Conv1d(config.hidden_size, config.hidden_size, 2 * config.frames_per_token + 1)

    def forward(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, L, C], tail: [B, C, 4] floating -> [B, 2 L, C] and the new tail."""
        context = torch.cat((tail, x.mT.repeat_interleave(self.frames_per_token, dim=-1)), dim=-1)
        out: Tensor = self.conv(context)
        return out.mT, _end_of(context, tail)


def _end_of(context: Tensor, tail: Tensor) -> Tensor:
    """The last frames of `context`, as many as `tail` has."""
    return context[..., -tail.shape[-1] :]
