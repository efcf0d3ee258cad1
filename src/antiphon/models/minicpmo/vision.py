"""Encodes pictures for the thinker: the SigLIP tower, and VisionEncoder, which runs it and the resampler over batches.

Not the picture files (`image.py`) nor the condensing (`resampler.py`). Parameter names are the checkpoint's under
`vpm.` (REFERENCE 2.2, 7.2). Only items of equal length share a batch, so nothing is padded and an item's embeddings do
not depend on the rest of its batch: not at all in float32 on a CPU, elsewhere within rounding. Tests:
`tests/golden_kinds/vision.py`, `tests/models/test_vision.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from antiphon.kernels.attention.op import attention
from antiphon.models.minicpmo.config import VisionConfig
from antiphon.models.minicpmo.each_row import each_row
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
        """Embed all items of all pictures, those of equal length together, at most `max_batch_images` at a time.

        returns: per picture [N, Q, E] model dtype; N = items of the picture, the view first
        """
        items = [item for picture in pictures for item in picture.items]
        if not items:
            return []
        embeds = dict(chain.from_iterable(self._encode_batch(items, batch) for batch in self._batches(items)))
        in_order = torch.stack([embeds[number] for number in range(len(items))])
        return list(torch.split(in_order, [len(picture.items) for picture in pictures]))

    def collate(self, items: Sequence[PatchedImage]) -> PatchBatch:
        """Lay items of equal length side by side, on the device and in the dtype of the weights."""
        device, dtype = self.resampler.query.device, self.resampler.query.dtype
        table_side = self.config.image_size // self.config.patch_size
        places = _sent(torch.stack([_places(item) for item in items]), device)
        return PatchBatch(
            patches=_sent(torch.stack([item.patches for item in items]).to(dtype), device),
            position_ids=_sent(torch.stack([position_ids(i.rows, i.columns, table_side) for i in items]), device),
            rows=places[..., 0],
            columns=places[..., 1],
        )

    def _batches(self, items: Sequence[PatchedImage]) -> Iterator[list[int]]:
        """Numbers of items that are encoded together."""
        by_length: defaultdict[int, list[int]] = defaultdict(list)
        for number, item in enumerate(items):
            by_length[item.num_patches].append(number)
        size = self.config.max_batch_images
        for numbers in by_length.values():
            yield from (numbers[start : start + size] for start in range(0, len(numbers), size))

    def _encode_batch(self, items: Sequence[PatchedImage], numbers: list[int]) -> Iterator[tuple[int, Tensor]]:
        """returns: for each of these numbers, its item's [Q, E] in model dtype."""
        items = [items[number] for number in numbers]
        batch = self.collate(items)
        positions = grid_positions(
            batch.rows,
            batch.columns,
            num_steps=max(max(item.rows, item.columns) for item in items),
            width=self.config.output_size,
            dtype=batch.patches.dtype,
        )
        return zip(numbers, self.resampler(self.tower(batch), positions).unbind(), strict=True)


@dataclass(frozen=True, slots=True)
class PatchBatch:
    """Items of one forward pass, of L patches each. P = side of a patch.

    patches:       [B, 3, P, P * L] model dtype, laid out as in PatchedImage
    position_ids:  [B, L] int64, rows of the tower's position table
    rows, columns: [B, L] int64, where the patch lies in its item
    """

    patches: Tensor
    position_ids: Tensor
    rows: Tensor
    columns: Tensor


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
        """returns: [B, L, H] model dtype."""
        out: Tensor = self.post_layernorm(self.encoder(self.embeddings(batch)))
        return out


class _Embeddings(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.patch_size
        self.patch_embedding = nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=size, stride=size)
        self.position_embedding = nn.Embedding((config.image_size // size) ** 2, config.hidden_size)

    def forward(self, batch: PatchBatch) -> Tensor:
        """returns: [B, L, H] model dtype."""
        content = each_row(self.patch_embedding, batch.patches).flatten(2).transpose(1, 2)
        out: Tensor = content + self.position_embedding(batch.position_ids)
        return out


class _Encoder(nn.Module):
    def __init__(self, config: VisionConfig, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Layer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = _SelfAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = GeluFeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + each_row(self.mlp, self.layer_norm2(x))


class _SelfAttention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._head_dim = config.hidden_size // config.num_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Every patch attends to its whole item. x, result: [B, L, H] model dtype."""
        q, k, v = (
            each_row(project, x).view(*x.shape[:2], -1, self._head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attention(q, k, v, bias=None, scale=self._head_dim**-0.5)
        return each_row(self.out_proj, mixed.transpose(1, 2).flatten(2))


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


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; a GPU takes it from pinned memory, so that the host does not wait for its queue."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
