"""Golden `audio`: the mel stream, the encoder with its history and the path of whole recordings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from antiphon.models.minicpmo.audio_encoder import AudioEncoder
from antiphon.models.minicpmo.audio_features import HOP_SAMPLES, Floor, MelExtractor, normalised
from antiphon.models.minicpmo.audio_stream import CHUNK_FRAMES, MelChunk, MelStream
from antiphon.models.minicpmo.config import audio_config
from golden_kinds.report import Comparison, Outcome

KIND = "audio"
TOLERANCE = 1e-4
"""Absolute, on values of the order of 1: the README's."""


def run(folder: Path) -> Iterator[Outcome]:
    """One outcome per stream, per recording and per batch of recordings."""
    with torch.inference_mode():
        golden = _Golden(folder)
        for name in golden.names(with_tensor="call_samples"):
            yield _stream(golden, name)
        clips = golden.names(with_tensor="range")
        for name in clips:
            yield _recording(golden, name)
        for name in golden.names(with_tensor="mel_frames"):
            if name not in clips and not golden.has(f"{name}.call_samples"):
                yield _batch(golden, name, clips)
    golden.check_all_read()


class _Golden:
    """The folder's tensors, with a note of those read, and the model."""

    def __init__(self, folder: Path) -> None:
        config = audio_config(json.loads((folder / "config.json").read_text()))
        self._tensors = load_file(folder / "cases.safetensors")
        self._unread = set(self._tensors)
        self.waveform = self.read("waveform_i16").float() / 32768
        self.extractor = MelExtractor(config.num_mel_bins)
        with torch.device("meta"):
            self.encoder = AudioEncoder(config)
        self.encoder.load_state_dict(load_file(folder / "weights.safetensors"), assign=True)
        self.encoder.prepare()
        self.encoder_outs: list[Tensor] = []
        self.encoder.apm.layer_norm.register_forward_hook(lambda _module, _args, out: self.encoder_outs.append(out))

    def names(self, *, with_tensor: str) -> list[str]:
        return sorted(key.removesuffix(f".{with_tensor}") for key in self._tensors if key.endswith(f".{with_tensor}"))

    def has(self, key: str) -> bool:
        return key in self._tensors

    def read(self, key: str) -> Tensor:
        self._unread.discard(key)
        return self._tensors[key]

    def clip(self, name: str) -> Tensor:
        start, end = self.read(f"{name}.range").tolist()
        return self.waveform[start:end]

    def check_all_read(self) -> None:
        assert not self._unread, f"recorded but not compared: {sorted(self._unread)}"


_CHUNK_INTEGERS: dict[str, Callable[[MelChunk], int]] = {
    "success": lambda _: 1,
    "fed_samples": lambda chunk: chunk.consumed_samples,
    "consumed_samples": lambda chunk: chunk.consumed_samples,
    "mel_frames": lambda chunk: chunk.mel.shape[1],
    "prefix_extra_frames": lambda chunk: chunk.prefix_frames,
    "suffix_extra_frames": lambda chunk: chunk.suffix_frames,
    "dynamic_log_norm": lambda chunk: int(chunk.window.floor is Floor.DYNAMIC),
    "base_T": lambda chunk: chunk.window.start_frame,
    "core_start": lambda chunk: chunk.start_frame,
    "core_end": lambda chunk: chunk.end_frame,
    "buffer_len_samples": lambda chunk: chunk.window.num_samples,
    "T_full": lambda chunk: chunk.window.num_frames,
    "stable_T": lambda chunk: chunk.window.num_stable_frames,
}


def _stream(golden: _Golden, name: str) -> Outcome:
    found = Comparison(KIND, name)
    stream, state = MelStream(golden.extractor), golden.encoder.new_state()
    at = _start_sample(golden, name)
    calls: list[MelChunk | None] = []
    kv: list[tuple[int, int, int]] = []
    left_samples = []
    embeds = []
    golden.encoder_outs.clear()
    for num_samples in golden.read(f"{name}.call_samples").tolist():
        stream.push(golden.waveform[at : at + num_samples])
        at += num_samples
        before, num_resets = state.num_positions, state.num_resets
        chunk = stream.take()
        if chunk is not None:
            embeds.append(golden.encoder.encode_chunks([(chunk, state)])[0])
        calls.append(chunk)
        kv.append((before, state.num_positions, state.num_resets - num_resets))
        left_samples.append(stream.waiting_samples)
    chunks = [chunk for chunk in calls if chunk is not None]

    for key, integer in _CHUNK_INTEGERS.items():
        found.equal([0 if chunk is None else integer(chunk) for chunk in calls], golden.read(f"{name}.{key}"))
    for key, column in zip(("kv_len_before", "kv_len_after", "kv_reset"), zip(*kv, strict=True), strict=True):
        found.equal(column, golden.read(f"{name}.{key}"))
    found.equal(left_samples, golden.read(f"{name}.left_samples"))
    found.equal([chunks[0].padding_samples], golden.read(f"{name}.zeros_in_front"))
    num_tokens = golden.read(f"{name}.num_tokens")
    found.equal([len(embed) for embed in embeds], num_tokens[golden.read(f"{name}.success").bool()])

    widest = golden.read(f"{name}.mel_mean_over_bins").shape[1]
    by_frame = [F.pad(chunk.mel.mean(dim=0), (0, widest - chunk.mel.shape[1])) for chunk in chunks]
    found.close(torch.stack(by_frame), golden.read(f"{name}.mel_mean_over_bins"), TOLERANCE)
    by_bin = torch.stack([chunk.mel.mean(dim=1) for chunk in chunks])
    found.close(by_bin, golden.read(f"{name}.mel_mean_over_frames"), TOLERANCE)
    for index, (chunk, encoder_out) in enumerate(zip(chunks, golden.encoder_outs, strict=True)):
        for key, result in (("mel", chunk.mel), ("encoder_out", encoder_out[0])):
            if golden.has(f"{name}.{key}.{index}"):
                found.close(result, golden.read(f"{name}.{key}.{index}"), TOLERANCE)
    found.close(torch.stack(embeds), golden.read(f"{name}.embeds"), TOLERANCE)
    return found.outcome()


def _start_sample(golden: _Golden, name: str) -> int:
    """Where the stream's calls begin in the waveform: told in prose only, so it is found.

    The second chunk's floor is fixed, so its frames are those of the whole waveform at the right place, to the nearest
    of 40 samples (a quarter of a hop).
    """
    want = golden.read(f"{name}.mel_mean_over_bins")[1]
    zeros = int(golden.read(f"{name}.zeros_in_front"))
    first_frame = CHUNK_FRAMES - int(golden.read(f"{name}.prefix_extra_frames").max())
    best = (float("inf"), 0)
    for phase in range(-zeros % 40, HOP_SAMPLES, 40):
        log_mel = golden.extractor.log_mel(golden.waveform[phase:])
        frames = normalised(log_mel, Floor.FIXED.level(0.0)).mean(dim=0)
        error, index = (frames.unfold(0, len(want), 1) - want).abs().amax(dim=1).min(dim=0)
        centre = phase + 200 + HOP_SAMPLES * int(index)
        best = min(best, (float(error), centre - HOP_SAMPLES * first_frame + zeros))
    return best[1]


def _recording(golden: _Golden, name: str) -> Outcome:
    found = Comparison(KIND, name)
    samples = golden.clip(name)
    (mel,) = golden.extractor.reference_mels(samples)
    golden.encoder_outs.clear()
    embeds = golden.encoder.encode_reference(samples, golden.extractor)
    (encoder_out,) = golden.encoder_outs
    found.equal([mel.shape[1]], golden.read(f"{name}.mel_frames"))
    results = {
        "mel": mel,
        "mel_first40": mel[:, :40],
        "mel_last40": mel[:, -40:],
        "mel_mean_over_bins": mel.mean(dim=0),
        "mel_mean_over_frames": mel.mean(dim=1),
        "encoder_out_last10": encoder_out[0, -10:],
        "embeds": embeds,
    }
    for key, result in results.items():
        if golden.has(f"{name}.{key}"):
            found.close(result, golden.read(f"{name}.{key}"), TOLERANCE)
    return found.outcome()


def _batch(golden: _Golden, name: str, clips: list[str]) -> Outcome:
    """Several of the recordings in one call; the data tells them by their frame counts."""
    found = Comparison(KIND, name)
    by_frames = {int(golden.read(f"{clip}.mel_frames")): clip for clip in clips}
    num_frames = golden.read(f"{name}.mel_frames").tolist()
    mels = [mel for n in num_frames for mel in golden.extractor.reference_mels(golden.clip(by_frames[n]))]
    found.equal([mel.shape[1] for mel in mels], num_frames)
    for index, embeds in enumerate(golden.encoder.encode_mels(mels)):
        found.close(embeds, golden.read(f"{name}.embeds.{index}"), TOLERANCE)
    return found.outcome()
