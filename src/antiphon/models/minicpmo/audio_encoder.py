"""From mel to what the thinker hears: a Whisper-style encoder, the projector and the pooling (REFERENCE 6.3 to 6.5).

Not the mel itself (`audio_features.py`, `audio_stream.py`). Two paths through the same layers: `encode_chunks`
continues sessions by a second each, `encode_reference` takes a recording at once. Golden: tests/golden/audio.
Letters: B rows, T positions, H hidden size, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from antiphon.errors import AudioError, ConfigError
from antiphon.kernels.attention.op import attention
from antiphon.models.minicpmo.audio_features import HOP_SAMPLES, PIECE_SAMPLES, MelExtractor
from antiphon.models.minicpmo.audio_stream import CHUNK_FRAMES, EXTRA_FRAMES, MelChunk
from antiphon.models.minicpmo.config import AudioConfig
from antiphon.models.minicpmo.each_row import each_row
from antiphon.units import INPUT_RATE_HZ

FRAMES_PER_POSITION = 2
"""Stride of the second convolution."""

CHUNK_POSITIONS = CHUNK_FRAMES // FRAMES_PER_POSITION

_EXTRA_POSITIONS = EXTRA_FRAMES // FRAMES_PER_POSITION
_POSITIONS_PER_S = INPUT_RATE_HZ // HOP_SAMPLES // FRAMES_PER_POSITION

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v) of the new positions, each [B, heads, T, D], to [B, heads, T, D]; what lies behind them is the callee's."""


@dataclass(frozen=True, slots=True, eq=False)
class AudioHistory:
    """An AudioEncoderState on the host. kv: [layers, 2, heads, num_positions, D], keys and values."""

    kv: Tensor
    num_resets: int


class AudioEncoderState:
    """What the encoder remembers of one session. Written by AudioEncoder.encode_chunks only; freed with the session.

    num_positions: filled part of the history
    num_resets: how often the history was full and was dropped, which the reference does too (REFERENCE 6.4)
    """

    def __init__(self, config: AudioConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        head_dim = config.hidden_size // config.num_heads
        shape = (config.num_layers, 2, config.num_heads, config.max_positions, head_dim)
        self._kv = torch.empty(shape, device=device, dtype=dtype)
        self.num_positions = 0
        self.num_resets = 0

    def fork(self) -> AudioEncoderState:
        """The same history, to be continued by either of the two, not by both: they share its memory."""
        return copy(self)

    def history(self) -> AudioHistory:
        """A copy, which no later chunk changes."""
        return AudioHistory(self._kv[:, :, :, : self.num_positions].to("cpu", copy=True), self.num_resets)

    def restore(self, history: AudioHistory) -> None:
        """Go on from another state's history, of the same encoder."""
        self.num_positions, self.num_resets = history.kv.shape[3], history.num_resets
        self._kv[:, :, :, : self.num_positions] = history.kv

    def make_room(self, num_positions: int) -> None:
        """Forget everything if so many positions would fill the table."""
        if self.num_positions and self.num_positions + num_positions >= self._kv.shape[3]:
            self.num_positions = 0
            self.num_resets += 1

    def store(self, layer: int, k: Tensor, v: Tensor) -> Tensor:
        """Write behind the history; it becomes history by `advance`, so a step that fails leaves the state as it was.

        k, v: [heads, T, D]
        returns: [2, heads, num_positions + T, D], keys and values with these at the end; a view
        """
        end = self.num_positions + k.shape[1]
        self._kv[layer, 0, :, self.num_positions : end] = k
        self._kv[layer, 1, :, self.num_positions : end] = v
        return self._kv[layer, :, :, :end]

    def advance(self, num_positions: int) -> None:
        self.num_positions += num_positions


class AudioEncoder(nn.Module):
    """The tensors `apm.*` and `audio_projection_layer.*` of a checkpoint."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        _check(config)
        self.config = config
        self.apm = _Whisper(config)
        self.audio_projection_layer = _Projector(config)

    def new_state(self) -> AudioEncoderState:
        weight = self.apm.conv1.weight
        return AudioEncoderState(self.config, device=weight.device, dtype=weight.dtype)

    def encode_chunks(self, rows: Sequence[tuple[MelChunk, AudioEncoderState]]) -> Tensor:
        """One second of every row's session.

        rows: B >= 1 sessions, each at most once. In float32 on a CPU a row's numbers do not depend on the others.
        returns: [B, CHUNK_POSITIONS // pool_step, output_size] in the weights' dtype
        """
        assert len({id(state) for _, state in rows}) == len(rows), f"a session stands twice in {len(rows)} rows"
        return self._embed(self.apm.encode_chunks(rows))

    def encode_reference(self, samples: Tensor, extractor: MelExtractor) -> Tensor:
        """A recording as it stands in a prompt, its pieces one after the other.

        samples: [n] float32 on the host, 16 kHz
        returns: [tokens, output_size] in the weights' dtype
        Raises: AudioError if it is not audio or too short for one token.
        """
        embeds = torch.cat(self.encode_mels(extractor.reference_mels(samples)))
        if not len(embeds):
            raise AudioError(
                f"reference audio has {samples.numel()} samples; one token needs more than "
                f"{(self.config.pool_step - 1) * FRAMES_PER_POSITION * HOP_SAMPLES}"
            )
        return embeds

    def encode_mels(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Whole pieces of audio in one batch. A short piece sees part of its padding, as in the reference.

        mels: B >= 1 of [bins, frames >= 1] float32
        returns: per piece [positions // pool_step, output_size], positions = ceil(frames / FRAMES_PER_POSITION)
        """
        num_frames = [mel.shape[1] for mel in mels]
        batch = torch.stack([F.pad(mel, (0, max(num_frames) - mel.shape[1])) for mel in mels])
        embeds = self._embed(self.apm.encode_mels(batch, num_frames))
        return [
            row[: _num_positions(frames) // self.config.pool_step]
            for row, frames in zip(embeds, num_frames, strict=True)
        ]

    def _embed(self, hidden: Tensor) -> Tensor:
        """hidden: [B, T, H]. returns: [B, T // pool_step, output_size]; the reference projects first, then pools."""
        projected = self.audio_projection_layer(hidden)
        step = self.config.pool_step
        num_tokens = hidden.shape[1] // step
        return projected[:, : num_tokens * step].unflatten(1, (num_tokens, step)).mean(dim=2)


class _Whisper(nn.Module):
    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        H = config.hidden_size
        self.num_chunk_positions = int(config.chunk_length_s * _POSITIONS_PER_S)
        self.conv1 = nn.Conv1d(config.num_mel_bins, H, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(H, H, kernel_size=3, stride=FRAMES_PER_POSITION, padding=1)
        self.embed_positions = nn.Embedding(config.max_positions, H)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.layer_norm = nn.LayerNorm(H)

    def encode_chunks(self, rows: Sequence[tuple[MelChunk, AudioEncoderState]]) -> Tensor:
        """returns: [B, CHUNK_POSITIONS, H]"""
        states = [state for _, state in rows]
        for chunk, state in rows:
            assert chunk.suffix_frames == EXTRA_FRAMES, f"{chunk.suffix_frames} extra frames, not {EXTRA_FRAMES}"
            state.make_room(_num_positions(chunk.mel.shape[1]))

        # Every row has the same shape: a stream's first chunk gets empty frames where others have earlier ones.
        num_empty_frames = [EXTRA_FRAMES - chunk.prefix_frames for chunk, _ in rows]
        mels = [F.pad(chunk.mel, (empty, 0)) for (chunk, _), empty in zip(rows, num_empty_frames, strict=True)]
        x = self._convolve(torch.stack(mels), num_empty_frames)[:, _EXTRA_POSITIONS:-_EXTRA_POSITIONS]

        table = self.embed_positions.weight
        x = x + torch.stack([table[s.num_positions : s.num_positions + CHUNK_POSITIONS] for s in states])
        for index, layer in enumerate(self.layers):
            x = layer(x, partial(_attend_with_history, states, index))
        for state in states:
            state.advance(CHUNK_POSITIONS)
        hidden: Tensor = self.layer_norm(x)
        return hidden

    def encode_mels(self, mels: Tensor, num_frames: Sequence[int]) -> Tensor:
        """mels: [B, bins, max(num_frames)] float32, zeros behind each row's frames. returns: [B, T, H]"""
        x = self._convolve(mels, ())
        T = x.shape[1]
        table = self.embed_positions.weight
        if len(table) < T:
            raise AudioError(f"a piece of audio has {T} positions; the encoder has {len(table)}: give shorter audio")
        x = x + table[:T]
        bias = _chunk_causal_bias(num_frames, self.num_chunk_positions, like=x)
        for layer in self.layers:
            x = layer(x, partial(_attend_within, bias))
        hidden: Tensor = self.layer_norm(x)
        return hidden

    def _convolve(self, mels: Tensor, num_empty_frames: Sequence[int]) -> Tensor:
        """mels: [B, bins, frames] float32 on the host. returns: [B, ceil(frames / 2), H] in the weights' dtype

        num_empty_frames: per row, frames at its front that stand for nothing; () for none
        """
        x = F.gelu(each_row(self.conv1, mels.to(self.conv1.weight)))
        for row, empty in enumerate(num_empty_frames):
            x[row, :, :empty] = 0  # conv2 has to see its own zero padding there, not conv1's bias
        return F.gelu(each_row(self.conv2, x)).mT


class _Layer(nn.Module):
    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        H = config.hidden_size
        self.self_attn = _SelfAttention(H, config.num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(H)
        self.fc1 = nn.Linear(H, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, H)
        self.final_layer_norm = nn.LayerNorm(H)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x: [B, T, H]. returns: [B, T, H]"""
        x = x + self.self_attn(self.self_attn_layer_norm(x), attend)
        return x + each_row(self.fc2, F.gelu(each_row(self.fc1, self.final_layer_norm(x))))


class _SelfAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x: [B, T, H]. returns: [B, T, H]"""
        q, k, v = (
            each_row(projection, x).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return each_row(self.out_proj, attend(q, k, v).transpose(1, 2).flatten(2))


class _Projector(nn.Module):
    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.linear1 = nn.Linear(config.hidden_size, config.output_size)
        self.linear2 = nn.Linear(config.output_size, config.output_size)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, H]. returns: [B, T, output_size]"""
        return each_row(self.linear2, F.relu(each_row(self.linear1, x)))


def _attend_with_history(states: Sequence[AudioEncoderState], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each row against its session's history and its whole own chunk. q, k, v, result: [B, heads, T, D]"""
    rows = []
    for row, state in enumerate(states):
        keys, values = state.store(layer, k[row], v[row]).unsqueeze(1)
        rows.append(attention(q[row : row + 1], keys, values, bias=None, scale=q.shape[3] ** -0.5))
    return torch.cat(rows)


def _attend_within(bias: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """bias: [B, 1, T, T]. q, k, v, result: [B, heads, T, D]"""
    return attention(q, k, v, bias=bias, scale=q.shape[3] ** -0.5)


def _chunk_causal_bias(num_frames: Sequence[int], num_chunk_positions: int, *, like: Tensor) -> Tensor:
    """A query sees its own chunk and all earlier ones.

    like: [B, T, H]. returns: [B, 1, T, T] of its dtype and device, -inf where a key is hidden
    """
    T = like.shape[1]
    position = torch.arange(T, device=like.device)
    chunk = position // num_chunk_positions
    # The reference compares positions with mel frames, of which there are twice as many: a row sees as much padding
    # as it has audio (REFERENCE 6.5).
    limit = torch.tensor(num_frames, device=like.device)[:, None, None, None]
    is_visible = (chunk[:, None] >= chunk[None, :]) & (position < limit)
    return torch.zeros_like(is_visible, dtype=like.dtype).masked_fill(~is_visible, -torch.inf)


def _num_positions(num_frames: int) -> int:
    """Positions that the convolutions make of so many frames."""
    return -(-num_frames // FRAMES_PER_POSITION)


def num_reference_tokens(num_samples: int, pool_step: int) -> int:
    """Embeddings that `AudioEncoder.encode_reference` makes of so many samples; 0 if they are too few."""
    num_pieces, rest = divmod(num_samples, PIECE_SAMPLES)
    lengths = (*[PIECE_SAMPLES] * num_pieces, rest)
    return sum(_num_positions(-(-length // HOP_SAMPLES)) // pool_step for length in lengths)


def _check(config: AudioConfig) -> None:
    if config.max_positions < CHUNK_POSITIONS:
        raise ConfigError(f"max_source_positions is {config.max_positions}; one chunk needs {CHUNK_POSITIONS}")
    if int(config.chunk_length_s * _POSITIONS_PER_S) < 1:
        raise ConfigError(
            f"audio_chunk_length is {config.chunk_length_s}; attention over whole audios is not implemented"
        )
