"""The vision front end beyond the golden numbers: bad pictures, sizes, batches, and what each network's names are."""

from __future__ import annotations

import contextlib
import io
import math
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from antiphon.errors import ImageError
from antiphon.models.minicpmo.captured import NumRuns
from antiphon.models.minicpmo.config import VisionConfig
from antiphon.models.minicpmo.image import (
    Grid,
    PatchedImage,
    Picture,
    cut_picture,
    decode_picture,
    slice_grid,
)
from antiphon.models.minicpmo.patch_batch import position_ids
from antiphon.models.minicpmo.resampler import Resampler, grid_positions
from antiphon.models.minicpmo.vision import VisionEncoder, VisionTower, count_layers
from fakes.rerun import Rerun

RELEASED_TABLE_SIDE = 70
ROUNDING = 1e-5
"""Of embeddings with values near 1, whose sums have more terms, of which some are zero."""
CONFIG = VisionConfig(
    hidden_size=16,
    num_layers=3,
    num_heads=2,
    intermediate_size=24,
    patch_size=14,
    num_channels=3,
    image_size=980,
    layer_norm_eps=1e-6,
    query_num=5,
    scale_resolution=448,
    output_size=256,
    max_batch_images=16,
)
SMALL = replace(CONFIG, scale_resolution=56)  # 16 patches per item: the networks' tests need no more


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, file_format: str, exif: Image.Exif | None = None) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **({"exif": exif} if exif else {}))
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that states its size and ends where its pixels would begin."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 1000) + b"IDAT"


def build_encoder(config: VisionConfig, num_layers: int = 2) -> VisionEncoder:
    """Seeded random weights, loaded as a checkpoint is: modules on meta, tensors assigned by name."""
    generator = torch.Generator().manual_seed(7)
    with torch.device("meta"):
        tower, resampler = VisionTower(config, num_layers), Resampler(config)
    for part in (tower, resampler):
        state = {n: torch.randn(t.shape, generator=generator) * 0.2 for n, t in part.state_dict().items()}
        part.load_state_dict(state, assign=True)
    return VisionEncoder(config, tower, resampler)


def encode(encoder: VisionEncoder, *pictures: Picture) -> list[Tensor]:
    with torch.inference_mode():
        return encoder.encode(pictures)


# Decoding


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "GIF", "JPEG"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_every_accepted_format_becomes_rgb(file_format: str, mode: str) -> None:
    image = decode_picture(encoded(noise(30, 20).convert(mode), file_format))
    assert (image.mode, image.size) == ("RGB", (30, 20))


def test_a_lossless_picture_keeps_its_pixels(tmp_path: Path) -> None:
    image = noise(31, 17)
    path = tmp_path / "picture.png"
    image.save(path)
    assert decode_picture(path).tobytes() == image.tobytes()
    assert decode_picture(path.read_bytes()).tobytes() == image.tobytes()


def test_a_rotation_noted_in_the_file_is_not_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter turn
    assert decode_picture(encoded(noise(30, 20), "JPEG", exif)).size == (30, 20)


@pytest.mark.parametrize("data", [b"", b"not a picture", encoded(noise(64, 64), "JPEG")[:900], png_header(8, 8)])
def test_what_is_not_a_whole_picture_is_refused(data: bytes) -> None:
    with pytest.raises(ImageError, match="cannot be read"):
        decode_picture(data)


def test_a_format_outside_the_list_is_refused() -> None:
    with pytest.raises(ImageError, match="JPEG, PNG, WEBP, GIF"):
        decode_picture(encoded(noise(8, 8), "TIFF"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="nothing here.png"):
        decode_picture(tmp_path / "nothing here.png")


def test_an_oversized_picture_is_refused_by_its_header_alone() -> None:
    with pytest.raises(ImageError, match="8000 x 8000 pixels, the limit is 40000000"):
        decode_picture(png_header(8000, 8000))


def test_a_size_beyond_pillows_own_limit_is_refused_too() -> None:
    with pytest.raises(ImageError):
        decode_picture(png_header(60_000, 60_000))


def test_the_pixel_limit_itself_is_allowed() -> None:
    data = encoded(noise(30, 20), "PNG")
    assert decode_picture(data, max_pixels=600).size == (30, 20)
    with pytest.raises(ImageError):
        decode_picture(data, max_pixels=599)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF"]), st.data())
def test_damage_never_raises_anything_but_image_error(file_format: str, data: st.DataObject) -> None:
    damaged = bytearray(encoded(noise(12, 9), file_format))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ImageError):
        decode_picture(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]), max_pixels=10_000)


# Sizes and patches


@pytest.mark.parametrize(
    ("size", "max_slices", "grid", "view"),
    [  # the examples of REFERENCE 7.1
        ((640, 480), 1, Grid(0, 0), (28, 37)),
        ((1280, 720), 1, Grid(0, 0), (24, 43)),
        ((448, 448), 1, Grid(0, 0), (32, 32)),
        ((448, 448), 9, Grid(0, 0), (32, 32)),
        ((1280, 720), 2, Grid(2, 1), (24, 43)),
        ((1280, 720), 4, Grid(3, 1), (24, 43)),
        ((1280, 720), 9, Grid(3, 2), (24, 43)),
    ],
)
def test_the_grid_and_the_view_are_the_references(
    size: tuple[int, int], max_slices: int, grid: Grid, view: tuple[int, int]
) -> None:
    picture = cut_picture(Image.new("RGB", size), CONFIG, max_slices=max_slices)
    assert picture.grid == grid
    assert (picture.items[0].rows, picture.items[0].columns) == view
    assert len(picture.items) == 1 + grid.columns * grid.rows


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 9))
def test_no_other_permitted_grid_is_nearer_in_shape(width: int, height: int, max_slices: int) -> None:
    grid = slice_grid(width, height, CONFIG, max_slices=max_slices)
    filled = math.ceil(width * height / 448**2)
    if min(filled, max_slices) <= 1:
        assert grid == Grid(0, 0)
        return

    def distance(columns: int, rows: int) -> float:
        return abs(math.log(width / height) - math.log(columns / rows))

    permitted = [
        (c, r)
        for c in range(1, 11)
        for r in range(1, 11)
        if 2 <= c * r <= max_slices and abs(c * r - min(filled, max_slices)) <= 1
    ]
    assert (grid.columns, grid.rows) in permitted
    assert distance(grid.columns, grid.rows) == min(distance(*shape) for shape in permitted)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 5))
def test_items_have_whole_patches_and_a_bounded_number_of_them(width: int, height: int, max_slices: int) -> None:
    config = replace(CONFIG, scale_resolution=112)
    assume(max(width, height) <= 64 * min(width, height))
    picture = cut_picture(Image.new("RGB", (width, height)), config, max_slices=max_slices)
    for item in picture.items:
        assert item.patches.shape == (3, 14, 14 * item.rows * item.columns)
        assert item.num_patches <= 2 * 64  # rounding to whole patches at most doubles the 64 of a square


@pytest.mark.parametrize("size", [(1, 1025), (1025, 1), (3, 3076)])
def test_a_sliver_whose_patches_would_grow_without_bound_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match="at most 1024 times the other"):
        cut_picture(Image.new("RGB", size), CONFIG, max_slices=1)


def test_patches_lie_side_by_side_row_by_row_and_black_is_minus_one() -> None:
    image = noise(448, 448)  # exactly an item: nothing is resized
    (item,) = cut_picture(image, CONFIG, max_slices=1).items
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
    for row, column in ((0, 0), (0, 31), (1, 0), (17, 5)):
        start = 14 * (row * 32 + column)
        want = pixels[:, 14 * row : 14 * row + 14, 14 * column : 14 * column + 14]
        torch.testing.assert_close(item.patches[..., start : start + 14], want)
    assert item.patches.is_contiguous()


def test_slices_tile_the_picture_from_left_to_right_and_down() -> None:
    image = Image.new("RGB", (896, 896))
    for index, corner in enumerate(((0, 0), (448, 0), (0, 448), (448, 448))):
        image.paste((60 * index, 0, 0), (*corner, corner[0] + 448, corner[1] + 448))
    picture = cut_picture(image, CONFIG, max_slices=4)
    assert picture.grid == Grid(2, 2)
    middles = [item.patches[0, 7, 14 * (item.num_patches // 2 + 16)].item() for item in picture.items[1:]]
    assert middles == pytest.approx([index * 60 / 127.5 - 1 for index in range(4)])


# Positions


@pytest.mark.parametrize("sizes", [(1,), (1, 4)])
def test_a_recorded_pass_comes_to_what_a_launched_one_does(sizes: tuple[int, ...]) -> None:
    """Whatever else is in it, and was in it before; and what is too long for it is launched."""
    launched, recorded = build_encoder(SMALL), build_encoder(SMALL)
    with torch.inference_mode():
        assert [*recorded.capture(sizes, Rerun())] == [*reversed(range(len(sizes)))]
    pictures = [
        cut_picture(noise(*size, seed=number), SMALL, max_slices=4)
        for number, size in enumerate([(56, 56), (200, 90), (90, 310), (56, 60)])
    ]
    for together in (pictures, pictures[::-1], pictures[1:2]):
        for one, other in zip(encode(recorded, *together), encode(launched, *together), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=ROUNDING)
    num_replayed = recorded.num_runs.num_replayed
    assert recorded.num_runs == NumRuns(num_replayed, 0)
    sliver = Picture(Grid(0, 0), (PatchedImage(torch.randn(3, 14, 14 * 100), 1, 100),))
    assert torch.equal(encode(recorded, sliver)[0], encode(launched, sliver)[0])
    assert recorded.num_runs == NumRuns(num_replayed, 1)


def test_position_ids_miss_the_boundaries_that_float32_misses_in_the_reference() -> None:
    lower = {
        25: [5, 10, 15, 20],
        49: [7, 14, 35, 42],
        50: [5, 10, 15, 20, 30, 40],
        55: [11, 22, 33, 44],
        58: [29],
    }  # REFERENCE 7.2
    for count in range(1, RELEASED_TABLE_SIDE + 1):
        exact = torch.arange(count) * RELEASED_TABLE_SIDE // count
        exact[lower.get(count, [])] -= 1
        assert position_ids(1, count, RELEASED_TABLE_SIDE).tolist() == exact.tolist(), count
        assert position_ids(count, 1, RELEASED_TABLE_SIDE).tolist() == (exact * RELEASED_TABLE_SIDE).tolist(), count


@pytest.mark.parametrize("count", [71, 97, 683, 1024])
def test_a_side_longer_than_the_table_has_one_position_per_patch(count: int) -> None:
    ids = position_ids(1, count, RELEASED_TABLE_SIDE)
    assert len(ids) == count
    assert (ids.diff() >= 0).all()
    assert ids[-1] == RELEASED_TABLE_SIDE - 1


def test_grid_positions_encode_the_column_first_and_the_row_last() -> None:
    rows, columns = torch.tensor([[0, 2]]), torch.tensor([[3, 0]])
    got = grid_positions(rows, columns, num_steps=4, width=8, dtype=torch.float32)
    slow = 10_000**-0.5
    want = torch.tensor(
        [
            [math.sin(3), math.sin(3 * slow), math.cos(3), math.cos(3 * slow), 0, 0, 1, 1],
            [0, 0, 1, 1, math.sin(2), math.sin(2 * slow), math.cos(2), math.cos(2 * slow)],
        ]
    )
    torch.testing.assert_close(got[0], want)


# Networks and batches


def test_parameter_names_and_shapes_are_the_checkpoints() -> None:
    with torch.device("meta"):
        tower, resampler = VisionTower(CONFIG, 2), Resampler(CONFIG)
    assert len(tower.state_dict()) == 5 + 16 * 2  # REFERENCE 2.2
    assert tower.state_dict()["embeddings.position_embedding.weight"].shape == (4900, 16)
    assert tower.state_dict()["encoder.layers.1.mlp.fc1.weight"].shape == (24, 16)
    assert len(resampler.state_dict()) == 13  # REFERENCE 2.3
    assert resampler.state_dict()["attn.in_proj_weight"].shape == (768, 256)
    assert not list(tower.buffers()) + list(resampler.buffers())


def test_the_checkpoint_decides_how_many_layers_there_are() -> None:
    names = [f"vpm.encoder.layers.{i}.self_attn.q_proj.weight" for i in (0, 1, 10)]
    assert count_layers([*names, "apm.layers.30.fc1.weight", "vpm.post_layernorm.weight"]) == 11
    assert count_layers(["llm.lm_head.weight"]) == 0


def test_company_changes_no_bit_of_an_item() -> None:
    encoder = build_encoder(SMALL)
    pictures = [cut_picture(noise(*size), SMALL, max_slices=3) for size in ((56, 56), (200, 40), (30, 90), (120, 70))]
    together = encode(encoder, *pictures)
    assert [len(embeds) for embeds in together] == [len(picture.items) for picture in pictures]
    for picture, embeds in zip(pictures, together, strict=True):
        alone = [encode(encoder, Picture(Grid(0, 0), (item,)))[0] for item in picture.items]
        assert torch.equal(embeds, torch.cat(alone))


def test_a_batch_says_where_each_patch_lies() -> None:
    items = [PatchedImage(torch.ones(3, 14, 14 * 6), rows, columns) for rows, columns in ((3, 2), (2, 3))]
    batch = build_encoder(SMALL).collate(items)
    assert batch.rows.tolist() == [[0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1]]
    assert batch.columns.tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2]]


def test_the_resampler_is_multi_head_attention_whose_keys_alone_carry_the_position() -> None:
    resampler = build_encoder(SMALL).resampler
    torch_attention = torch.nn.MultiheadAttention(256, num_heads=2, batch_first=True)
    torch_attention.load_state_dict(resampler.attn.state_dict())
    generator = torch.Generator().manual_seed(1)
    patches = torch.randn(3, 6, 16, generator=generator)
    positions = torch.randn(3, 6, 256, generator=generator)
    with torch.inference_mode():
        values = resampler.ln_kv(resampler.kv_proj(patches))
        queries = resampler.ln_q(resampler.query).expand(3, -1, -1)
        seen, _ = torch_attention(queries, values + positions, values)
        want = resampler.ln_post(seen) @ resampler.proj
        torch.testing.assert_close(resampler(patches, positions, None), want, atol=1e-4, rtol=1e-5)


def test_a_long_list_is_encoded_in_batches_of_at_most_the_configured_size() -> None:
    pictures = [cut_picture(noise(56, 56, seed=i), SMALL, max_slices=1) for i in range(5)]
    pictures.insert(2, cut_picture(noise(90, 30), SMALL, max_slices=1))
    whole = encode(build_encoder(SMALL), *pictures)
    encoder = build_encoder(replace(SMALL, max_batch_images=2))
    sizes: list[int] = []
    encoder.tower.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0].patches)))
    for got, want in zip(encode(encoder, *pictures), whole, strict=True):
        assert torch.equal(got, want)
    assert sizes == [2, 2, 1, 1]


def test_no_pictures_give_no_embeddings() -> None:
    assert encode(build_encoder(SMALL)) == []


def test_half_precision_weights_give_half_precision_embeddings() -> None:
    encoder = build_encoder(SMALL)
    pictures = [cut_picture(noise(*size), SMALL, max_slices=1) for size in ((56, 56), (40, 90))]
    want = encode(encoder, *pictures)
    encoder.tower.bfloat16()
    encoder.resampler.bfloat16()
    for got, full in zip(encode(encoder, *pictures), want, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.float() - full).norm() < 0.05 * full.norm()
