"""Writes the tiny checkpoint's folder, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import safetensors.torch
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from antiphon.models.minicpmo.checkpoint import HIFT_PREFIX, VOCODER_FOLDER, VOICE_MODEL_FILES, Part, WeightFile
from antiphon.models.minicpmo.config import audio_config, talker_config, thinker_config, vision_config
from antiphon.models.minicpmo.flow_config import parse_flow_yaml
from antiphon.models.minicpmo.hift_config import Generation
from antiphon.models.minicpmo.model import ModelConfig, build_model
from antiphon.models.minicpmo.new_folder import new_folder, write_json
from antiphon.models.minicpmo.tiny.behaviour import Ids, teach_ears, teach_talker, teach_thinker, teach_vocoder
from antiphon.models.minicpmo.tiny.dimensions import BYTES, CONFIG, FLOW_YAML, HIFT, SPECIAL_TOKENS
from antiphon.models.minicpmo.tiny.voice_models import write_speaker_encoder, write_speech_tokenizer
from antiphon.models.minicpmo.tiny.weights import Weights, random_weights
from antiphon.models.minicpmo.tokens import TextTokenizer, special_tokens

_PRINTABLE = frozenset(map(chr, range(0x21, 0x7F))) | {"Ġ"}
"""Byte-level characters of visible ASCII and of the space: what the model may say."""

EOS_TOKEN = "<|im_end|>"


def write_tiny(folder: Path, generation: Generation = Generation.V1_0_5) -> None:
    """Make the tiny checkpoint; the same bytes every time.

    folder: appears when everything is written.
    generation: whose vocoder it gets.
    Raises: ConfigError if it is there already and not empty, or cannot be made.
    """
    with new_folder(folder) as whole:
        _write(whole, generation)


def tiny_config(generation: Generation = Generation.V1_0_5) -> ModelConfig:
    """The dimensions, without a folder."""
    vision = vision_config(CONFIG)
    return ModelConfig(
        thinker=thinker_config(CONFIG),
        vision=vision,
        num_vision_layers=vision.num_layers,
        audio=audio_config(CONFIG),
        talker=talker_config(CONFIG),
        flow=parse_flow_yaml(FLOW_YAML, "FLOW_YAML"),
        hift=replace(HIFT, generation=generation),
    )


def tiny_tokenizer() -> TextTokenizer:
    """The tokenizer, without a folder: a token per byte, and the special ones behind them."""
    tokenizer = _tokenizer()
    bad_ids = tuple(_bad_ids(tokenizer.get_vocab(with_added_tokens=True)))
    return TextTokenizer(tokenizer, special_tokens(tokenizer, EOS_TOKEN, bad_ids))


def _write(folder: Path, generation: Generation) -> None:
    vocoder = folder / VOCODER_FOLDER
    vocoder.mkdir(parents=True)
    (vocoder / "flow.yaml").write_text(FLOW_YAML, encoding="utf-8")
    write_json(folder / "config.json", CONFIG)
    ids = _write_tokenizer(folder)

    parts = build_model(tiny_config(generation)).parts()
    main = _random(parts, WeightFile.MAIN)
    teach_thinker(main, ids)
    teach_ears(main)
    teach_talker(main)
    bfloat16 = {name: weight.to(torch.bfloat16).contiguous() for name, weight in main.items()}
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(bfloat16, metadata={"format": "pt"}))

    torch.save(_random(parts, WeightFile.FLOW), vocoder / "flow.pt")
    hift = _random(parts, WeightFile.HIFT)
    teach_vocoder(hift)
    prefix = HIFT_PREFIX if generation is Generation.V1_0_5 else ""
    torch.save({prefix + name: weight for name, weight in hift.items()}, vocoder / "hift.pt")
    for name, write in zip(VOICE_MODEL_FILES, (write_speaker_encoder, write_speech_tokenizer), strict=True):
        write(vocoder / name)


def _random(parts: Iterable[Part], file: WeightFile) -> Weights:
    weights: Weights = {}
    for part in parts:
        if part.file is file:
            weights |= random_weights(part)
    return weights


def _write_tokenizer(folder: Path) -> Ids:
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": "<|im_start|>",
            "eos_token": EOS_TOKEN,
            "pad_token": "<|endoftext|>",
            "unk_token": "<unk>",
            "bad_token_ids": _bad_ids(vocabulary),
        },
    )
    return Ids.of(vocabulary)


def _tokenizer() -> Tokenizer:
    """Bytes, then special tokens, and no merges."""
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(BYTES)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS])
    return tokenizer


def _bad_ids(vocabulary: Mapping[str, int]) -> list[int]:
    """vocabulary: ids by text. Of bytes that are not to be said."""
    return [vocabulary[character] for character in BYTES if character not in _PRINTABLE]
