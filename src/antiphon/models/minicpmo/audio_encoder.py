"""From mel to what the thinker hears: a Whisper-style encoder, the projector and the pooling (REFERENCE 6.3 to 6.5).

Not the mel itself (`audio_features.py`, `audio_stream.py`). Two paths through the same layers: `encode_chunks`
continues sessions by a second each, `encode_reference` takes a recording at once. Golden: tests/golden/audio.
Letters: B rows, T positions, H hidden size, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from antiphon.errors import AudioError, ConfigError
from antiphon.kernels.attention.op import attention
from antiphon.kernels.history_attention.contract import Histories
from antiphon.kernels.history_attention.op import history_attention
from antiphon.kernels.transfer import upload
from antiphon.models.minicpmo.audio_chunks import ChunkInputs, ChunkLayout, ChunkRow, RecordedChunks, launched
from antiphon.models.minicpmo.audio_features import HOP_SAMPLES, PIECE_SAMPLES, MelExtractor
from antiphon.models.minicpmo.audio_history import AudioEncoderState, history_shape
from antiphon.models.minicpmo.audio_stream import CHUNK_FRAMES, EXTRA_FRAMES
from antiphon.models.minicpmo.captured import NumRuns, Recorder
from antiphon.models.minicpmo.config import AudioConfig
from antiphon.models.minicpmo.decoder import merged
from antiphon.models.minicpmo.each_row import each_row
from antiphon.units import INPUT_RATE_HZ

FRAMES_PER_POSITION = 2
"""Stride of the second convolution."""

CHUNK_POSITIONS = CHUNK_FRAMES // FRAMES_PER_POSITION

_EXTRA_POSITIONS = EXTRA_FRAMES // FRAMES_PER_POSITION
_POSITIONS_PER_S = INPUT_RATE_HZ // HOP_SAMPLES // FRAMES_PER_POSITION

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v) of the new positions, each [B, T, heads, D], to [B, T, heads, D]; what lies behind them is the callee's."""


class AudioEncoder(nn.Module):
    """The tensors `apm.*` and `audio_projection_layer.*` of a checkpoint."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        _check(config)
        self.config = config
        self.apm = _Whisper(config)
        self.audio_projection_layer = _Projector(config)
        self._recorded: list[RecordedChunks] = []
        self.num_runs = NumRuns()

    def prepare(self) -> None:
        """Make one matrix of those that read the same input; once, after loading."""
        self.apm.merge_projections()

    def capture(self, sizes: Sequence[int], recorder: Recorder) -> Iterator[int]:
        """Record `encode_chunks` for so many rows each, growing, before the first one; on a GPU only.

        Yields after each how many are left.
        """
        # The largest first: what it needs is then room for the others.
        for num_done, size in enumerate(reversed(sizes), start=1):
            self._recorded.insert(0, RecordedChunks(self._encode, self._layout(size), recorder))
            yield len(sizes) - num_done

    def new_state(self) -> AudioEncoderState:
        weight = self.apm.conv1.weight
        return AudioEncoderState(history_shape(self.config), device=weight.device, dtype=weight.dtype)

    def encode_chunks(self, rows: Sequence[ChunkRow]) -> Tensor:
        """One second of every row's session.

        rows: B >= 1 sessions, each at most once. In float32 on a CPU a row's numbers do not depend on the others.
        returns: [B, CHUNK_POSITIONS // pool_step, output_size] in the weights' dtype
        """
        assert len({id(state) for _, state in rows}) == len(rows), f"a session stands twice in {len(rows)} rows"
        for chunk, state in rows:
            assert chunk.suffix_frames == EXTRA_FRAMES, f"{chunk.suffix_frames} extra frames, not {EXTRA_FRAMES}"
            state.make_room(_num_positions(chunk.mel.shape[1]))
        recorded = next((one for one in self._recorded if len(rows) <= one.num_rows), None)
        self.num_runs = self.num_runs.one_more(is_replayed=recorded is not None)
        embeds = recorded.run(rows) if recorded is not None else launched(self._encode, self._layout(len(rows)), rows)
        for _, state in rows:
            state.advance(CHUNK_POSITIONS)
        return embeds

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
        embeds = self._embed(self.apm.encode_mels(upload(batch, self.apm.conv1.weight.device), num_frames))
        return [
            row[: _num_positions(frames) // self.config.pool_step]
            for row, frames in zip(embeds, num_frames, strict=True)
        ]

    def _layout(self, num_rows: int) -> ChunkLayout:
        return ChunkLayout(num_rows, self.config.num_mel_bins, history_shape(self.config), self.apm.conv1.weight)

    def _encode(self, inputs: ChunkInputs) -> Tensor:
        """As `Encode`."""
        return self._embed(self.apm.encode_chunks(inputs))

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

    def merge_projections(self) -> None:
        """Layer by layer: at no time is there a second copy of more than one layer's matrices."""
        for module in [*self.modules()]:
            if isinstance(module, _SelfAttention):
                module.merge_projections()

    def encode_chunks(self, inputs: ChunkInputs) -> Tensor:
        """returns: [B, CHUNK_POSITIONS, H]"""
        x = self._convolve(inputs.mels, inputs.num_empty_frames)[:, _EXTRA_POSITIONS:-_EXTRA_POSITIONS]
        lengths = inputs.histories.lengths
        # A row that is nobody's has a length of its own, which is no position.
        positions = lengths.clamp(min=0)[:, None] + torch.arange(CHUNK_POSITIONS, device=lengths.device)
        x = x + self.embed_positions(positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, partial(_attend_with_history, inputs.histories, index))
        hidden: Tensor = self.layer_norm(x)
        return hidden

    def encode_mels(self, mels: Tensor, num_frames: Sequence[int]) -> Tensor:
        """mels: [B, bins, max(num_frames)] float32, zeros behind each row's frames. returns: [B, T, H]"""
        x = self._convolve(mels, torch.zeros(len(mels), dtype=torch.int64, device=mels.device))
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

    def _convolve(self, mels: Tensor, num_empty_frames: Tensor) -> Tensor:
        """mels: [B, bins, frames] float32. returns: [B, ceil(frames / 2), H] in the weights' dtype

        num_empty_frames: [B] int64, frames at a row's front that stand for nothing
        """
        x = F.gelu(each_row(self.conv1, mels.to(self.conv1.weight.dtype)))
        # conv2 has to see its own zero padding there, not conv1's bias.
        is_empty = torch.arange(x.shape[2], device=x.device) < num_empty_frames[:, None]
        return F.gelu(each_row(self.conv2, x.masked_fill(is_empty[:, None], 0))).mT


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

    def merge_projections(self) -> None:
        """Replace the three projections by one, `qkv_proj`; keys have no bias."""
        no_bias = torch.zeros_like(self.q_proj.bias)
        self.qkv_proj = merged(self.q_proj, self.k_proj, self.v_proj)
        self.qkv_proj.bias = nn.Parameter(torch.cat([self.q_proj.bias, no_bias, self.v_proj.bias]), requires_grad=False)
        del self.q_proj, self.k_proj, self.v_proj

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x: [B, T, H]. returns: [B, T, H]"""
        heads = each_row(self.qkv_proj, x).view(*x.shape[:2], 3 * self.num_heads, -1)
        q, k, v = torch.split(heads, self.num_heads, dim=2)
        return each_row(self.out_proj, attend(q, k, v).flatten(2))


class _Projector(nn.Module):
    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.linear1 = nn.Linear(config.hidden_size, config.output_size)
        self.linear2 = nn.Linear(config.output_size, config.output_size)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, H]. returns: [B, T, output_size]"""
        return each_row(self.linear2, F.relu(each_row(self.linear1, x)))


def _attend_with_history(histories: Histories, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each row against its session's history and its whole own chunk, which is history then. As `Attend`."""
    return history_attention(q, k, v, histories, layer, q.shape[3] ** -0.5)


def _attend_within(bias: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """bias: [B, 1, T, T]. As `Attend`."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return attention(q, k, v, bias=bias, scale=q.shape[3] ** -0.5).transpose(1, 2)


def _chunk_causal_bias(num_frames: Sequence[int], num_chunk_positions: int, *, like: Tensor) -> Tensor:
    """A query sees its own chunk and all earlier ones.

    like: [B, T, H]. returns: [B, 1, T, T] of its dtype and device, -inf where a key is hidden
    """
    T = like.shape[1]
    position = torch.arange(T, device=like.device)
    chunk = position // num_chunk_positions
    # The reference compares positions with mel frames, of which there are twice as many: a row sees as much padding
    # as it has audio (REFERENCE 6.5).
    limit = upload(torch.tensor(num_frames), like.device)[:, None, None, None]
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
