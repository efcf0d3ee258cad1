"""Loading measured on small dimensions: what is written first is what was asked for."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from antiphon.bench.loading import run_loading, write_random
from antiphon.bench.results import Quantity
from antiphon.config import Dtype
from antiphon.errors import CheckpointError, ConfigError
from antiphon.models.minicpmo.checkpoint import HIFT_PREFIX, VOCODER_FOLDER, fit, open_checkpoint
from antiphon.models.minicpmo.config import audio_config, talker_config, thinker_config, vision_config
from antiphon.models.minicpmo.flow_config import read_flow_yaml
from antiphon.models.minicpmo.model import ModelConfig, build_model, model_config
from antiphon.models.minicpmo.released import RELEASED, config_document, flow_document
from build import CPU, copied_checkpoint

MAX_SHARD_BYTES = 400_000


@pytest.fixture(scope="module")
def small(tiny_checkpoint: Path) -> ModelConfig:
    return model_config(open_checkpoint(tiny_checkpoint))


@pytest.fixture(scope="module")
def written(tiny_checkpoint: Path, small: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "checkpoint"
    write_random(folder, small, tiny_checkpoint, CPU, MAX_SHARD_BYTES)
    return folder


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_dimensions_written_are_the_dimensions_read(written: Path, small: ModelConfig) -> None:
    checkpoint = open_checkpoint(written)
    assert model_config(checkpoint) == small
    assert fit(build_model(small).parts(), checkpoint.stores).is_exact


def test_the_configuration_files_can_say_the_released_dimensions(tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text(yaml.safe_dump(flow_document(RELEASED.flow)))
    assert read_flow_yaml(tmp_path / "flow.yaml") == RELEASED.flow
    document = config_document(RELEASED)
    assert thinker_config(document) == RELEASED.thinker
    assert vision_config(document) == RELEASED.vision
    assert audio_config(document) == RELEASED.audio
    assert talker_config(document) == RELEASED.talker


def test_no_shard_is_over_the_limit_and_each_is_as_full_as_can_be(written: Path) -> None:
    index = json.loads((written / "model.safetensors.index.json").read_text())
    shards = {path.name: load_file(path) for path in sorted(written.glob("*.safetensors"))}
    assert list(shards) == [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    assert index["weight_map"] == {name: file for file, tensors in shards.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in shards.values() for t in tensors.values())
    loads = [[tensor.nbytes for tensor in tensors.values()] for tensors in shards.values()]
    assert len(loads) > 3
    assert all(sum(load) <= MAX_SHARD_BYTES or len(load) == 1 for load in loads)
    assert all(sum(load) + max(following) > MAX_SHARD_BYTES for load, following in pairwise(loads))


def test_weights_are_random_and_of_the_official_types(written: Path) -> None:
    vocoder = written / VOCODER_FOLDER
    pickles = [torch.load(vocoder / name, weights_only=True) for name in ("flow.pt", "hift.pt")]
    main_weights = [tensor for path in written.glob("*.safetensors") for tensor in load_file(path).values()]
    assert {tensor.dtype for tensor in main_weights} == {torch.bfloat16}
    assert {tensor.dtype for weights in pickles for tensor in weights.values()} == {torch.float32}
    assert all(name.startswith(HIFT_PREFIX) for name in pickles[1])
    for weight in main_weights:
        if weight.dim() > 1 and weight.shape[1] > 1:
            spread = float(weight.float().std()) * torch.Size(weight.shape[1:]).numel() ** 0.5
            assert spread == pytest.approx(1, abs=5 / weight.numel() ** 0.5)


def test_the_same_weights_are_drawn_every_time(
    written: Path, tiny_checkpoint: Path, small: ModelConfig, tmp_path: Path
) -> None:
    write_random(tmp_path / "again", small, tiny_checkpoint, CPU, MAX_SHARD_BYTES)
    assert digests(tmp_path / "again") == digests(written)


def test_what_is_there_is_left_alone(tiny_checkpoint: Path, small: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="already there"):
        write_random(tmp_path, small, tiny_checkpoint, CPU)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_failure_leaves_nothing_behind(tiny_checkpoint: Path, small: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_random(tmp_path / "file" / "below", small, tiny_checkpoint, CPU)
    with pytest.raises(CheckpointError, match="tokenizer"):
        write_random(tmp_path / "checkpoint", small, tmp_path, CPU)
    unreadable = copied_checkpoint(tiny_checkpoint, tmp_path / "unreadable")
    (unreadable / "merges.txt").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be written: .*merges\.txt"):
        write_random(tmp_path / "checkpoint", small, unreadable, CPU)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "unreadable"}


def test_a_tokenizer_that_is_larger_than_the_vocabulary_is_refused(
    tiny_checkpoint: Path, small: ModelConfig, tmp_path: Path
) -> None:
    config = replace(small, thinker=replace(small.thinker, vocab_size=small.thinker.vocab_size - 1))
    with pytest.raises(ConfigError, match="ids"):
        write_random(tmp_path / "checkpoint", config, tiny_checkpoint, CPU)


def test_loading_is_timed_and_its_memory_told(written: Path, small: ModelConfig) -> None:
    result = run_loading(written, small, written, CPU, Dtype.FLOAT32)
    (figure,) = result.figures
    assert figure.quantity is Quantity.LOADING
    assert figure.summary.num == 1
    assert figure.summary.max > 0
    headers = [header for store in open_checkpoint(written).stores.values() for header in store.headers.values()]
    told = {count.name: count.value for count in result.counts}
    assert figure.number == len(headers)
    assert told["in the files"] == sum(header.num_bytes for header in headers) / 1e9
    assert told["host memory at the peak, mapped files included"] > 0


def test_a_checkpoint_that_is_not_there_is_written_first(
    tiny_checkpoint: Path, small: ModelConfig, tmp_path: Path
) -> None:
    run_loading(tmp_path / "new", small, tiny_checkpoint, CPU, Dtype.FLOAT32)
    assert model_config(open_checkpoint(tmp_path / "new")) == small
