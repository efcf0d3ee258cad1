"""Golden numbers of the vision front end: picture files to thinker embeddings, by the code that serves them.

What every recorded tensor is: `golden/vision/README.md`. A tensor that this module does not know fails its case.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from antiphon.models.minicpmo.config import vision_config
from antiphon.models.minicpmo.image import Grid, PatchedImage, Picture, cut_picture, decode_picture
from antiphon.models.minicpmo.resampler import Resampler
from antiphon.models.minicpmo.vision import VisionEncoder, VisionTower, count_layers
from golden_kinds.report import Comparison, Outcome

KIND = "vision"
_TOLERANCE = 1e-4  # absolute, from the folder's README


def run(folder: Path) -> Iterator[Outcome]:
    encoder = _encoder(folder)
    tensors = load_file(folder / "cases.safetensors")
    for case in sorted({name.partition(".")[0] for name in tensors}):
        recorded = {name.removeprefix(f"{case}."): t for name, t in tensors.items() if name.startswith(f"{case}.")}
        picture = _recorded_picture(recorded) or _cut_file(folder, case, encoder)
        with torch.inference_mode():
            yield _compare(case, recorded, picture, encoder)
    yield from _pictures(folder)


def _encoder(folder: Path) -> VisionEncoder:
    config = vision_config(json.loads((folder / "config.json").read_text()))
    weights = load_file(folder / "weights.safetensors")
    with torch.device("meta"):
        tower, resampler = VisionTower(config, count_layers(weights)), Resampler(config)
    parts: tuple[tuple[str, nn.Module], ...] = (("vpm.", tower), ("resampler.", resampler))
    for prefix, part in parts:
        state = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
        part.load_state_dict(state, assign=True)
    return VisionEncoder(config, tower, resampler)


def _recorded_picture(recorded: dict[str, Tensor]) -> Picture | None:
    """The recorded patches where the case starts from them; None where it starts from a picture file."""
    if "grid" in recorded:
        return None
    sizes = recorded["tgt_sizes"].tolist()
    items = [PatchedImage(recorded[f"{i}.pixel_values"], rows, columns) for i, (rows, columns) in enumerate(sizes)]
    return Picture(Grid(0, 0), tuple(items))


def _cut_file(folder: Path, case: str, encoder: VisionEncoder) -> Picture:
    stem, _, max_slices = case.rpartition("_s")
    image = decode_picture(folder / "images" / f"{stem}.png")
    return cut_picture(image, encoder.config, max_slices=int(max_slices))


def _compare(case: str, recorded: dict[str, Tensor], picture: Picture, encoder: VisionEncoder) -> Outcome:
    found = Comparison(KIND, case)
    found.equal([[item.rows, item.columns] for item in picture.items], recorded["tgt_sizes"])
    if len(picture.items) != len(recorded["tgt_sizes"]):
        return found.outcome()
    batches = [encoder.collate([item]) for item in picture.items]
    (embeds,) = encoder.encode([picture])
    for name, want in recorded.items():
        index, _, kind = name.rpartition(".")
        if index:
            batch = batches[int(index)]
            item, ids, states = picture.items[int(index)], batch.position_ids[0], encoder.tower(batch)[0]
            _compare_item(found, kind, want, item, ids, states)
        elif kind == "grid":
            found.equal([picture.grid.columns, picture.grid.rows], want)
        elif kind == "embeds":
            found.close(embeds, want, _TOLERANCE)
        else:
            found.equal(kind, "tgt_sizes")
    return found.outcome()


def _compare_item(found: Comparison, kind: str, want: Tensor, item: PatchedImage, ids: Tensor, states: Tensor) -> None:
    """ids: [L] int64, states: [L, H]; the recorded parts carry their number of patches or their stride in the name."""
    name = kind.rstrip("0123456789")
    number = kind.removeprefix(name)
    size = item.patches.shape[1]
    match name:
        case "pixel_values":
            found.close(item.patches, want, _TOLERANCE)
        case "pixel_values_first":
            found.close(item.patches[..., : size * int(number)], want, _TOLERANCE)
        case "pixel_values_last":
            found.close(item.patches[..., -size * int(number) :], want, _TOLERANCE)
        case "patch_means":
            found.close(item.patches.view(3, size, -1, size).mean((1, 3)).T, want, _TOLERANCE)
        case "position_ids":
            found.equal(ids, want)
        case "tower":
            found.close(states, want, _TOLERANCE)
        case "tower_every":
            found.close(states[:: int(number)], want, _TOLERANCE)
        case _:
            found.equal(kind, "a recorded tensor that this module knows")


def _pictures(folder: Path) -> Iterator[Outcome]:
    """The picture files themselves: the README lists the SHA-256 of each one's decoded bytes."""
    readme = folder / "README.md"
    listed = re.findall(r"`(images/\S+)` \| ([0-9a-f]{64})", readme.read_text()) if readme.exists() else []
    found = Comparison(KIND, "pictures")
    for name, digest in listed:
        found.equal(hashlib.sha256(decode_picture(folder / name).tobytes()).hexdigest(), digest)
    if listed:
        yield found.outcome()
