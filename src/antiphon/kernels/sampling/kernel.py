"""`sample_text`, `sample_chat` and `sample_codec` in Triton: nothing is sorted, and nothing is read back by the host.

Text takes two launches. `_rule` evaluates the rules on pieces of the vocabulary, and notes the largest score of every
group of `_GROUP` ids. `_draw`, one program a row, looks only into groups whose largest score can be among the top k:
the k-th largest of the groups' is a bound for the k-th largest score. It finds the edges of top k and top p by search
over order-preserving keys, so that any k works; with k = V all groups are looked into. Speech takes one launch.
Shown, interpreted on the CPU, by tests/kernels/test_sampling_kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.dependent_launch import await_previous, dependent
from antiphon.kernels.sampling.contract import ChatRules, CodecRules, TextChoice, TextRules
from antiphon.kernels.sampling.device import key_of, mix, noise, read, threshold, unit
from antiphon.kernels.sampling.reference import MIN_KEPT

_GROUP = 64
"""Ids whose largest score is noted. With the thinker's vocabulary that is 2 372 groups; a top k of 20 opens about 20 of
them, 1 280 scores: both lists fit a tile or two."""
_PIECE = 2048
"""Ids of a program of `_rule`, which is four warps: 16 a thread. 75 programs a row."""
_TILE = 2048
"""Scores that `_draw`, 16 warps, looks at together: 64 comparisons a thread for 16 bounds."""
_NUM_PAST = 512
"""Places of a text's history that are looked at together: all that the default window has."""
_NUM_PAST_SPEECH = 64
"""Of speech's, where each is compared with each."""
_COLUMNS = [
    *("repetition", "length", "scale", "must_speak", "listen_top_k", "is_greedy"),
    *("temperature", "top_k", "top_p", "seeds", "counters", "history", "is_masked", "is_cut"),
]
"""Rules come as rows of few uploaded tensors: their alignment changes with the number of rows, and must not compile
anew."""


@triton.jit
def _ruled(  # noqa: PLR0913 - Triton's own types; it knows no dataclasses
    scores, ids, repetition, length, scale, must_speak,
    IS_REPEATED: tl.constexpr, TURN_EOS: tl.constexpr, LISTEN: tl.constexpr, IS_CHAT: tl.constexpr,
):  # fmt: skip
    """Scores by the rules that depend on the id and on whether it is repeated."""
    if IS_CHAT:
        if IS_REPEATED:
            scores = tl.where(scores < 0, scores * repetition, tl.div_rn(scores, repetition))
    else:
        if IS_REPEATED:
            scores = tl.div_rn(scores, repetition)
        by_length = tl.where(scores > 0, tl.div_rn(scores, length), scores * length)
        scores = tl.where(ids == TURN_EOS, by_length, scores)
        scores = tl.where(ids == LISTEN, scores * scale, scores)
        scores = tl.where(((ids == TURN_EOS) | (ids == LISTEN)) & (must_speak != 0), float("-inf"), scores)
    return scores


@triton.jit(do_not_specialize=["num_past"], do_not_specialize_on_alignment=_COLUMNS)
def _rule(  # noqa: PLR0913, PLR0915 - as above, and one algorithm
    logits, forbidden, history, num_past, repetition, length, scale, must_speak,
    scores, maxima, numbers, places,
    V: tl.constexpr, TURN_EOS: tl.constexpr, LISTEN: tl.constexpr, IS_CHAT: tl.constexpr,
    NUM_PIECES: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr, NUM_PAST: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    first = piece * PIECE
    logits += row * V
    scores += row * NUM_PIECES * PIECE
    if IS_CHAT:
        forbidden += row * V
    by = tl.load(repetition + row)
    by_length, by_scale, must = by, by, 0
    if not IS_CHAT:
        by_length, by_scale = tl.load(length + row), tl.load(scale + row)
        must = tl.load(must_speak + row).to(tl.int32)

    ids = first + tl.arange(0, PIECE)
    raw = tl.load(logits + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    is_forbidden = tl.load(forbidden + ids, mask=ids < V, other=1) != 0
    score = tl.where(is_forbidden, float("-inf"), raw)
    tl.store(scores + ids, _ruled(score, ids, by, by_length, by_scale, must, False, TURN_EOS, LISTEN, IS_CHAT))
    # Scores of repeated ids are written over, by other threads of this program.
    tl.debug_barrier()
    is_listen_repeated = tl.zeros((), tl.int32)
    for start in range(0, num_past, NUM_PAST):
        at = start + tl.arange(0, NUM_PAST)
        past = tl.load(history + row * num_past + at, mask=at < num_past, other=-1)
        is_here = (past >= first) & (past < tl.minimum(first + PIECE, V))
        again = tl.load(logits + past, mask=is_here, other=0.0).to(tl.float32)
        is_hidden = tl.load(forbidden + past, mask=is_here, other=1) != 0
        again = tl.where(is_hidden, float("-inf"), again)
        again = _ruled(again, past, by, by_length, by_scale, must, True, TURN_EOS, LISTEN, IS_CHAT)
        tl.store(scores + past, again, mask=is_here)
        is_listen_repeated = tl.maximum(is_listen_repeated, tl.max((past == LISTEN).to(tl.int32), 0))
    tl.debug_barrier()

    group = tl.arange(0, PIECE // GROUP)
    ids = first + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    score = tl.load(scores + ids)
    largest = tl.max(score, 1)
    tl.store(maxima + (row * NUM_PIECES + piece) * (PIECE // GROUP) + group, largest)
    top = tl.max(largest, 0)
    numbers += (row * 3) * NUM_PIECES + piece
    places += (row * 3) * NUM_PIECES + piece
    tl.store(numbers, top)
    tl.store(places, tl.min(tl.min(tl.where(score == top, ids, V), 1), 0))
    if not IS_CHAT:
        raw_top = tl.max(raw, 0)
        total = tl.sum(tl.exp(raw - raw_top), 0)
        tl.store(numbers + NUM_PIECES, raw_top)
        # A piece without a finite logit adds nothing.
        tl.store(numbers + 2 * NUM_PIECES, tl.where(raw_top == float("-inf"), 0.0, total))
        raw_ids = first + tl.arange(0, PIECE)
        tl.store(places + NUM_PIECES, tl.min(tl.where(raw == raw_top, raw_ids, V), 0))
        listen = tl.load(logits + LISTEN).to(tl.float32)
        listen = tl.where(tl.load(forbidden + LISTEN) != 0, float("-inf"), listen)
        once = _ruled(listen, LISTEN, by, by_length, by_scale, must, False, TURN_EOS, LISTEN, IS_CHAT)
        more = _ruled(listen, LISTEN, by, by_length, by_scale, must, True, TURN_EOS, LISTEN, IS_CHAT)
        listen = tl.where(is_listen_repeated != 0, more, once)
        tl.store(places + 2 * NUM_PIECES, tl.sum(tl.sum((score > listen).to(tl.int32), 1), 0))


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _draw(  # noqa: PLR0913, PLR0915 - as above
    logits, scores, maxima, numbers, places, groups,
    must_speak, listen_top_k, is_greedy, temperature, top_k, top_p, seeds, counters, ids_out, is_recorded_out,
    V: tl.constexpr, CHUNK_EOS: tl.constexpr, LISTEN: tl.constexpr, IS_CHAT: tl.constexpr,
    NUM_PIECES: tl.constexpr, BLOCK_PIECES: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    NUM_GROUPS: tl.constexpr = NUM_PIECES * PIECE // GROUP
    row = tl.program_id(0).to(tl.int64)
    scores += row * NUM_PIECES * PIECE
    maxima += row * NUM_GROUPS
    groups += row * NUM_GROUPS
    piece = tl.arange(0, BLOCK_PIECES)
    is_piece = piece < NUM_PIECES
    numbers += row * 3 * NUM_PIECES + piece
    places += row * 3 * NUM_PIECES + piece
    best = tl.load(numbers, mask=is_piece, other=float("-inf"))
    top = tl.max(best, 0)
    chosen = tl.min(tl.where(best == top, tl.load(places, mask=is_piece, other=V), V), 0)
    greedy = tl.load(is_greedy + row) != 0
    counter = tl.load(counters + row).to(tl.uint64, bitcast=True)
    seed = mix(tl.load(seeds + row).to(tl.uint64, bitcast=True))
    is_chunk_eos, is_listen = tl.zeros((), tl.int1), tl.zeros((), tl.int1)
    if not IS_CHAT:
        counter = counter * 2
        raw_best = tl.load(numbers + NUM_PIECES, mask=is_piece, other=float("-inf"))
        raw_top = tl.max(raw_best, 0)
        totals = tl.load(numbers + 2 * NUM_PIECES, mask=is_piece, other=0.0)
        total = tl.sum(totals * tl.exp(raw_best - raw_top), 0)
        share = tl.exp(tl.load(logits + row * V + CHUNK_EOS).to(tl.float32) - raw_top) / total
        likeliest = tl.min(tl.where(raw_best == raw_top, tl.load(places + NUM_PIECES, mask=is_piece, other=V), V), 0)
        rank = tl.sum(tl.load(places + 2 * NUM_PIECES, mask=is_piece, other=0), 0)
        may_not = tl.load(must_speak + row) != 0
        is_drawn = unit(mix(seed ^ (counter + 1))) < share
        is_chunk_eos = tl.where(greedy, likeliest == CHUNK_EOS, is_drawn) & (may_not == 0)
        is_listen = (rank < tl.load(listen_top_k + row)) & (may_not == 0)

    if (greedy | is_chunk_eos | is_listen) == 0:
        heat = tl.load(temperature + row)
        num_kept = tl.minimum(tl.load(top_k + row), V).to(tl.float32)
        top = tl.div_rn(top, heat)
        # Two bytes of the bound are enough: a lower one opens a few groups more.
        bound, over = threshold(maxima, groups, NUM_GROUPS, heat, top, 0, num_kept, False, False, 0, 4, TILE)
        num = tl.zeros((), tl.int32)
        for start in range(0, NUM_GROUPS, TILE):
            at = start + tl.arange(0, TILE)
            largest, key, group = read(maxima, groups, at, NUM_GROUPS, heat, 0)
            is_open = ((at < NUM_GROUPS) & (key >= bound)).to(tl.int32)
            tl.store(groups + num + tl.cumsum(is_open, 0) - 1, group, mask=is_open != 0)
            num += tl.sum(is_open, 0)
        # They are read by other threads of this program.
        tl.debug_barrier()
        num *= GROUP

        floor = tl.zeros((), tl.uint32)
        if num_kept < V:
            floor, over = threshold(scores, groups, num, heat, top, 0, num_kept, False, False, GROUP, 8, TILE)
        total = tl.zeros((), tl.float32)
        for start in range(0, num, TILE):
            cooled, key, ids = read(scores, groups, start + tl.arange(0, TILE), num, heat, GROUP)
            total += tl.sum(tl.where(key >= floor, tl.exp(cooled - top), 0.0), 0)
        allowed = tl.load(top_p + row) * total
        edge, above = threshold(scores, groups, num, heat, top, floor, allowed, True, True, GROUP, 8, TILE)

        state = mix(seed ^ counter)
        num_level = tl.zeros((), tl.int32)
        most = tl.full((), float("-inf"), tl.float32)
        for start in range(0, num, TILE):
            at = start + tl.arange(0, TILE)
            cooled, key, ids = read(scores, groups, at, num, heat, GROUP)
            # Of ids that are level with the edge the lower come first.
            is_level = ((at < num) & (key == edge)).to(tl.int32)
            mass_before = above + (num_level + tl.cumsum(is_level, 0) - is_level).to(tl.float32) * tl.exp(cooled - top)
            is_kept = (key >= floor) & ((key > edge) | ((is_level != 0) & (mass_before <= allowed)))
            num_level += tl.sum(is_level, 0)
            drawn = tl.where(is_kept & (at < num), cooled + noise(state, ids), float("-inf"))
            most_here = tl.max(drawn, 0)
            first_here = tl.min(tl.where(drawn == most_here, ids, V), 0)
            chosen = tl.where(most_here > most, first_here, chosen)
            most = tl.maximum(most, most_here)

    # Logits that are no numbers may not make an id that is none.
    chosen = tl.minimum(chosen, V - 1)
    if not IS_CHAT:
        chosen = tl.where(is_listen, LISTEN, chosen)
        chosen = tl.where(is_chunk_eos, CHUNK_EOS, chosen)
        tl.store(is_recorded_out + row, ((is_chunk_eos | is_listen) == 0).to(tl.uint8))
    tl.store(ids_out + row, chosen.to(tl.int64))


@triton.jit(do_not_specialize=["num_past"], do_not_specialize_on_alignment=_COLUMNS)
def _speak(  # noqa: PLR0913, PLR0915 - as above
    logits, scores, history, num_past, repetition, temperature, is_masked, is_greedy, seeds, counters,
    is_cut, top_p, top_k, ids_out,
    C: tl.constexpr, HAS_CUTS: tl.constexpr, MIN_CHOICES: tl.constexpr,
    BLOCK: tl.constexpr, NUM_PAST: tl.constexpr, TILE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    await_previous(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    logits += row * C
    scores += row * C
    history += row * num_past
    heat = tl.load(temperature + row)
    log_penalty = tl.log(tl.load(repetition + row).to(tl.float64))
    hides_end = tl.load(is_masked + row) != 0
    ids = tl.arange(0, BLOCK)
    is_id = ids < C
    score = tl.div_rn(tl.load(logits + ids, mask=is_id, other=float("-inf")), heat)
    tl.store(scores + ids, tl.where((ids == C - 1) & hides_end, float("-inf"), score), mask=is_id)
    # Scores of repeated ids are written over, by other threads of this program.
    tl.debug_barrier()
    for start in range(0, num_past, NUM_PAST):
        at = start + tl.arange(0, NUM_PAST)
        past = tl.load(history + at, mask=at < num_past, other=-1)
        counts = tl.zeros((NUM_PAST,), tl.int32)
        for other_start in range(0, num_past, NUM_PAST):
            other_at = other_start + tl.arange(0, NUM_PAST)
            other = tl.load(history + other_at, mask=other_at < num_past, other=-1)
            counts += tl.sum((past[:, None] == other[None, :]).to(tl.int32), 1)
        is_there = (past >= 0) & (past < C)
        factor = tl.exp(log_penalty * counts.to(tl.float64)).to(tl.float32)
        again = tl.div_rn(tl.load(logits + past, mask=is_there, other=0.0), heat)
        again = tl.where(again < 0, again * factor, tl.div_rn(again, factor))
        again = tl.where((past == C - 1) & hides_end, float("-inf"), again)
        tl.store(scores + past, again, mask=is_there)
    tl.debug_barrier()
    score = tl.load(scores + ids, mask=is_id, other=float("-inf"))
    top = tl.max(score, 0)
    if HAS_CUTS:  # noqa: SIM102 - this one is decided when it is compiled, the next by each row
        if tl.load(is_cut + row) != 0:
            key = tl.where(is_id, key_of(score), 0)
            allowed = tl.load(top_p + row) * tl.sum(tl.exp(score - top), 0)
            edge, above = threshold(scores, scores, C, 1.0, top, 0, allowed, True, False, 0, 8, TILE)
            is_level = (is_id & (key == edge)).to(tl.int32)
            mass_before = above + (tl.cumsum(is_level, 0) - is_level).to(tl.float32) * tl.exp(score - top)
            is_first = (is_id & (key > edge)) | ((is_level != 0) & (mass_before < allowed))
            num_kept = tl.minimum(tl.sum(is_first.to(tl.int32), 0), tl.load(top_k + row)).to(tl.float32)
            num_kept = tl.maximum(num_kept, MIN_CHOICES)
            edge, above = threshold(scores, scores, C, 1.0, top, 0, num_kept, False, False, 0, 8, TILE)
            is_level = (is_id & (key == edge)).to(tl.int32)
            num_before = above + (tl.cumsum(is_level, 0) - is_level).to(tl.float32)
            is_kept = (is_id & (key > edge)) | ((is_level != 0) & (num_before < num_kept))
            score = tl.where(is_kept, score, float("-inf"))
    counter = tl.load(counters + row).to(tl.uint64, bitcast=True)
    state = mix(mix(tl.load(seeds + row).to(tl.uint64, bitcast=True)) ^ counter)
    if tl.load(is_greedy + row) == 0:
        score += noise(state, ids)
        top = tl.max(score, 0)
    chosen = tl.min(tl.where((score == top) & is_id, ids, C - 1), 0)
    tl.store(ids_out + row, chosen.to(tl.int64))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """How a vocabulary of V is cut up. Small ones, which tests have, take small tiles."""

    V: int

    @property
    def piece(self) -> int:
        return min(_PIECE, max(_GROUP, triton.next_power_of_2(self.V)))

    @property
    def num_pieces(self) -> int:
        return -(-self.V // self.piece)

    @property
    def tile(self) -> int:
        return min(_TILE, self.piece)


@dataclass(frozen=True, slots=True)
class _Work:
    """What `_rule` leaves for `_draw`. R rows, S pieces, V rounded up to whole pieces.

    scores: [R, V] float32, by the rules and not cooled; -inf behind the vocabulary.
    maxima: [R, V / _GROUP] float32. groups: [R, V / _GROUP] int32, room for what `_draw` opens.
    numbers: [R, 3, S] float32: largest score, largest logit, sum of exp(logit - that).
    places: [R, 3, S] int32: first id of each of the two, how many scores are above listen's.
    """

    scores: Tensor
    maxima: Tensor
    groups: Tensor
    numbers: Tensor
    places: Tensor

    @staticmethod
    def of(num_rows: int, sizes: _Sizes, device: torch.device) -> _Work:
        num_ids = sizes.num_pieces * sizes.piece
        return _Work(
            torch.empty((num_rows, num_ids), dtype=torch.float32, device=device),
            torch.empty((num_rows, num_ids // _GROUP), dtype=torch.float32, device=device),
            torch.empty((num_rows, num_ids // _GROUP), dtype=torch.int32, device=device),
            torch.empty((num_rows, 3, sizes.num_pieces), dtype=torch.float32, device=device),
            torch.empty((num_rows, 3, sizes.num_pieces), dtype=torch.int32, device=device),
        )


def sample_text(logits: Tensor, rules: TextRules) -> TextChoice:
    """Tensors as in `op.py`."""
    num_rows, V = logits.shape
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_recorded = torch.empty(num_rows, dtype=torch.uint8, device=logits.device)
    if num_rows:
        logits, history = logits.contiguous(), rules.history.contiguous()
        must_speak = rules.must_speak.view(torch.uint8)
        sizes = _Sizes(V)
        work = _Work.of(num_rows, sizes, logits.device)
        _rule[(num_rows, sizes.num_pieces)](
            logits, rules.forbidden.view(torch.uint8), history, history.shape[1],
            rules.repetition_penalty, rules.length_penalty, rules.listen_scale, must_speak,
            work.scores, work.maxima, work.numbers, work.places,
            V=V, TURN_EOS=rules.turn_eos, LISTEN=rules.listen, IS_CHAT=False,
            NUM_PIECES=sizes.num_pieces, PIECE=sizes.piece, GROUP=_GROUP, NUM_PAST=_NUM_PAST, num_warps=4,
            **dependent(logits),
        )  # fmt: skip
        _draw[(num_rows,)](
            logits, work.scores, work.maxima, work.numbers, work.places, work.groups,
            must_speak, rules.listen_top_k, rules.is_greedy.view(torch.uint8),
            rules.temperature, rules.top_k, rules.top_p, rules.seeds, rules.counters, ids, is_recorded,
            V=V, CHUNK_EOS=rules.chunk_eos, LISTEN=rules.listen, IS_CHAT=False,
            NUM_PIECES=sizes.num_pieces, BLOCK_PIECES=triton.next_power_of_2(sizes.num_pieces), PIECE=sizes.piece,
            GROUP=_GROUP, TILE=sizes.tile, num_warps=16, **dependent(logits),
        )  # fmt: skip
    return TextChoice(ids, is_recorded.view(torch.bool))


def sample_chat(logits: Tensor, rules: ChatRules) -> Tensor:
    """Tensors as in `op.py`."""
    num_rows, V = logits.shape
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        logits, history = logits.contiguous(), rules.history.contiguous()
        sizes = _Sizes(V)
        work = _Work.of(num_rows, sizes, logits.device)
        # What only calls have is not read; any tensor stands for it.
        none = rules.repetition_penalty
        _rule[(num_rows, sizes.num_pieces)](
            logits, rules.forbidden.contiguous().view(torch.uint8), history, history.shape[1],
            rules.repetition_penalty, none, none, none,
            work.scores, work.maxima, work.numbers, work.places,
            V=V, TURN_EOS=-1, LISTEN=-1, IS_CHAT=True,
            NUM_PIECES=sizes.num_pieces, PIECE=sizes.piece, GROUP=_GROUP, NUM_PAST=_NUM_PAST, num_warps=4,
            **dependent(logits),
        )  # fmt: skip
        _draw[(num_rows,)](
            logits, work.scores, work.maxima, work.numbers, work.places, work.groups,
            none, none, rules.is_greedy.view(torch.uint8),
            rules.temperature, rules.top_k, rules.top_p, rules.seeds, rules.counters, ids, ids,
            V=V, CHUNK_EOS=-1, LISTEN=-1, IS_CHAT=True,
            NUM_PIECES=sizes.num_pieces, BLOCK_PIECES=triton.next_power_of_2(sizes.num_pieces), PIECE=sizes.piece,
            GROUP=_GROUP, TILE=sizes.tile, num_warps=16, **dependent(logits),
        )  # fmt: skip
    return ids


def sample_codec(logits: Tensor, rules: CodecRules) -> Tensor:
    """Tensors as in `op.py`."""
    num_rows, C = logits.shape
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        history, cut = rules.history.contiguous(), rules.cut
        is_greedy = rules.is_greedy.view(torch.uint8)
        block = triton.next_power_of_2(C)
        _speak[(num_rows,)](
            logits.contiguous(), torch.empty((num_rows, C), dtype=torch.float32, device=logits.device),
            history, history.shape[1], rules.repetition_penalty, rules.temperature,
            rules.is_eos_masked.view(torch.uint8), is_greedy, rules.seeds, rules.counters,
            # Without cuts they are not read; any tensor stands for them.
            cut.is_cut.view(torch.uint8) if cut else is_greedy,
            cut.top_p if cut else rules.temperature, cut.top_k if cut else rules.seeds, ids,
            C=C, HAS_CUTS=cut is not None, MIN_CHOICES=MIN_KEPT,
            BLOCK=block, NUM_PAST=_NUM_PAST_SPEECH, TILE=min(_TILE, block), num_warps=16, **dependent(logits),
        )  # fmt: skip
    return ids
