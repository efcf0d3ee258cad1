"""The cases of every operator, in one place: what it is measured at, and how many bytes and operations that is.

Bytes are those that have to move at least, each once; sizes are the model's. Shown by tests/bench/test_kernels.py,
which finds an operator that has no case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.bench.contexts import fill_randomly, filled_context
from antiphon.core.cache_dtype import CacheDtype
from antiphon.core.sampling import TextSampling
from antiphon.kernels.attention.op import attention
from antiphon.kernels.entry_store.contract import HeadNorms
from antiphon.kernels.entry_store.op import norm_and_store
from antiphon.kernels.few_rows.op import MAX_ROWS, linear_add, norm_gated, norm_linear
from antiphon.kernels.frame_norm.contract import TAIL_FRAMES, ConvTails, Update, tail_source
from antiphon.kernels.frame_norm.op import mish_windows, modulated
from antiphon.kernels.history_attention.contract import Histories
from antiphon.kernels.history_attention.op import history_attention
from antiphon.kernels.key_slots.op import key_slots
from antiphon.kernels.kv_cache import KVCache, StepLayout
from antiphon.kernels.paged_attention.op import paged_attention
from antiphon.kernels.rms_norm.op import add_rms_norm, rms_norm
from antiphon.kernels.rotary_store.contract import HeadNorm, StepRotations
from antiphon.kernels.rotary_store.op import rotary_store
from antiphon.kernels.rotate_keys.op import rotate_keys
from antiphon.kernels.rotation import rotation
from antiphon.kernels.sampling.contract import CodecRules, TextRules
from antiphon.kernels.sampling.op import sample_codec, sample_text
from antiphon.kernels.silu_mul.op import silu_mul
from antiphon.kernels.snake.op import snake
from antiphon.kernels.step_rotations.op import step_rotations
from antiphon.kernels.vocoder_attention.contract import Entries, Products, Reading, Sink
from antiphon.kernels.vocoder_attention.op import vocoder_attention
from antiphon.models.minicpmo.audio_encoder import CHUNK_POSITIONS
from antiphon.models.minicpmo.audio_history import history_shape
from antiphon.models.minicpmo.config import DecoderConfig
from antiphon.models.minicpmo.hift_config import UPSAMPLING_RATES
from antiphon.models.minicpmo.model import ModelConfig
from antiphon.models.minicpmo.vocoder import OVERLAP_FRAMES
from antiphon.stages.draw_table import DrawPlace, DrawTable, Newest
from antiphon.stages.paged import CacheConfig, PagedDecoder
from antiphon.stages.step_packing import Row

Launch = Callable[[], object]

CHUNK_FRAMES = 50
"""Mel frames of a second of speech."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """num_sessions: in a step. context_tokens: of each. step_tokens: of a mixed step. cached_frames: of speech."""

    num_sessions: tuple[int, ...]
    context_tokens: int
    step_tokens: int
    cached_frames: int


@dataclass(frozen=True, slots=True)
class Rival:
    """Another way to the same result."""

    name: str
    make: Callable[[], Launch]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """kernel: the operator's folder. case: in words. per, number: what it is repeated over.

    make: gives a launch on operands of its own.
    """

    kernel: str
    case: str
    per: str
    number: int
    num_bytes: int
    num_flops: int
    make: Callable[[], Launch]
    rivals: tuple[Rival, ...] = ()


def kernel_cases(config: ModelConfig, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[KernelCase, ...]:
    """dtype: of thinker and talker; the vocoder is float32."""
    make = _Maker(config, sizes, device, dtype)
    return (
        *make.paged_attention(),
        *make.few_rows(),
        *make.key_slots(),
        *make.step_rotations(),
        *make.rotary_store(),
        *make.rms_norm(),
        *make.silu_mul(),
        *make.rotate_keys(),
        *make.sampling(),
        *make.draw_history(),
        *make.attention(),
        *make.history_attention(),
        *make.vocoder_attention(),
        *make.entry_store(),
        *make.frame_norm(),
        *make.snake(),
    )


@dataclass(frozen=True, slots=True)
class _Maker:
    config: ModelConfig
    sizes: Sizes
    device: torch.device
    dtype: torch.dtype

    @property
    def decoder(self) -> DecoderConfig:
        return self.config.thinker.decoder

    @property
    def rows(self) -> tuple[int, ...]:
        """Tokens of steps: decoding ones, and a full mixed one."""
        return tuple(sorted({*self.sizes.num_sessions, self.sizes.step_tokens}))

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers, of the model's dtype unless said."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def paged_attention(self) -> Iterator[KernelCase]:
        heads, kv_heads, head_dim = self.decoder.num_heads, self.decoder.num_kv_heads, self.decoder.head_dim
        keys = self.sizes.context_tokens
        query_bytes = 3 * heads * head_dim * self.dtype.itemsize
        for num, kept_in in product(self.sizes.num_sessions, CacheDtype):
            rival = Rival("torch SDPA, contiguous", partial(self._dense, num))
            yield KernelCase(
                "paged_attention",
                f"decode, {keys} keys each{_named(kept_in)}",
                "sessions",
                num,
                num * (2 * keys * kv_heads * self._head_bytes(kept_in) + query_bytes),
                4 * num * keys * heads * head_dim,
                partial(self._attend, num, 1, kept_in),
                (rival,) if kept_in is CacheDtype.MODEL else (),
            )
        num_tokens = min(self.sizes.step_tokens, keys)
        for kept_in in CacheDtype:
            yield KernelCase(
                "paged_attention",
                f"prefill at the end of {keys} keys{_named(kept_in)}",
                "tokens",
                num_tokens,
                2 * keys * kv_heads * self._head_bytes(kept_in) + num_tokens * query_bytes,
                4 * num_tokens * (keys - num_tokens // 2) * heads * head_dim,
                partial(self._attend, 1, num_tokens, kept_in),
            )

    def _head_bytes(self, kept_in: CacheDtype) -> int:
        """Of a key or a value of a head."""
        one = CacheConfig(num_blocks=1, block_size=1, dtype=kept_in)
        layer = replace(self.decoder, num_layers=1, num_kv_heads=1)
        return one.make(layer, self.dtype, torch.device("meta")).num_bytes // 2

    def _attend(self, num_sessions: int, num_tokens: int, kept_in: CacheDtype) -> Launch:
        """num_tokens: new ones of each session, at the end of its context."""
        step, cache = layout(
            self.decoder, num_sessions, self.sizes.context_tokens, num_tokens, self.device, self.dtype, kept_in
        )
        (layer,) = cache.layers()
        q_anchor, q_ring = (
            self.normal(num_sessions * num_tokens, self.decoder.num_heads, self.decoder.head_dim) for _ in range(2)
        )
        scale = self.decoder.head_dim**-0.5
        return lambda: paged_attention(q_anchor, q_ring, layer, step, scale)

    def _dense(self, num_sessions: int) -> Launch:
        """The same keys without blocks, and with one rotation."""
        q = self.normal(num_sessions, self.decoder.num_heads, 1, self.decoder.head_dim)
        keys, values = (
            self.normal(num_sessions, self.decoder.num_kv_heads, self.sizes.context_tokens, self.decoder.head_dim)
            for _ in range(2)
        )
        return lambda: F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    def few_rows(self) -> Iterator[KernelCase]:
        """The three products of a layer, of thinker and talker, beside the library's and what stands around them."""
        for name, decoder in (("thinker", self.config.thinker.decoder), ("talker", self.config.talker.decoder)):
            hidden, width = decoder.hidden_size, decoder.intermediate_size
            heads = (decoder.num_heads + 2 * decoder.num_kv_heads) * decoder.head_dim
            for kind, out, inner in (("qkv", heads, hidden), ("gated", 2 * width, hidden), ("down", hidden, width)):
                for num in (1, MAX_ROWS):
                    yield KernelCase(
                        "few_rows",
                        f"{name}, {kind}",
                        "rows",
                        num,
                        (out * inner + num * (out + inner)) * self.dtype.itemsize,
                        2 * num * out * inner,
                        partial(self._product, kind, out, inner, num),
                        (Rival("library", partial(self._library_product, kind, out, inner, num)),),
                    )

    def _product(self, kind: str, out: int, inner: int, num: int) -> Launch:
        x, weight, matrix = self.normal(num, inner), self.normal(inner), self.normal(out, inner)
        residual, eps = self.normal(num, out), self.decoder.rms_norm_eps
        match kind:
            case "qkv":
                return lambda: norm_linear(x, weight, eps, matrix)
            case "gated":
                return lambda: norm_gated(x, weight, eps, matrix)
            case _:
                return lambda: linear_add(x, matrix, residual)

    def _library_product(self, kind: str, out: int, inner: int, num: int) -> Launch:
        x, weight, matrix = self.normal(num, inner), self.normal(inner), self.normal(out, inner)
        residual, eps = self.normal(num, out), self.decoder.rms_norm_eps
        match kind:
            case "qkv":
                return lambda: F.linear(rms_norm(x, weight, eps), matrix)
            case "gated":
                return lambda: silu_mul(F.linear(rms_norm(x, weight, eps), matrix))
            case _:
                return lambda: residual + F.linear(x, matrix)

    def key_slots(self) -> Iterator[KernelCase]:
        keys = self.sizes.context_tokens
        for num in self.sizes.num_sessions:
            num_bytes = 4 * num * keys
            make = partial(self._slots, num)
            yield KernelCase("key_slots", f"{keys} keys each", "sessions", num, num_bytes, 0, make)

    def _slots(self, num_sessions: int) -> Launch:
        step, _ = layout(
            self.decoder, num_sessions, self.sizes.context_tokens, 1, self.device, self.dtype, CacheDtype.MODEL
        )
        return lambda: key_slots(step.blocks, step.segments, step.spans, step.block_size, step.max_keys)

    def step_rotations(self) -> Iterator[KernelCase]:
        for num in self.rows:
            num_bytes = 3 * num * (8 + 4 * self.decoder.head_dim)
            make = partial(self._rotations, num)
            yield KernelCase("step_rotations", "three columns", "tokens", num, num_bytes, 0, make)

    def _rotations(self, num_tokens: int) -> Launch:
        decoder = self.decoder
        anchor, ring, key = (torch.arange(num_tokens, device=self.device) + 1000 * column for column in range(3))
        return lambda: step_rotations(anchor, ring, key, decoder.head_dim, decoder.rope_theta)

    def rotary_store(self) -> Iterator[KernelCase]:
        heads, kv_heads, head_dim = self.decoder.num_heads, self.decoder.num_kv_heads, self.decoder.head_dim
        for num, kept_in in product(self.rows, CacheDtype):
            read_bytes = (3 * heads + 2 * kv_heads) * head_dim * self.dtype.itemsize
            yield KernelCase(
                "rotary_store",
                f"one layer{_named(kept_in)}",
                "tokens",
                num,
                num * (read_bytes + 2 * kv_heads * self._head_bytes(kept_in)),
                0,
                partial(self._store, num, kept_in),
            )

    def _store(self, num_tokens: int, kept_in: CacheDtype) -> Launch:
        decoder = replace(self.decoder, num_layers=1)
        num_heads = [decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads]
        projected = self.normal(num_tokens, sum(num_heads), decoder.head_dim)
        q, k, v = torch.split(projected, num_heads, dim=1)
        weight = torch.ones(decoder.head_dim, device=self.device, dtype=self.dtype)
        positions = torch.arange(num_tokens, device=self.device)
        by = rotation(positions, decoder.head_dim, decoder.rope_theta)
        rotations = StepRotations(by, by, by, positions)
        blocks = replace(CacheConfig.for_tokens(num_tokens, num_segments=1), dtype=kept_in)
        (layer,) = blocks.make(decoder, self.dtype, self.device).layers()
        norm = HeadNorm(weight, weight, decoder.rms_norm_eps)
        return lambda: rotary_store(q, k, v, norm, rotations, layer)

    def rms_norm(self) -> Iterator[KernelCase]:
        width = self.decoder.hidden_size
        for num in self.rows:
            num_bytes = 2 * num * width * self.dtype.itemsize
            yield KernelCase(
                "rms_norm",
                f"width {width}",
                "tokens",
                num,
                num_bytes,
                0,
                partial(self._norm, num, width),
            )
            make = partial(self._add_norm, num, width)
            yield KernelCase("rms_norm", f"width {width}, after adding", "tokens", num, 2 * num_bytes, 0, make)

    def _norm(self, num_tokens: int, width: int) -> Launch:
        x, weight = self.normal(num_tokens, width), self.normal(width)
        return lambda: rms_norm(x, weight, self.decoder.rms_norm_eps)

    def _add_norm(self, num_tokens: int, width: int) -> Launch:
        x, added, weight = self.normal(num_tokens, width), self.normal(num_tokens, width), self.normal(width)
        return lambda: add_rms_norm(x, added, weight, self.decoder.rms_norm_eps)

    def silu_mul(self) -> Iterator[KernelCase]:
        width = self.decoder.intermediate_size
        for num in self.rows:
            num_bytes = 3 * num * width * self.dtype.itemsize
            yield KernelCase(
                "silu_mul",
                f"width {width}",
                "tokens",
                num,
                num_bytes,
                0,
                partial(self._gate, num, width),
            )

    def _gate(self, num_tokens: int, width: int) -> Launch:
        gate_up = self.normal(num_tokens, 2 * width)
        return lambda: silu_mul(gate_up)

    def rotate_keys(self) -> Iterator[KernelCase]:
        decoder, num = self.decoder, self.sizes.context_tokens
        num_bytes = 2 * decoder.num_layers * num * decoder.num_kv_heads * decoder.head_dim * self.dtype.itemsize
        yield KernelCase("rotate_keys", "all layers", "tokens", num, num_bytes, 0, self._rotate)

    def _rotate(self) -> Launch:
        decoder, num, size = self.decoder, self.sizes.context_tokens, 16
        keys = self.normal(decoder.num_layers, -(-num // size), size, decoder.num_kv_heads, decoder.head_dim)
        slots = torch.randperm(-(-num // size) * size, device=self.device)[:num].sort().values
        return lambda: rotate_keys(keys, slots, -7, decoder.rope_theta)

    def sampling(self) -> Iterator[KernelCase]:
        for kind, num_ids, itemsize in (
            ("text", self.config.thinker.vocab_size, self.dtype.itemsize),
            ("codec", self.config.talker.num_codec_tokens, 4),
        ):
            for num in self.sizes.num_sessions:
                yield KernelCase(
                    "sampling",
                    f"{kind}, {num_ids} ids",
                    "rows",
                    num,
                    num * num_ids * itemsize,
                    0,
                    partial(self._text if kind == "text" else self._codec, num),
                )

    def draw_history(self) -> Iterator[KernelCase]:
        """Of the thinker's draws: what a row is chosen by, and what it leaves behind."""
        window = TextSampling().repetition_window_tokens
        for num in self.sizes.num_sessions:
            # Rings are read and histories written; what is recorded is a few numbers.
            yield KernelCase(
                "draw_history", f"{window} ids", "rows", num, 2 * 8 * num * window, 0, partial(self._remember, num)
            )

    def _remember(self, num: int) -> Launch:
        table = DrawTable(self.device)
        window = TextSampling().repetition_window_tokens
        places = [DrawPlace(table.take(window), Newest.TAKEN, window) for _ in range(num)]
        columns = torch.tensor(table.columns(places), device=self.device)
        ids, is_recorded = torch.arange(num, device=self.device), self._column(num, 1, torch.bool)

        def launch() -> None:
            table.record(table.past(columns), ids, is_recorded, ids)

        return launch

    def _column(self, num: int, value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num,), value, device=self.device, dtype=dtype)

    def _text(self, num: int) -> Launch:
        logits = self.normal(num, self.config.thinker.vocab_size)
        rules = TextRules(
            forbidden=torch.zeros(logits.shape[1], dtype=torch.bool, device=self.device),
            chunk_eos=1,
            turn_eos=2,
            listen=3,
            history=torch.randint(logits.shape[1], (num, 512), device=self.device),
            repetition_penalty=self._column(num, 1.05, torch.float32),
            length_penalty=self._column(num, 1.1, torch.float32),
            listen_scale=self._column(num, 1.0, torch.float32),
            listen_top_k=self._column(num, 0, torch.int64),
            must_speak=self._column(num, 0, torch.bool),
            is_greedy=self._column(num, 0, torch.bool),
            temperature=self._column(num, 0.7, torch.float32),
            top_k=self._column(num, 20, torch.int64),
            top_p=self._column(num, 0.8, torch.float32),
            seeds=torch.arange(num, device=self.device),
            counters=torch.arange(num, device=self.device),
        )
        return lambda: sample_text(logits, rules)

    def _codec(self, num: int) -> Launch:
        logits = self.normal(num, self.config.talker.num_codec_tokens, dtype=torch.float32)
        rules = CodecRules(
            history=torch.randint(logits.shape[1], (num, 16), device=self.device),
            repetition_penalty=self._column(num, 1.05, torch.float32),
            temperature=self._column(num, 0.8, torch.float32),
            is_eos_masked=self._column(num, 1, torch.bool),
            is_greedy=self._column(num, 0, torch.bool),
            seeds=torch.arange(num, device=self.device),
            counters=torch.arange(num, device=self.device),
        )
        return lambda: sample_codec(logits, rules)

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


def _named(kept_in: CacheDtype) -> str:
    return "" if kept_in is CacheDtype.MODEL else f", {kept_in.value}"


def layout(
    decoder: DecoderConfig,
    num_sessions: int,
    context_tokens: int,
    new_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    kept_in: CacheDtype,
) -> tuple[StepLayout, KVCache]:
    """A step of sessions with random caches of one layer, laid out as a stage does it.

    new_tokens: of each session, the last of its context.
    """
    seen: list[tuple[StepLayout, KVCache]] = []

    def forward(embeds: Tensor, step: StepLayout, cache: KVCache) -> Tensor:
        seen.append((step, cache))
        return embeds

    one = CacheConfig.for_tokens(context_tokens, num_segments=2)
    cache_config = CacheConfig(num_sessions * one.num_blocks, one.block_size, kept_in)
    paged = PagedDecoder(forward, replace(decoder, num_layers=1), cache_config, device, dtype)
    fill_randomly(paged.cache)
    rows = []
    for _ in range(num_sessions):
        context = filled_context(paged.pool, context_tokens - new_tokens, context_tokens)
        rows.append(Row(context, context.append(new_tokens)))
    paged.run(rows, torch.zeros(num_sessions * new_tokens, 1, device=device, dtype=dtype))
    return seen[0]
