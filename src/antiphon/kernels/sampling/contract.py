"""Operands of the sampling operators: how rows decide, as tensors with one entry per row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TextRules:
    """What a thinker row decides by (REFERENCE 4.4). R rows, V vocabulary.

    forbidden: [V] bool, ids that are never sampled.
    chunk_eos, turn_eos, listen: ids.
    history: [R, W] int64, the row's last recorded ids; -1 for empty places.
    repetition_penalty, length_penalty, listen_scale: [R] float32.
    listen_top_k: [R] int64; 0 switches the rule off.
    must_speak: [R] bool, the row may draw neither listen nor the end of a chunk or turn. Not the reference's.
    is_greedy: [R] bool.
    temperature, top_p: [R] float32. top_k: [R] int64, at least 1.
    seeds, counters: [R] int64; two draws of a decision share a counter.
    """

    forbidden: Tensor
    chunk_eos: int
    turn_eos: int
    listen: int
    history: Tensor
    repetition_penalty: Tensor
    length_penalty: Tensor
    listen_scale: Tensor
    listen_top_k: Tensor
    must_speak: Tensor
    is_greedy: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    counters: Tensor


@dataclass(frozen=True, slots=True)
class ChatRules:
    """What a row of a chat decides by (REFERENCE 14.4). R rows, V vocabulary.

    forbidden: [R, V] bool, ids that the row never samples.
    history: [R, W] int64, the answer's last ids; -1 for empty places.
    repetition_penalty: [R] float32.
    is_greedy: [R] bool.
    temperature, top_p: [R] float32. top_k: [R] int64, at least 1.
    seeds, counters: [R] int64.
    """

    forbidden: Tensor
    history: Tensor
    repetition_penalty: Tensor
    is_greedy: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    counters: Tensor


@dataclass(frozen=True, slots=True)
class TextChoice:
    """ids: [R] int64. is_recorded: [R] bool, whether the id enters the row's history."""

    ids: Tensor
    is_recorded: Tensor


@dataclass(frozen=True, slots=True)
class CodecCut:
    """Of how many tokens rows choose, which only chats' do (REFERENCE 14.5). R rows.

    is_cut: [R] bool, the others choose of all. top_p: [R] float32. top_k: [R] int64.
    """

    is_cut: Tensor
    top_p: Tensor
    top_k: Tensor


@dataclass(frozen=True, slots=True)
class CodecRules:
    """What a talker row decides by (REFERENCE 8.2). R rows.

    history: [R, W] int64, the chunk's last tokens; -1 for empty places.
    repetition_penalty, temperature: [R] float32.
    is_eos_masked: [R] bool, the chunk may not end yet.
    is_greedy: [R] bool.
    seeds, counters: [R] int64.
    cut: None if every row chooses of all tokens.
    """

    history: Tensor
    repetition_penalty: Tensor
    temperature: Tensor
    is_eos_masked: Tensor
    is_greedy: Tensor
    seeds: Tensor
    counters: Tensor
    cut: CodecCut | None = None
