"""A checkpoint in the official layout: where its files are, which tensors they hold, and how networks get them.

Opening reads headers only. Loading reads one tensor after the other to its device and dtype, so that at no time more
than the networks and one tensor exist. Which networks there are: `model.py`. Names: REFERENCE 2.
Shown by tests/models/test_checkpoint.py.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from antiphon.errors import CheckpointError
from antiphon.models.minicpmo.config import RawConfig

VOCODER_FOLDER = Path("assets/token2wav")
VOICE_MODEL_FILES = ("campplus.onnx", "speech_tokenizer_v2_25hz.onnx")
"""What a voice is computed from a recording with; without them only voices given as numbers can be used."""

HIFT_PREFIX = "generator."
"""Before every name in `hift.pt` of minicpmo-utils 1.0.5; taken off."""

_UNUSED = ("tts.model.embed_tokens.weight", "tts.projector_spk.")
"""Starts of names that duplex never reads (REFERENCE 2.6): there or not, they are not loaded."""

_DOWNLOADED = (
    "config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*.json",
    "vocab.json",
    "merges.txt",
    f"{VOCODER_FOLDER}/*",
)
_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor in a file, as far as it is known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_parameters(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.num_parameters * self.dtype.itemsize


class TensorStore(Protocol):
    """Named tensors in files."""

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Of all tensors, by name."""

    def read(self, names: Collection[str], device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors on `device` in `dtype`, in file order; none but the yielded one is held."""


class WeightFile(Enum):
    """The three sets of tensors. The value stands before their names in messages."""

    MAIN = ""
    FLOW = "flow.pt:"
    HIFT = "hift.pt:"


Stores = Mapping[WeightFile, TensorStore]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An opened checkpoint."""

    folder: Path
    config: RawConfig
    stores: Stores

    @property
    def vocoder_folder(self) -> Path:
        return self.folder / VOCODER_FOLDER

    @property
    def is_tiny(self) -> bool:
        """Made by `write_tiny`: the weights are random and the speech is noise."""
        return self.config.get("antiphon_tiny") is True

    @property
    def missing_voice_models(self) -> tuple[str, ...]:
        return tuple(name for name in VOICE_MODEL_FILES if not (self.vocoder_folder / name).is_file())


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Find a checkpoint and read its configuration and headers.

    source: a local folder, or `owner/name` or `owner/name@revision` on the Hugging Face hub, fetched unless cached.
    Raises: CheckpointError if it cannot be found or a file is missing or damaged.
    """
    folder = _locate(source)
    vocoder_folder = folder / VOCODER_FOLDER
    return Checkpoint(
        folder=folder,
        config=_read_json(folder / "config.json"),
        stores={
            WeightFile.MAIN: _open_main(folder),
            WeightFile.FLOW: _PickledTensors(vocoder_folder / "flow.pt", prefix=""),
            WeightFile.HIFT: _PickledTensors(vocoder_folder / "hift.pt", prefix=HIFT_PREFIX),
        },
    )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A network, and where its weights are: their names in `file` are `prefix` and the names in the network."""

    name: str
    network: nn.Module
    file: WeightFile
    prefix: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all weights, by their names in the file."""
        return {self.prefix + name: tuple(weight.shape) for name, weight in self.network.state_dict().items()}

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Flow and vocoder stay in float32, as in the reference (REFERENCE 1.6)."""
        return model_dtype if self.file is WeightFile.MAIN else torch.float32


@dataclass(frozen=True, slots=True)
class Fit:
    """How files and networks match: nothing is listed when they do.

    misshaped: name, shape in the file, shape in the network, as text.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshaped: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        return not (self.missing or self.unexpected or self.misshaped)

    def __str__(self) -> str:
        lists = (("missing", self.missing), ("unexpected", self.unexpected), ("of a wrong shape", self.misshaped))
        return "; ".join(f"{len(names)} {what}: {shortened(names)}" for what, names in lists if names)


def fit(parts: Iterable[Part], stores: Stores) -> Fit:
    """Account for every tensor of every file."""
    wanted: dict[WeightFile, dict[str, tuple[int, ...]]] = {file: {} for file in stores}
    for part in parts:
        wanted[part.file] |= part.shapes()
    missing: list[str] = []
    unexpected: list[str] = []
    misshaped: list[str] = []
    for file, shapes in wanted.items():
        found = stores[file].headers
        missing += [file.value + name for name in shapes if name not in found]
        unexpected += [file.value + name for name in found if name not in shapes and not name.startswith(_UNUSED)]
        misshaped += [
            f"{file.value}{name} {list(found[name].shape)} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in found and found[name].shape != shape
        ]
    return Fit(tuple(missing), tuple(unexpected), tuple(misshaped))


def require_fit(parts: Sequence[Part], stores: Stores) -> None:
    """Raises: CheckpointError naming every tensor that is missing, unexpected or of a wrong shape."""
    found = fit(parts, stores)
    if not found.is_exact:
        raise CheckpointError(
            f"the checkpoint's tensors are not those of the model that its configuration describes: {found}; "
            "fetch the checkpoint again, or check that it is MiniCPM-o 4.5"
        )


def load(parts: Sequence[Part], stores: Stores, device: torch.device, dtype: torch.dtype) -> None:
    """Give networks that fit, built on the meta device, their weights. They are for inference only afterwards."""
    for part in parts:
        names = part.shapes().keys()
        weights = stores[part.file].read(names, device, part.dtype(dtype))
        part.network.load_state_dict({n.removeprefix(part.prefix): w for n, w in weights}, assign=True)
        part.network.requires_grad_(requires_grad=False).eval()


def shortened(names: Collection[str]) -> str:
    """The first few, and how many more there are."""
    num_more = len(names) - _MAX_NAMED
    return ", ".join(list(names)[:_MAX_NAMED]) + (f" and {num_more} more" if num_more > 0 else "")


def _locate(source: str | Path) -> Path:
    folder = Path(source)
    if folder.is_dir():
        return folder
    repository, _, revision = str(source).partition("@")
    try:
        found = huggingface_hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=list(_DOWNLOADED)
        )
    except Exception as error:  # the hub's client fails with the errors of whichever HTTP library it uses
        raise CheckpointError(
            f"{source} is no folder here, and cannot be fetched from the hub: {error}; check the name and the "
            "connection, or give a folder"
        ) from error
    return Path(found)


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}; fetch the file again") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} holds a {type(document).__name__}, not an object; fetch the file again")
    return document


def _open_main(folder: Path) -> TensorStore:
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        return _Safetensors((whole,))
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{index} has no `weight_map` from tensors to files; fetch the file again")
    return _Safetensors(tuple(folder / name for name in sorted(set(shards.values()))))


class _Safetensors:
    """One or several safetensors files that together hold a set of tensors."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._files = files
        self.headers: dict[str, TensorHeader] = {}
        for file in files:
            headers = _safetensors_headers(file)
            twice = self.headers.keys() & headers.keys()
            if twice:
                raise CheckpointError(f"{file} holds tensors that another shard holds too: {shortened(sorted(twice))}")
            self.headers.update(headers)

    def read(self, names: Collection[str], device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for path in self._files:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for name in file.offset_keys():
                    if name in names:
                        yield name, file.get_tensor(name).to(dtype)


def _safetensors_headers(path: Path) -> dict[str, TensorHeader]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            return {
                name: TensorHeader(tuple(one.get_shape()), _SAFETENSORS_DTYPES[one.get_dtype()])
                for name, one in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}; fetch the file again") from error
    except KeyError as error:
        raise CheckpointError(
            f"{path} holds tensors of type {error}; served are {', '.join(_SAFETENSORS_DTYPES)}"
        ) from error


_SAFETENSORS_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


class _PickledTensors:
    """A file of `torch.save` with nothing but tensors by name, mapped into memory rather than read.

    prefix: taken off the names that have it.
    """

    def __init__(self, path: Path, prefix: str) -> None:
        self._tensors = {name.removeprefix(prefix): tensor for name, tensor in _map_pickle(path).items()}
        self.headers = {name: TensorHeader(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def read(self, names: Collection[str], device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            if name in names:
                yield name, tensor.to(device, dtype)


def _map_pickle(path: Path) -> dict[str, Tensor]:
    try:
        document = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # a damaged file surfaces as an error of zip, pickle or torch
        raise CheckpointError(f"{path} is no readable file of torch.save: {error}; fetch the file again") from error
    if not isinstance(document, dict) or not all(isinstance(value, Tensor) for value in document.values()):
        raise CheckpointError(f"{path} holds something else than tensors by name; fetch the file again")
    return document
