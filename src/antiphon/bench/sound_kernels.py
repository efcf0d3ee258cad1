"""The cases of the operators of eyes and ears, flow and vocoder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from antiphon.bench.kernel_case import CaseMaker, KernelCase, Launch
from antiphon.kernels.attention.op import attention
from antiphon.kernels.entry_store.contract import HeadNorms
from antiphon.kernels.entry_store.op import norm_and_store
from antiphon.kernels.frame_norm.contract import TAIL_FRAMES, ConvTails, Update, tail_source
from antiphon.kernels.frame_norm.op import mish_windows, modulated
from antiphon.kernels.history_attention.contract import Histories
from antiphon.kernels.history_attention.op import history_attention
from antiphon.kernels.linear.contract import Activation
from antiphon.kernels.linear.op import linear
from antiphon.kernels.snake.op import snake
from antiphon.kernels.vocoder_attention.contract import Entries, Products, Reading, Sink
from antiphon.kernels.vocoder_attention.op import vocoder_attention
from antiphon.models.minicpmo.audio_encoder import CHUNK_POSITIONS
from antiphon.models.minicpmo.audio_history import history_shape
from antiphon.models.minicpmo.hift_config import UPSAMPLING_RATES
from antiphon.models.minicpmo.vocoder import OVERLAP_FRAMES

CHUNK_FRAMES = 50
"""Mel frames of a second of speech."""


class SoundKernels(CaseMaker):
    """Cases of one layer of each network."""

    def cases(self) -> tuple[KernelCase, ...]:
        return (
            *self.attention(),
            *self.history_attention(),
            *self.vocoder_attention(),
            *self.entry_store(),
            *self.frame_norm(),
            *self.linear(),
            *self.snake(),
        )

    def attention(self) -> Iterator[KernelCase]:
        """The audio encoder's second of sound over a full history."""
        audio = self.config.audio
        queries, keys = min(50, audio.max_positions), audio.max_positions
        for num in self.sizes.num_sessions:
            num_bytes = 2 * num * (queries + keys) * audio.hidden_size * self.dtype.itemsize
            num_flops = 4 * num * queries * keys * audio.hidden_size
            yield KernelCase(
                "attention",
                f"{queries} queries, {keys} keys",
                "sessions",
                num,
                num_bytes,
                num_flops,
                partial(self._encode, num, queries, keys),
            )

    def _encode(self, num: int, queries: int, keys: int) -> Launch:
        audio = self.config.audio
        head_dim = audio.hidden_size // audio.num_heads
        q = self.normal(num, audio.num_heads, queries, head_dim)
        k, v = (self.normal(num, audio.num_heads, keys, head_dim) for _ in range(2))
        return lambda: attention(q, k, v, bias=None, scale=head_dim**-0.5)

    def history_attention(self) -> Iterator[KernelCase]:
        """The ears when their history is full."""
        audio = self.config.audio
        past = audio.max_positions - 2 * CHUNK_POSITIONS
        for num in self.sizes.num_sessions:
            yield KernelCase(
                "history_attention",
                f"{CHUNK_POSITIONS} positions, {past} remembered",
                "sessions",
                num,
                2 * num * (past + 3 * CHUNK_POSITIONS) * audio.hidden_size * self.dtype.itemsize,
                4 * num * CHUNK_POSITIONS * (past + CHUNK_POSITIONS) * audio.hidden_size,
                partial(self._hear, num, past),
            )

    def _hear(self, num: int, past: int) -> Launch:
        shape = replace(history_shape(self.config.audio), num_layers=1)
        kv = [self.normal(*shape.of_tensor) for _ in range(num)]
        histories = Histories.of(shape, kv, [past] * num)
        projected = self.normal(num, CHUNK_POSITIONS, 3 * shape.num_heads, shape.head_dim)
        q, k, v = torch.split(projected, shape.num_heads, dim=2)
        return lambda: history_attention(q, k, v, histories, 0, shape.head_dim**-0.5)

    def vocoder_attention(self) -> Iterator[KernelCase]:
        past, width = self.sizes.cached_frames, self._flow_width
        for num in self.sizes.num_sessions:
            yield KernelCase(
                "vocoder_attention",
                f"{CHUNK_FRAMES} frames, {past} remembered",
                "sessions",
                num,
                2 * num * (2 * past + 4 * CHUNK_FRAMES) * width * 4,
                2 * 4 * num * CHUNK_FRAMES * (past + CHUNK_FRAMES) * width,
                partial(self._speak, num, past),
            )

    @property
    def _flow_width(self) -> int:
        return self.config.flow.estimator.num_heads * self.config.flow.estimator.head_dim

    @property
    def _entry(self) -> tuple[int, int, int]:
        """Guidance rows, heads, head size."""
        return 2, self.config.flow.estimator.num_heads, self.config.flow.estimator.head_dim

    def float32(self, *shape: int) -> Tensor:
        """What the flow computes with unless a profile says otherwise."""
        return self.normal(*shape, dtype=torch.float32)

    def _speak(self, num: int, past: int) -> Launch:
        entry, num_own = self._entry, past // 2
        arena = Entries(*(self.float32(1, num * num_own, *entry) for _ in range(2)))
        voice = Entries(*(self.float32(1, past - num_own, *entry) for _ in range(2)))
        lists = [
            [*range(row * num_own, (row + 1) * num_own), *(-1 - index for index in range(past - num_own))]
            for row in range(num)
        ]
        reading = Reading.of(arena, [voice] * num, lists, [CHUNK_FRAMES] * num)
        _, num_heads, head_dim = entry
        q, k, v = (self.float32(2 * num, CHUNK_FRAMES, num_heads, head_dim) for _ in range(3))
        scale, products = head_dim**-0.5, Products.FLOAT32
        return lambda: vocoder_attention(q, k, v, reading, 0, by_distance=None, scale=scale, products=products)

    def entry_store(self) -> Iterator[KernelCase]:
        """Queries, keys and values are read, queries and keys changed in place, keys and values stored."""
        for num in self.sizes.num_sessions:
            num_bytes = 7 * 2 * num * CHUNK_FRAMES * self._flow_width * 4
            make = partial(self._enter, num)
            yield KernelCase("entry_store", f"{CHUNK_FRAMES} frames", "sessions", num, num_bytes, 0, make)

    def _enter(self, num: int) -> Launch:
        guidance, num_heads, head_dim = self._entry
        qkv = self.float32(guidance * num, CHUNK_FRAMES, 3, num_heads, head_dim)
        weight, bias = self.float32(head_dim), self.float32(head_dim)
        norms = HeadNorms(1e-5, weight, bias, weight, bias)
        entries = Entries(*(self.float32(1, num * CHUNK_FRAMES, *self._entry) for _ in range(2)))
        sink = Sink.of(entries, range(num * CHUNK_FRAMES))
        return lambda: norm_and_store(qkv, norms, 0, sink)

    def frame_norm(self) -> Iterator[KernelCase]:
        """What stands before a product, and before a convolution: a frame is read with what is added, both written."""
        for num in self.sizes.num_sessions:
            num_bytes = 4 * 2 * num * CHUNK_FRAMES * self.config.flow.estimator.hidden_size * 4
            case = f"{CHUNK_FRAMES} frames"
            make = partial(self._modulate, num)
            yield KernelCase("frame_norm", f"{case}, modulated", "sessions", num, num_bytes, 0, make)
            make = partial(self._window, num)
            yield KernelCase("frame_norm", f"{case}, windows of mish", "sessions", num, num_bytes, 0, make)

    def linear(self) -> Iterator[KernelCase]:
        """The estimator's first product of its feed-forward: x and the matrix are read, the result written."""
        width, inner = self.config.flow.estimator.hidden_size, self.config.flow.estimator.intermediate_size
        for num in self.sizes.num_sessions:
            rows = 2 * num * CHUNK_FRAMES
            num_bytes = (rows * width + width * inner + rows * inner) * self.dtype.itemsize
            make = partial(self._multiply, rows, width, inner)
            case = f"{CHUNK_FRAMES} frames, gelu"
            yield KernelCase("linear", case, "sessions", num, num_bytes, 2 * rows * width * inner, make)

    def _multiply(self, rows: int, width: int, inner: int) -> Launch:
        x, weight, bias = self.normal(rows, width), self.normal(inner, width), self.normal(inner)
        return lambda: linear(x, weight, bias, Activation.GELU)

    def _modulate(self, num: int) -> Launch:
        width = self.config.flow.estimator.hidden_size
        x, y = self.float32(2 * num, CHUNK_FRAMES, width), self.float32(2 * num, CHUNK_FRAMES, width)
        gate, shift, scale = (self.float32(width) for _ in range(3))
        update = Update(y, gate)
        return lambda: modulated(x, update, shift, scale, eps=1e-6, dtype=torch.float32)

    def _window(self, num: int) -> Launch:
        width = self.config.flow.estimator.hidden_size
        y, weight, bias = self.float32(2 * num, CHUNK_FRAMES, width), self.float32(width), self.float32(width)
        # The first half of the places is read, the second written.
        arena = self.float32(2 * num, 1, 2, TAIL_FRAMES, width)
        befores = tuple(arena[:num].unbind())
        tails = ConvTails(
            arena=arena,
            befores=befores,
            sources=torch.tensor([tail_source(arena, before) for before in befores], device=self.device),
            places=torch.arange(num, 2 * num, device=self.device),
            lengths=torch.full((num,), CHUNK_FRAMES, device=self.device),
        )
        return lambda: mish_windows(y, weight, bias, tails, 0, eps=1e-5)

    def snake(self) -> Iterator[KernelCase]:
        """Where the vocoder has the most samples: its last stage."""
        config = self.config.hift
        channels = config.base_channels >> len(UPSAMPLING_RATES)
        num_samples = (CHUNK_FRAMES + OVERLAP_FRAMES) * math.prod(UPSAMPLING_RATES)
        for num in self.sizes.num_sessions:
            num_elements = num * channels * num_samples
            case = f"{channels} channels"
            make = partial(self._snake, num, channels, num_samples)
            yield KernelCase("snake", case, "sessions", num, 8 * num_elements, 20 * num_elements, make)

    def _snake(self, num: int, channels: int, num_samples: int) -> Launch:
        x = self.normal(num, channels, num_samples, dtype=torch.float32)
        alpha = torch.ones(channels, device=self.device)
        return lambda: snake(x, alpha, eps=1e-9)
