"""Encodes pictures for the thinker: the SigLIP tower, and VisionEncoder, which runs it and the resampler over batches.

Not the picture files (`image.py`) nor the condensing (`resampler.py`). Parameter names are the checkpoint's under
`vpm.` (REFERENCE 2.2, 7.2). What is launched has items of equal length in a batch, so nothing is padded and an item's
embeddings do not depend on the rest of its batch: not at all in float32 on a CPU, elsewhere within rounding. What is
recorded is filled up (`patch_batch.py`). Tests: `tests/golden_kinds/vision.py`, `tests/models/test_vision.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from antiphon.kernels.attention.op import attention
from antiphon.models.minicpmo.captured import NumRuns, Recorder
from antiphon.models.minicpmo.config import VisionConfig
from antiphon.models.minicpmo.each_row import each_row
from antiphon.models.minicpmo.feed_forward import GeluFeedForward
from antiphon.models.minicpmo.image import PatchedImage, Picture
from antiphon.models.minicpmo.patch_batch import BatchLayout, PatchBatch, RecordedBatch
from antiphon.models.minicpmo.resampler import Resampler, grid_positions

_LAYERS_PREFIX = "vpm.encoder.layers."


class VisionEncoder:
    """Holds no session's state: any number of pictures in, their embeddings out. The two networks hold the weights."""

    def __init__(self, config: VisionConfig, tower: VisionTower, resampler: Resampler) -> None:
        self.config = config
        self.tower = tower
        self.resampler = resampler
        self.num_runs = NumRuns()
        self._recorded: list[RecordedBatch] = []

    def capture(self, sizes: Sequence[int], recorder: Recorder) -> Iterator[int]:
        """Record passes over so many items each, growing, before the first one; on a GPU only.

        Yields after each how many are left.
        """
        # The largest first: what it needs is then room for the others.
        for num_done, size in enumerate(reversed(sizes), start=1):
            self._recorded.insert(0, RecordedBatch(self._encode, self._layout, size, recorder))
            yield len(sizes) - num_done

    def encode(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """Embed all items of all pictures, `max_batch_images` at a time at most.

        returns: per picture [N, Q, E] model dtype; N = items of the picture, the view first
        """
        items = [item for picture in pictures for item in picture.items]
        if not items:
            return []
        embeds = dict(chain.from_iterable(self._encode_some(items, numbers) for numbers in self._batches(items)))
        in_order = torch.stack([embeds[number] for number in range(len(items))])
        return list(torch.split(in_order, [len(picture.items) for picture in pictures]))

    def collate(self, items: Sequence[PatchedImage]) -> PatchBatch:
        """Lay items of equal length side by side, on the device and in the dtype of the weights."""
        return self._layout.exactly(items)

    @property
    def _layout(self) -> BatchLayout:
        query = self.resampler.query
        return BatchLayout.of(self.config, query.device, query.dtype)

    def _batches(self, items: Sequence[PatchedImage]) -> Iterator[list[int]]:
        """Numbers of items that are encoded together: those that recordings hold, and others of equal length."""
        longest = max((one.num_patches for one in self._recorded), default=0)
        alike: defaultdict[int, list[int]] = defaultdict(list)
        for number, item in enumerate(items):
            alike[max(item.num_patches, longest)].append(number)
        for length, numbers in alike.items():
            size = self._recorded[-1].num_items if length == longest else self.config.max_batch_images
            yield from (numbers[start : start + size] for start in range(0, len(numbers), size))

    def _encode_some(self, items: Sequence[PatchedImage], numbers: list[int]) -> Iterator[tuple[int, Tensor]]:
        """returns: for each of these numbers, its item's [Q, E] in model dtype."""
        together = [items[number] for number in numbers]
        fitting = (one for one in self._recorded if one.holds(together))
        recorded = next(fitting, None)
        self.num_runs = self.num_runs.one_more(is_replayed=recorded is not None)
        embeds = self._encode(self.collate(together)) if recorded is None else recorded.run(together)
        return zip(numbers, embeds.unbind(), strict=True)

    def _encode(self, batch: PatchBatch) -> Tensor:
        """returns: [B, Q, E] model dtype."""
        positions = grid_positions(
            batch.rows,
            batch.columns,
            num_steps=batch.num_steps,
            width=self.config.output_size,
            dtype=batch.patches.dtype,
        )
        return self.resampler(self.tower(batch), positions, batch.hidden)


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
        out: Tensor = self.post_layernorm(self.encoder(self.embeddings(batch), batch.hidden))
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

    def forward(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, hidden)
        return x


class _Layer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = _SelfAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = GeluFeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), hidden)
        return x + each_row(self.mlp, self.layer_norm2(x))


class _SelfAttention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._head_dim = config.hidden_size // config.num_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        """Every patch attends to its whole item. x, result: [B, L, H] model dtype. hidden: as in `PatchBatch`."""
        q, k, v = (
            each_row(project, x).view(*x.shape[:2], -1, self._head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attention(q, k, v, bias=hidden, scale=self._head_dim**-0.5)
        return each_row(self.out_proj, mixed.transpose(1, 2).flatten(2))
