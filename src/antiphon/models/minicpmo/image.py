"""From bytes to patches: decodes a picture, cuts it into the items the vision tower sees, lays out their patches.

An item is the whole picture scaled to about `scale_resolution`² pixels (the view), or one cell of a grid drawn over it
(a slice). Pure functions on the CPU; not the networks (`vision.py`) and not the tokens around the items. A rotation
noted in the file is not applied, as in the reference (REFERENCE 7.1, 7.2). Tests: `tests/models/test_vision.py`.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from antiphon.errors import ImageError
from antiphon.models.minicpmo.config import VisionConfig

MAX_PICTURE_PIXELS = 40_000_000
"""An 8K picture passes; decoded it takes 120 MB."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
"""What browsers and chat clients send. Pillow reads more, but some of its readers start other programs."""

_PIXEL_MEAN = _PIXEL_DEVIATION = 0.5

# A damaged file makes Pillow's readers raise any of these; the two bomb classes are its own, looser limit.
_DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)


@dataclass(frozen=True, slots=True)
class Grid:
    """Slices drawn over a picture; 0 x 0 when it is not sliced."""

    columns: int
    rows: int


@dataclass(frozen=True, slots=True)
class PatchedImage:
    """One item, ready for the tower.

    patches: [3, P, P * L] float32 on the CPU, values -1 to 1; L = rows * columns patches of P x P pixels, row by row.
    Axes: channel, row in the patch, patch * P + column in the patch.
    """

    patches: Tensor
    rows: int
    columns: int

    @property
    def num_patches(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Picture:
    """What the model sees of one picture. items: the view, then the slices row by row."""

    grid: Grid
    items: tuple[PatchedImage, ...]


def decode_picture(source: bytes | Path, *, max_pixels: int = MAX_PICTURE_PIXELS) -> Image.Image:
    """Read a picture file into RGB; of an animation the first image.

    Raises: ImageError if it is not one of FORMATS, is damaged, or has more than `max_pixels` pixels. The size is read
    from the header: nothing of an oversized picture is decoded.
    """
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            width, height = image.size
            if width * height <= max_pixels:
                return image.convert("RGB")
    except _DECODING_ERRORS as error:
        name = "the picture" if isinstance(source, bytes) else f"the picture {source}"
        raise ImageError(
            f"{name} cannot be read ({type(error).__name__}); send a whole, undamaged file, one of {', '.join(FORMATS)}"
        ) from error
    raise ImageError(f"the picture has {width} x {height} pixels, the limit is {max_pixels} in all; send a smaller one")


def cut_picture(image: Image.Image, config: VisionConfig, *, max_slices: int) -> Picture:
    """Resize and cut an RGB picture into items.

    max_slices: at most this many slices follow the view; 1 means none, since a single slice would repeat the view.
    Raises: ImageError if one side is so much longer than the other that the number of patches would not be bounded.
    """
    width, height = image.size
    check_sides(width, height, config)
    grid = slice_grid(width, height, config, max_slices=max_slices)
    images = [_resized(image, *_item_size(width, height, config))]
    if grid.columns:
        images += _slices(image, grid, config)
    return Picture(grid, tuple(_patched(item, config.patch_size) for item in images))


def slice_grid(width: int, height: int, config: VisionConfig, *, max_slices: int) -> Grid:
    """Of the grids with about as many cells as the picture fills, the one nearest to it in shape (REFERENCE 7.1)."""
    num_wanted = min(math.ceil(width * height / config.scale_resolution**2), max_slices)
    if num_wanted <= 1:
        return Grid(0, 0)
    candidates = [
        Grid(columns, num_slices // columns)
        for num_slices in (num_wanted - 1, num_wanted, num_wanted + 1)
        if 1 < num_slices <= max_slices
        for columns in range(1, num_slices + 1)
        if num_slices % columns == 0
    ]
    shape = math.log(width / height)
    return min(candidates, key=lambda grid: abs(shape - math.log(grid.columns / grid.rows)))  # the first of equals


def check_sides(width: int, height: int, config: VisionConfig) -> None:
    """Refuse a picture whose short side would shrink below one patch: it is rounded up, so the patches would grow."""
    max_ratio = (config.scale_resolution // config.patch_size) ** 2
    if max(width, height, 1) > max_ratio * min(width, height):
        raise ImageError(
            f"the picture has {width} x {height} pixels, one side may be at most {max_ratio} times the other; crop it"
        )


def _item_size(width: float, height: float, config: VisionConfig) -> tuple[int, int]:
    """Width and height of about `scale_resolution`² pixels in the given proportion, in whole patches (REFERENCE 7.1).

    The reference can also leave a small picture as it is, but never asks for it: what it slices is larger than this.
    """
    ratio = width / height
    scaled_height = int(config.scale_resolution / math.sqrt(ratio))
    scaled_width = int(scaled_height * ratio)
    return _nearest_multiple(scaled_width, config.patch_size), _nearest_multiple(scaled_height, config.patch_size)


def _nearest_multiple(value: float, step: int) -> int:
    return max(round(value / step) * step, step)


def _slices(image: Image.Image, grid: Grid, config: VisionConfig) -> list[Image.Image]:
    """Resize the picture so that every cell of the grid is an item of the right size, and cut it, row by row."""
    width, height = _item_size(
        _nearest_multiple(image.width, grid.columns) / grid.columns,
        _nearest_multiple(image.height, grid.rows) / grid.rows,
        config,
    )
    whole = _resized(image, width * grid.columns, height * grid.rows)
    corners = [(column * width, row * height) for row in range(grid.rows) for column in range(grid.columns)]
    return [whole.crop((x, y, x + width, y + height)) for x, y in corners]


def _resized(image: Image.Image, width: int, height: int) -> Image.Image:
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _patched(image: Image.Image, size: int) -> PatchedImage:
    rows, columns = image.height // size, image.width // size
    pixels = torch.from_numpy(np.array(image)).view(rows, size, columns, size, -1)
    patches = pixels.permute(4, 1, 0, 2, 3).flatten(2).to(torch.float32)  # moved as bytes, a quarter of the traffic
    return PatchedImage(patches.div_(255).sub_(_PIXEL_MEAN).div_(_PIXEL_DEVIATION), rows, columns)
