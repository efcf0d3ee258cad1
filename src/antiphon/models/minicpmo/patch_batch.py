"""Items of pictures on their way to the vision tower: side by side as they are, or filled up for a recorded pass.

Parts of a picture differ in length by the picture's shape, by a few percent for all usual shapes. What is filled up is
seen by no patch that is real. Not the networks (`vision.py`). Shown by tests/models/test_vision.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.models.minicpmo.captured import Recorder
from antiphon.models.minicpmo.config import VisionConfig
from antiphon.models.minicpmo.image import PatchedImage

_STEP = 64
"""Patches that recorded items are a multiple of, which keeps rows of a mask aligned."""


@dataclass(frozen=True, slots=True, eq=False)
class PatchBatch:
    """Items of one forward pass, of L patches each. P = side of a patch.

    patches:       [B, 3, P, P * L] model dtype, laid out as in PatchedImage
    position_ids:  [B, L] int64, rows of the tower's position table
    rows, columns: [B, L] int64, where the patch lies in its item
    num_steps:     rows and columns are below it
    hidden:        [B, 1, 1, L] model dtype, -inf for patches that nobody may see, else 0; None if all are seen
    """

    patches: Tensor
    position_ids: Tensor
    rows: Tensor
    columns: Tensor
    num_steps: int
    hidden: Tensor | None


Encode = Callable[[PatchBatch], Tensor]
"""[B, Q, E] model dtype."""


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How items lie in a batch. patch_size: its side. table_side: of the tower's positions. num_patches: recorded."""

    num_channels: int
    patch_size: int
    table_side: int
    num_patches: int
    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def of(config: VisionConfig, device: torch.device, dtype: torch.dtype) -> BatchLayout:
        """Items of pictures whose sides are as 1 to 16 at most have up to 1 080 patches, where 1 024 are aimed at."""
        usual = (config.scale_resolution // config.patch_size) ** 2
        return BatchLayout(
            num_channels=config.num_channels,
            patch_size=config.patch_size,
            table_side=config.image_size // config.patch_size,
            num_patches=usual + max(_STEP, usual // 16),
            device=device,
            dtype=dtype,
        )

    def exactly(self, items: Sequence[PatchedImage]) -> PatchBatch:
        """Items of equal length."""
        places = torch.stack([_places(item) for item in items])
        return PatchBatch(
            patches=_sent(torch.stack([item.patches for item in items]).to(self.dtype), self.device),
            position_ids=_sent(torch.stack([self._position_ids(item) for item in items]), self.device),
            rows=_sent(places[..., 0], self.device),
            columns=_sent(places[..., 1], self.device),
            num_steps=max(max(item.rows, item.columns) for item in items),
            hidden=None,
        )

    def filled_up(self, items: Sequence[PatchedImage]) -> tuple[Tensor, Tensor]:
        """Items of any lengths up to `num_patches`, on the device: patches, and a list of numbers.

        Returns: as in `PatchBatch`, and [3, B, L] int64: position ids, rows, columns; -1 in all of them for nothing.
        """
        numbers = torch.full((3, len(items), self.num_patches), _NOTHING, dtype=torch.int64)
        patches = torch.zeros(self.patches_shape(len(items)), dtype=self.dtype)
        for index, item in enumerate(items):
            own = slice(item.num_patches)
            patches[index, ..., : item.patches.shape[-1]] = item.patches
            numbers[0, index, own] = self._position_ids(item)
            numbers[1:, index, own] = _places(item).T
        return _sent(patches, self.device), _sent(numbers, self.device)

    def patches_shape(self, num_items: int) -> tuple[int, int, int, int]:
        return num_items, self.num_channels, self.patch_size, self.patch_size * self.num_patches

    def _position_ids(self, item: PatchedImage) -> Tensor:
        return position_ids(item.rows, item.columns, self.table_side)


_NOTHING = -1


class RecordedBatch:
    """A pass over up to so many items, recorded. A replay overwrites what the one before it gave."""

    def __init__(self, encode: Encode, layout: BatchLayout, num_items: int, recorder: Recorder) -> None:
        self.num_items = num_items
        self._layout = layout
        self._patches = torch.zeros(layout.patches_shape(num_items), dtype=layout.dtype, device=layout.device)
        # Everything is seen of an item that is none, so that its softmax is of something.
        self._numbers = torch.zeros((3, num_items, layout.num_patches), dtype=torch.int64, device=layout.device)
        self._replay = recorder.record(lambda: encode(self._batch()))

    @property
    def num_patches(self) -> int:
        """Of each item, at most."""
        return self._layout.num_patches

    def holds(self, items: Sequence[PatchedImage]) -> bool:
        return len(items) <= self.num_items and all(item.num_patches <= self.num_patches for item in items)

    def run(self, items: Sequence[PatchedImage]) -> Tensor:
        """[B, Q, E] of these items. What stands behind them was there before, and comes to nothing."""
        patches, numbers = self._layout.filled_up(items)
        self._patches[: len(items)] = patches
        self._numbers[:, : len(items)] = numbers
        return self._replay()[: len(items)].clone()

    def _batch(self) -> PatchBatch:
        is_nothing = self._numbers[0] == _NOTHING
        hidden = torch.zeros(is_nothing.shape, dtype=self._layout.dtype, device=self._layout.device)
        ids, rows, columns = self._numbers.clamp(min=0)
        hidden = hidden.masked_fill(is_nothing, float("-inf"))[:, None, None]
        return PatchBatch(self._patches, ids, rows, columns, self.num_patches, hidden)


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
