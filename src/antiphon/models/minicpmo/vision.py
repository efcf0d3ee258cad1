"""Encodes pictures for the thinker: the SigLIP tower, and VisionEncoder, which runs it and the resampler over batches.

Not the picture files (`image.py`) nor the condensing (`resampler.py`). Parameter names are the checkpoint's under
`vpm.` (REFERENCE 2.2, 7.2). Padding never changes a result: beyond rounding, an item's embeddings do not depend on the
rest of its batch. Tests: `tests/golden_kinds/vision.py`, `tests/models/test_vision.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from antiphon.kernels.attention.op import attention
from antiphon.models.minicpmo.config import VisionConfig
from antiphon.models.minicpmo.feed_forward import GeluFeedForward
from antiphon.models.minicpmo.image import PatchedImage, Picture
from antiphon.models.minicpmo.resampler import Resampler, grid_positions

_LAYERS_PREFIX = "vpm.encoder.layers."


class VisionEncoder:
    """Owns no state: any number of pictures in, their embeddings out. The two networks hold the weights."""

    def __init__(self, config: VisionConfig, tower: VisionTower, resampler: Resampler) -> None:
        self.config = config
        self.tower = tower
        self.resampler = resampler

    def encode(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """Embed all items of all pictures, at most `max_batch_images` items at a time.

        returns: per picture [N, Q, E] model dtype; N = items of the picture, the view first
        """
        items = [item for picture in pictures for item in picture.items]
        if not items:
            return []
        size = self.config.max_batch_images
        batches = [self._encode_batch(items[start : start + size]) for start in range(0, len(items), size)]
        return list(torch.split(torch.cat(batches), [len(picture.items) for picture in pictures]))

    def collate(self, items: Sequence[PatchedImage]) -> PatchBatch:
        """Lay items side by side, on the device and in the dtype of the weights."""
        device, dtype = self.resampler.query.device, self.resampler.query.dtype
        table_side = self.config.image_size // self.config.patch_size
        lengths = [item.num_patches for item in items]
        ids = [position_ids(item.rows, item.columns, table_side) for item in items]
        places = _sent(pad_sequence([_places(item) for item in items], batch_first=True), device)
        return PatchBatch(
            patches=_sent(_pad_patches(items, dtype), device),
            position_ids=_sent(pad_sequence(ids, batch_first=True), device),
            rows=places[..., 0],
            columns=places[..., 1],
            bias=_sent(_padding_bias(lengths, dtype), device) if min(lengths) < max(lengths) else None,
        )

    def _encode_batch(self, items: Sequence[PatchedImage]) -> Tensor:
        """returns: [B, Q, E] model dtype."""
        batch = self.collate(items)
        positions = grid_positions(
            batch.rows,
            batch.columns,
            num_steps=max(max(item.rows, item.columns) for item in items),
            width=self.config.output_size,
            dtype=batch.patches.dtype,
        )
        embeddings: Tensor = self.resampler(self.tower(batch), positions, batch.bias)
        return embeddings


@dataclass(frozen=True, slots=True)
class PatchBatch:
    """Items of one forward pass, padded at the end to the longest. L = patches of that one, P = side of a patch.

    patches:       [B, 3, P, P * L] model dtype, laid out as in PatchedImage; padding is 0
    position_ids:  [B, L] int64, rows of the tower's position table; padding is 0
    rows, columns: [B, L] int64, where the patch lies in its item; padding is 0
    bias:          [B, 1, 1, L] model dtype, 0, and -inf where the key is padding; None if nothing is padded
    """

    patches: Tensor
    position_ids: Tensor
    rows: Tensor
    columns: Tensor
    bias: Tensor | None


def count_layers(names: Iterable[str]) -> int:
    """Tower layers that a checkpoint holds, from its tensor names; config.json does not decide it (REFERENCE 1.2)."""
    layers = (name.removeprefix(_LAYERS_PREFIX) for name in names if name.startswith(_LAYERS_PREFIX))
    return 1 + max((int(layer.partition(".")[0]) for layer in layers), default=-1)


class VisionTower(nn.Module):
    """num_layers: how many to build (`count_layers`); the config's own number may be one too many."""

    def __init__(self, config: VisionConfig, num_layers: int) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config, num_layers)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, batch: PatchBatch) -> Tensor:
        """returns: [B, L, H] model dtype; rows of padding hold nothing of use."""
        out: Tensor = self.post_layernorm(self.encoder(self.embeddings(batch), batch.bias))
        return out


class _Embeddings(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.patch_size
        self.patch_embedding = nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=size, stride=size)
        self.position_embedding = nn.Embedding((config.image_size // size) ** 2, config.hidden_size)

    def forward(self, batch: PatchBatch) -> Tensor:
        """returns: [B, L, H] model dtype."""
        content = self.patch_embedding(batch.patches).flatten(2).transpose(1, 2)
        out: Tensor = content + self.position_embedding(batch.position_ids)
        return out


class _Encoder(nn.Module):
    def __init__(self, config: VisionConfig, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config) for _ in range(num_layers))

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, bias)
        return x


class _Layer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = _SelfAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = GeluFeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), bias)
        out: Tensor = x + self.mlp(self.layer_norm2(x))
        return out


class _SelfAttention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._head_dim = config.hidden_size // config.num_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Every patch attends to its whole item. x, result: [B, L, H] model dtype; bias: as in PatchBatch."""
        q, k, v = (
            project(x).view(*x.shape[:2], -1, self._head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attention(q, k, v, bias=bias, scale=self._head_dim**-0.5)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out


def position_ids(rows: int, columns: int, table_side: int) -> Tensor:
    """Stretch the item over the square table of learned positions. returns: [rows * columns] int64 on the CPU."""
    return (_buckets(rows, table_side)[:, None] * table_side + _buckets(columns, table_side)).flatten()


def _buckets(num_patches: int, table_side: int) -> Tensor:
    """Which of `table_side` equal parts each patch along an axis falls into. returns: [num_patches] int64 on the CPU.

    Exactly floor(table_side * i / num_patches), except where the reference's float32 arithmetic puts a fraction just
    below a boundary that it should lie on (REFERENCE 7.2). Only the same arithmetic errs in the same places:
    torch.arange on the CPU with a step that was rounded to float32. Its end, 1 - 1e-6, keeps rounding from adding one
    fraction too many.
    """
    step = (1 / torch.tensor(num_patches, dtype=torch.float32, device="cpu")).item()
    fractions = torch.arange(0, 1 - 1e-6, step, dtype=torch.float32, device="cpu")
    boundaries = torch.arange(1, table_side, dtype=torch.float32, device="cpu") / table_side
    return torch.bucketize(fractions, boundaries, right=True)


def _places(item: PatchedImage) -> Tensor:
    """returns: [L, 2] int64 on the CPU; row and column of every patch."""
    return torch.cartesian_prod(torch.arange(item.rows, device="cpu"), torch.arange(item.columns, device="cpu"))


def _pad_patches(items: Sequence[PatchedImage], dtype: torch.dtype) -> Tensor:
    """returns: [B, 3, P, P * L] dtype on the CPU."""
    channels, size, _ = items[0].patches.shape
    shape = (len(items), channels, size, size * max(item.num_patches for item in items))
    padded = torch.zeros(shape, dtype=dtype, device="cpu")
    for row, item in zip(padded, items, strict=True):
        row[..., : size * item.num_patches] = item.patches
    return padded


def _padding_bias(lengths: list[int], dtype: torch.dtype) -> Tensor:
    """returns: [B, 1, 1, L] dtype on the CPU."""
    is_padding = torch.arange(max(lengths), device="cpu") >= torch.tensor(lengths, device="cpu")[:, None]
    return torch.zeros(is_padding.shape, dtype=dtype, device="cpu").masked_fill(is_padding, -torch.inf)[:, None, None]


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; a GPU takes it from pinned memory, so that the host does not wait for its queue."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
