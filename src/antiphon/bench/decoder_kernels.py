"""The cases of the operators of thinker and talker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.bench.contexts import fill_randomly, filled_context
from antiphon.bench.kernel_case import CaseMaker, KernelCase, Launch, Rival
from antiphon.core.cache_dtype import CacheDtype
from antiphon.core.sampling import TextSampling
from antiphon.kernels.few_rows.contract import MAX_ROWS
from antiphon.kernels.few_rows.op import linear_add, norm_gated, norm_linear
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
from antiphon.kernels.step_rotations.op import step_rotations
from antiphon.models.minicpmo.config import DecoderConfig
from antiphon.stages.draw_table import DrawPlace, DrawTable, Newest
from antiphon.stages.paged import CacheConfig, PagedDecoder
from antiphon.stages.step_packing import Row

MIXED_EVERY, MIXED_TOKENS = 5, 12
"""Of the sessions of a step one in five hears a unit, of so many tokens, while the others speak: about as in a call."""


class DecoderKernels(CaseMaker):
    """Cases of one layer, and of what stands around all of them."""

    def cases(self) -> tuple[KernelCase, ...]:
        return (
            *self.paged_attention(),
            *self.few_rows(),
            *self.key_slots(),
            *self.step_rotations(),
            *self.rotary_store(),
            *self.rms_norm(),
            *self.silu_mul(),
            *self.rotate_keys(),
            *self.sampling(),
            *self.draw_history(),
        )

    @property
    def decoder(self) -> DecoderConfig:
        return self.config.thinker.decoder

    @property
    def rows(self) -> tuple[int, ...]:
        """Tokens of steps: decoding ones, and a full mixed one."""
        return tuple(sorted({*self.sizes.num_sessions, self.sizes.step_tokens}))

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
                partial(self._attend, [1] * num, kept_in),
                (rival,) if kept_in is CacheDtype.MODEL else (),
            )
        for num, kept_in in product(self.sizes.num_sessions, CacheDtype):
            new_tokens = [1 if session % MIXED_EVERY else MIXED_TOKENS for session in range(num)]
            yield KernelCase(
                "paged_attention",
                f"decode, every {MIXED_EVERY}th with {MIXED_TOKENS} new tokens, {keys} keys each{_named(kept_in)}",
                "sessions",
                num,
                num * 2 * keys * kv_heads * self._head_bytes(kept_in) + sum(new_tokens) * query_bytes,
                4 * sum(new_tokens) * keys * heads * head_dim,
                partial(self._attend, new_tokens, kept_in),
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
                partial(self._attend, [num_tokens], kept_in),
            )

    def _head_bytes(self, kept_in: CacheDtype) -> int:
        """Of a key or a value of a head."""
        one = CacheConfig(num_blocks=1, block_size=1, dtype=kept_in)
        layer = replace(self.decoder, num_layers=1, num_kv_heads=1)
        return one.make(layer, self.dtype, torch.device("meta")).num_bytes // 2

    def _attend(self, new_tokens: Sequence[int], kept_in: CacheDtype) -> Launch:
        """new_tokens: of each session, at the end of its context."""
        step, cache = layout(self.decoder, new_tokens, self.sizes.context_tokens, self.device, self.dtype, kept_in)
        (layer,) = cache.layers()
        q_anchor, q_ring = (
            self.normal(sum(new_tokens), self.decoder.num_heads, self.decoder.head_dim) for _ in range(2)
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
        keys = self.sizes.context_tokens
        step, _ = layout(self.decoder, [1] * num_sessions, keys, self.device, self.dtype, CacheDtype.MODEL)
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


def _named(kept_in: CacheDtype) -> str:
    return "" if kept_in is CacheDtype.MODEL else f", {kept_in.value}"


def layout(
    decoder: DecoderConfig,
    new_tokens: Sequence[int],
    context_tokens: int,
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
    cache_config = CacheConfig(len(new_tokens) * one.num_blocks, one.block_size, kept_in)
    paged = PagedDecoder(forward, replace(decoder, num_layers=1), cache_config, device, dtype)
    fill_randomly(paged.cache)
    rows = []
    for num_new in new_tokens:
        context = filled_context(paged.pool, context_tokens - num_new, context_tokens)
        rows.append(Row(context, context.append(num_new)))
    paged.run(rows, torch.zeros(sum(new_tokens), 1, device=device, dtype=dtype))
    return seen[0]
