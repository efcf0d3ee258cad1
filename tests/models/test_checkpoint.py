"""Opening, accounting for, loading and inspecting checkpoints, on the golden one and damaged copies of it."""

from __future__ import annotations

import io
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn

from antiphon.errors import CheckpointError
from antiphon.inspection import Inspection, inspect, render
from antiphon.models.minicpmo.causal_hift import CausalHift
from antiphon.models.minicpmo.causal_vocoder import CausalVocoder
from antiphon.models.minicpmo.checkpoint import HIFT_PREFIX, WeightFile, open_checkpoint
from antiphon.models.minicpmo.flow_membership import Retention
from antiphon.models.minicpmo.flow_rules import flow_rules
from antiphon.models.minicpmo.hift_config import Generation
from antiphon.models.minicpmo.model import Model, build_model
from antiphon.models.minicpmo.released import RELEASED
from antiphon.models.minicpmo.vocoder import Vocoder
from build import CPU, GOLDEN_CHECKPOINT, Tensors, copied_checkpoint, edit_main, edit_pickle, model, speech_arena

VOCODER = Path("assets/token2wav")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the golden checkpoint."""
    return copied_checkpoint(GOLDEN_CHECKPOINT, tmp_path / "checkpoint")


def networks(loaded: Model) -> dict[str, nn.Module]:
    return {part.name: part.network for part in loaded.parts()}


def parameters(loaded: Model) -> dict[str, torch.Tensor]:
    return {
        f"{name}: {key}": weight
        for name, network in networks(loaded).items()
        for key, weight in network.state_dict().items()
    }


def printed(inspection: Inspection) -> str:
    file = io.StringIO()
    render(inspection, Console(file=file, width=200))
    return file.getvalue()


def split_into_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {"model-1-of-2.safetensors": sorted(tensors)[::2], "model-2-of-2.safetensors": sorted(tensors)[1::2]}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / shard)
    index = {"weight_map": {name: shard for shard, names in shards.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def names_in_the_checkpoint(name: str) -> list[str]:
    """Of the weights that a loaded one was merged from, in order."""
    merged = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    return next(([name.replace(one, part) for part in parts] for one, parts in merged.items() if one in name), [name])


def test_every_weight_of_the_golden_checkpoint_arrives() -> None:
    loaded = model(GOLDEN_CHECKPOINT)
    assert all(weight.device == CPU and weight.dtype is torch.float32 for weight in parameters(loaded).values())
    main = load_file(GOLDEN_CHECKPOINT / "model.safetensors")
    for part in loaded.parts():
        for name, weight in part.network.state_dict().items():
            if part.file is WeightFile.MAIN and "head_code" not in name:
                names = [part.prefix + one for one in names_in_the_checkpoint(name)]
                # The ears' keys have no bias: merged with those of queries and values, it is 0.
                stored = [main.pop(one) if one in main else torch.zeros(len(weight) // 3) for one in names]
                assert torch.equal(weight, torch.cat(stored).float() if len(stored) > 1 else stored[0].float()), name
    assert all(name.startswith(("tts.head_code.", "tts.projector_spk.")) for name in main)


def test_weight_norms_are_folded() -> None:
    loaded = parameters(model(GOLDEN_CHECKPOINT))
    head = "tts.head_code.0.parametrizations.weight.original"
    main = load_file(GOLDEN_CHECKPOINT / "model.safetensors")
    g, v = main[f"{head}0"].float(), main[f"{head}1"].float()
    torch.testing.assert_close(loaded["talker: head_code.0.weight"], g * v / v.norm(dim=1, keepdim=True))
    assert not [name for name in loaded if "parametrizations" in name]


def test_the_vocoder_stays_in_float32_when_the_rest_is_bfloat16() -> None:
    loaded = networks(model(GOLDEN_CHECKPOINT, torch.bfloat16))
    dtypes = {name: {weight.dtype for weight in network.state_dict().values()} for name, network in loaded.items()}
    assert dtypes.pop("flow") == dtypes.pop("vocoder") == {torch.float32}
    assert set(map(frozenset, dtypes.values())) == {frozenset({torch.bfloat16})}


def test_loaded_weights_need_no_gradient() -> None:
    loaded = networks(model(GOLDEN_CHECKPOINT)).values()
    assert not any(weight.requires_grad for network in loaded for weight in network.parameters())


@pytest.mark.parametrize("file", WeightFile)
def test_tensors_are_read_one_after_the_other(file: WeightFile) -> None:
    store = open_checkpoint(GOLDEN_CHECKPOINT).stores[file]
    previous: weakref.ref[torch.Tensor] | None = None
    num_read = 0
    for _, tensor in store.read(store.headers.keys(), CPU, torch.float64):
        if previous is not None:
            assert previous() is None, "an earlier tensor is still held"
        previous = weakref.ref(tensor)
        num_read += 1
        del tensor
    assert num_read == len(store.headers)


def test_only_the_asked_tensors_are_read() -> None:
    store = open_checkpoint(GOLDEN_CHECKPOINT).stores[WeightFile.MAIN]
    assert [name for name, _ in store.read({"llm.lm_head.weight"}, CPU, torch.float32)] == ["llm.lm_head.weight"]


def test_shards_hold_the_same_model_as_one_file(folder: Path) -> None:
    split_into_shards(folder)
    whole, sharded = parameters(model(GOLDEN_CHECKPOINT)), parameters(model(folder))
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(weight, sharded[name]) for name, weight in whole.items())


def test_everything_wrong_is_named_in_one_error(folder: Path) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["llm.model.norm.weight"]
        tensors["resampler.proj"] = tensors["resampler.proj"][:-1].contiguous()
        tensors["llm.model.surprise"] = torch.zeros(1)

    edit_main(folder, damage)
    edit_pickle(folder / VOCODER / "flow.pt", lambda tensors: tensors.update(more=torch.zeros(1)))
    edit_pickle(folder / VOCODER / "hift.pt", lambda tensors: tensors.pop("generator.conv_post.bias"))
    with pytest.raises(CheckpointError) as error:
        model(folder)
    message = str(error.value)
    assert "2 missing: llm.model.norm.weight, hift.pt:conv_post.bias" in message
    assert "2 unexpected: llm.model.surprise, flow.pt:more" in message
    assert "1 of a wrong shape: resampler.proj [127, 128] instead of [128, 128]" in message


def test_a_long_list_is_shortened_and_counted(folder: Path) -> None:
    def drop_the_talker(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("tts.")]:
            del tensors[name]

    edit_main(folder, drop_the_talker)
    with pytest.raises(CheckpointError, match=r"27 missing: tts\.emb_text\.weight, .* and 19 more") as error:
        model(folder)
    assert len(str(error.value)) < 1000


def test_what_duplex_never_reads_may_be_there_or_not(folder: Path) -> None:
    def exchange(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("tts.projector_spk.")]:
            del tensors[name]
        tensors["tts.model.embed_tokens.weight"] = torch.zeros(32, 64)

    edit_main(folder, exchange)
    model(folder)


def test_the_vision_tower_is_as_deep_as_the_checkpoint(folder: Path) -> None:
    last = "vpm.encoder.layers.1."

    def add_a_layer(tensors: Tensors) -> None:
        new = {name.replace(last, "vpm.encoder.layers.2."): t.clone() for name, t in tensors.items() if last in name}
        tensors.update(new)

    assert len(model(folder).vision.tower.encoder.layers) == 2
    edit_main(folder, add_a_layer)
    assert len(model(folder).vision.tower.encoder.layers) == 3


def test_a_vision_tower_that_lacks_more_than_its_last_layer_is_incomplete(folder: Path) -> None:
    def drop_a_layer(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("vpm.encoder.layers.1.")]:
            del tensors[name]

    edit_main(folder, drop_a_layer)
    with pytest.raises(CheckpointError, match=r"16 missing: vpm\.encoder\.layers\.1\."):
        model(folder)


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def overwrite(file: Path) -> None:
    file.write_bytes(b"<html>not found</html>")


WHOLE_FILES = ("config.json", "model.safetensors", VOCODER / "flow.pt", VOCODER / "hift.pt")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *product(WHOLE_FILES, (cut_in_half, overwrite, Path.unlink)),
        # Half a YAML file may be a whole one.
        *product([VOCODER / "flow.yaml"], (overwrite, Path.unlink)),
    ],
)
def test_a_damaged_file_is_named(folder: Path, name: str | Path, damage: Callable[[Path], None]) -> None:
    file = folder / name
    damage(file)
    with pytest.raises(CheckpointError, match=file.name.replace(".", r"\.")):
        model(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    split_into_shards(folder)
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2-of-2\.safetensors"):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    split_into_shards(folder)
    second = folder / "model-2-of-2.safetensors"
    save_file(load_file(second) | {"apm.conv1.bias": torch.zeros(32)}, second)
    with pytest.raises(CheckpointError, match=r"another shard holds too: apm\.conv1\.bias"):
        open_checkpoint(folder)


def test_a_pickle_of_something_else_is_refused(folder: Path) -> None:
    torch.save({"epoch": 3}, folder / VOCODER / "flow.pt")
    with pytest.raises(CheckpointError, match=r"flow\.pt holds something else"):
        open_checkpoint(folder)


def test_a_place_that_is_nowhere_is_refused_in_one_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no folder here"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_window_that_hides_old_keys_is_refused(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sliding_window": 4096}))
    with pytest.raises(CheckpointError, match="sliding_window"):
        model(folder)


def test_inspection_counts_what_the_files_hold() -> None:
    found = inspect(open_checkpoint(GOLDEN_CHECKPOINT), torch.float32)
    main = load_file(GOLDEN_CHECKPOINT / "model.safetensors")
    pickles = [torch.load(GOLDEN_CHECKPOINT / VOCODER / name, weights_only=True) for name in ("flow.pt", "hift.pt")]
    tensors = [tensor for group in (main, *pickles) for tensor in group.values()]
    assert sum(part.num_tensors for part in found.parts) == len(tensors)
    assert sum(part.num_parameters for part in found.parts) == sum(tensor.numel() for tensor in tensors)
    assert sum(part.num_bytes for part in found.parts) == sum(tensor.nbytes for tensor in tensors)
    assert found.parts[-1].name == "not read"
    assert found.parts[-1].num_loaded_bytes == 0
    assert all(part.num_loaded_bytes == 4 * part.num_parameters for part in found.parts[:-1])
    assert found.is_complete
    assert "complete" in printed(found)


def test_inspection_says_what_the_files_decided(folder: Path) -> None:
    decisions = {one.about: one.outcome for one in inspect(open_checkpoint(folder)).decisions}
    assert decisions["vision layers"].startswith("2 of 3")
    assert decisions["vocoder"] == "minicpmo-utils 1.0.5"
    assert decisions["voice models"].startswith("campplus.onnx, speech_tokenizer_v2_25hz.onnx absent")
    assert decisions["sliding_window"] == "null"
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config["sliding_window"]
    file.write_text(json.dumps(config))
    decisions = {one.about: one.outcome for one in inspect(open_checkpoint(folder)).decisions}
    assert decisions["sliding_window"] == "not in config.json"


def test_inspection_of_an_incomplete_checkpoint_shows_what_is_wrong(folder: Path) -> None:
    edit_main(folder, lambda tensors: tensors.update({"resampler.proj": torch.zeros(2, 3)}))
    edit_pickle(folder / VOCODER / "flow.pt", lambda tensors: tensors.pop("encoder_proj.bias"))
    found = inspect(open_checkpoint(folder))
    assert not found.is_complete
    text = printed(found)
    assert "flow.pt:encoder_proj.bias" in text
    assert "resampler.proj [2, 3] instead of [128, 128]" in text
    assert "complete" not in text


def test_the_released_sizes_give_the_released_tensors() -> None:
    """Counts of REFERENCE 2; of the talker's 194, the table and the projector that duplex never reads are left out."""
    parts = {part.name: part.shapes() for part in build_model(RELEASED).parts()}
    assert {name: len(shapes) for name, shapes in parts.items()} == {
        "thinker": 399,
        "vision tower": 437,
        "resampler": 13,
        "audio encoder": 367 + 4,
        "talker": 194 - 5,
        "flow": 605,
        "vocoder": 328,
    }
    num_parameters = {name: sum(torch.Size(s).numel() for s in shapes.values()) for name, shapes in parts.items()}
    assert round(num_parameters["flow"] / 1e6, 1) == 155.8
    assert round(num_parameters["vocoder"] / 1e6, 2) == 20.82


def test_the_released_sizes_of_1_0_7_give_its_vocoders_tensors() -> None:
    """Shapes of REFERENCE 2.8."""
    config = replace(RELEASED, hift=replace(RELEASED.hift, generation=Generation.V1_0_7))
    *_, vocoder = build_model(config).parts()
    shapes = vocoder.shapes()
    assert len(shapes) == 328
    assert round(sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e6, 2) == 20.78
    directions = {name: shapes[f"{name}.parametrizations.weight.original1"] for name in NEW_IN_1_0_7}
    assert directions == NEW_IN_1_0_7
    assert [shapes[f"ups.{stage}.parametrizations.weight.original0"][0] for stage in range(3)] == [256, 128, 64]
    assert [shapes[f"source_downs.{stage}.weight"] for stage in range(3)] == [(256, 18, 30), (128, 18, 6), (64, 18, 1)]


NEW_IN_1_0_7 = {
    "conv_pre": (512, 80, 5),
    "ups.0": (256, 512, 16),
    "ups.1": (128, 256, 11),
    "ups.2": (64, 128, 7),
    "f0_predictor.condnet.0": (512, 80, 4),
}
"""Shapes that 1.0.5 does not have, of weight-normed convolutions."""


def test_a_checkpoint_of_1_0_7_is_loaded_whole_and_run_as_one(tiny_causal_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_causal_checkpoint)
    names = torch.load(tiny_causal_checkpoint / VOCODER / "hift.pt", weights_only=True).keys()
    assert not any(name.startswith(HIFT_PREFIX) for name in names)
    found = inspect(checkpoint)
    assert found.is_complete
    assert {one.about: one.outcome for one in found.decisions}["vocoder"] == "minicpmo-utils 1.0.7"
    loaded = model(tiny_causal_checkpoint)
    assert isinstance(loaded.hift, CausalHift)
    assert isinstance(loaded.vocoder(), CausalVocoder)
    synthesizer = loaded.synthesizer(torch.zeros(80, 200), speech_arena(loaded))
    assert synthesizer.rules == flow_rules(Generation.V1_0_7, Retention.REFERENCE)
    assert not any(weight.is_meta for weight in loaded.hift.state_dict().values())


def test_a_checkpoint_of_1_0_5_is_run_as_one() -> None:
    loaded = model(GOLDEN_CHECKPOINT)
    assert isinstance(loaded.vocoder(), Vocoder)
    synthesizer = loaded.synthesizer(torch.zeros(80, 200), speech_arena(loaded))
    assert synthesizer.rules == flow_rules(Generation.V1_0_5, Retention.REFERENCE)
