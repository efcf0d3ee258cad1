"""The sampling rules in the reference's order, vectorised over rows. Nothing here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels.sampling.contract import ChatRules, CodecCut, CodecRules, TextChoice, TextRules
from antiphon.kernels.sampling.draws import gumbel, uniform

MIN_KEPT = 3
"""Codec tokens that a cut leaves at least (REFERENCE 14.5)."""


def sample_text(logits: Tensor, rules: TextRules) -> TextChoice:
    """Shapes and meaning as in `op.sample_text`."""
    raw = logits.float()
    is_chunk_eos = _chooses_chunk_eos(raw, rules) & ~rules.must_speak
    scores = _penalised(raw.masked_fill(rules.forbidden, -torch.inf), rules)
    listen_scores = scores[:, rules.listen].masked_fill(rules.must_speak, -torch.inf)
    scores[:, rules.listen] = listen_scores
    scores[:, rules.turn_eos] = scores[:, rules.turn_eos].masked_fill(rules.must_speak, -torch.inf)
    rank = (scores > listen_scores[:, None]).sum(-1)
    is_forced_listen = (rank < rules.listen_top_k) & ~rules.must_speak
    drawn = _truncated(scores / rules.temperature[:, None], rules.top_k, rules.top_p)
    drawn = drawn + gumbel(rules.seeds, 2 * rules.counters, drawn.shape[-1])
    chosen = torch.where(rules.is_greedy, scores.argmax(-1), drawn.argmax(-1))
    chosen = chosen.masked_fill(is_forced_listen, rules.listen).masked_fill(is_chunk_eos, rules.chunk_eos)
    return TextChoice(chosen, ~(is_chunk_eos | is_forced_listen))


def sample_chat(logits: Tensor, rules: ChatRules) -> Tensor:
    """Shapes and meaning as in `op.sample_chat`."""
    scores = logits.float().masked_fill(rules.forbidden, -torch.inf)
    penalty = rules.repetition_penalty[:, None]
    is_repeated = _counts(rules.history, scores.shape[-1]) > 0
    scores = torch.where(is_repeated, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    drawn = _truncated(scores / rules.temperature[:, None], rules.top_k, rules.top_p)
    drawn = drawn + gumbel(rules.seeds, rules.counters, drawn.shape[-1])
    return torch.where(rules.is_greedy, scores.argmax(-1), drawn.argmax(-1))


def codec_scores(logits: Tensor, rules: CodecRules) -> Tensor:
    """Shapes and meaning as in `op.codec_scores`."""
    scores = logits / rules.temperature[:, None]
    penalty = rules.repetition_penalty[:, None] ** _counts(rules.history, scores.shape[-1])
    scores = torch.where(scores < 0, scores * penalty, scores / penalty)
    eos = scores[:, -1].masked_fill(rules.is_eos_masked, -torch.inf)
    scores = torch.cat([scores[:, :-1], eos[:, None]], dim=-1)
    return scores if rules.cut is None else _cut(scores, rules.cut)


def sample_codec(logits: Tensor, rules: CodecRules) -> Tensor:
    """Shapes and meaning as in `op.sample_codec`."""
    scores = codec_scores(logits, rules)
    drawn = scores + gumbel(rules.seeds, rules.counters, scores.shape[-1])
    return torch.where(rules.is_greedy, scores.argmax(-1), drawn.argmax(-1))


def _chooses_chunk_eos(raw: Tensor, rules: TextRules) -> Tensor:
    """The separate draw at temperature 1 on untouched logits; only whether it is chunk_eos matters."""
    probability = raw.softmax(-1)[:, rules.chunk_eos]
    is_drawn = uniform(rules.seeds, 2 * rules.counters + 1) < probability
    return torch.where(rules.is_greedy, raw.argmax(-1) == rules.chunk_eos, is_drawn)


def _penalised(scores: Tensor, rules: TextRules) -> Tensor:
    """Repetition by division whatever the sign (quirk 2), length on turn_eos, scale on listen."""
    is_repeated = _counts(rules.history, scores.shape[-1]) > 0
    scores = torch.where(is_repeated, scores / rules.repetition_penalty[:, None], scores)
    turn_eos = scores[:, rules.turn_eos]
    by_length = torch.where(turn_eos > 0, turn_eos / rules.length_penalty, turn_eos * rules.length_penalty)
    scores[:, rules.turn_eos] = by_length
    scores[:, rules.listen] *= rules.listen_scale
    return scores


def _truncated(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the top k (ties with the k-th survive), then the smallest set whose mass exceeds top p."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    last_kept = ordered.gather(1, top_k.clamp(max=scores.shape[-1])[:, None] - 1)
    ordered = ordered.masked_fill(ordered < last_kept, -torch.inf)
    mass = ordered.softmax(-1).cumsum(-1)
    mass_before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=-1)
    ordered = ordered.masked_fill(mass_before > top_p[:, None], -torch.inf)
    return torch.empty_like(scores).scatter(1, order, ordered)


def _cut(scores: Tensor, cut: CodecCut) -> Tensor:
    """Keep the smallest set whose mass reaches top p, of it the top k, and never fewer than `MIN_KEPT`."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    mass = ordered.softmax(-1).cumsum(-1)
    mass_before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=-1)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    is_kept = ((mass_before < cut.top_p[:, None]) & (rank < cut.top_k[:, None])) | (rank < MIN_KEPT)
    ordered = ordered.masked_fill(~is_kept & cut.is_cut[:, None], -torch.inf)
    return torch.empty_like(scores).scatter(1, order, ordered)


def _counts(history: Tensor, num_ids: int) -> Tensor:
    """How often each id stands in each row's history: [R, W] → [R, num_ids]; -1 counts for nothing."""
    counts = torch.zeros(history.shape[0], num_ids + 1, device=history.device)
    places = history.masked_fill(history < 0, num_ids)
    return counts.scatter_add(1, places, torch.ones_like(places, dtype=counts.dtype))[:, :num_ids]
