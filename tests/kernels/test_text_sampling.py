"""The thinker's sampling rules against plain Python, one row at a time (REFERENCE 4.4)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.sampling.contract import TextRules
from antiphon.kernels.sampling.draws import gumbel, uniform
from antiphon.kernels.sampling.op import sample_text

CHUNK_EOS, TURN_EOS, LISTEN = 9, 1, 2
FORBIDDEN = (CHUNK_EOS, 3)
V = 12


@dataclass(frozen=True, slots=True)
class Row:
    """One row's logits and settings; by themselves the settings change nothing."""

    logits: Sequence[float]
    history: Sequence[int] = ()
    repetition_penalty: float = 1.0
    length_penalty: float = 1.0
    listen_scale: float = 1.0
    listen_top_k: int = 0
    must_speak: bool = False
    is_greedy: bool = True
    temperature: float = 1.0
    top_k: int = V
    top_p: float = 1.0
    seed: int = 0
    counter: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    token: int
    is_recorded: bool = True


def sample(rows: Sequence[Row]) -> list[Choice]:
    logits = torch.tensor([row.logits for row in rows], dtype=torch.float32).view(len(rows), V)
    choice = sample_text(logits, rules_of(rows))
    return [Choice(*pair) for pair in zip(choice.ids.tolist(), choice.is_recorded.tolist(), strict=True)]


def rules_of(rows: Sequence[Row]) -> TextRules:
    longest = max((len(row.history) for row in rows), default=0)
    histories = [[*row.history, *[-1] * (longest - len(row.history))] for row in rows]

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    return TextRules(
        forbidden=torch.zeros(V, dtype=torch.bool).index_fill(0, torch.tensor(FORBIDDEN), value=True),
        chunk_eos=CHUNK_EOS,
        turn_eos=TURN_EOS,
        listen=LISTEN,
        history=torch.tensor(histories, dtype=torch.int64).view(len(rows), longest),
        repetition_penalty=column([row.repetition_penalty for row in rows]),
        length_penalty=column([row.length_penalty for row in rows]),
        listen_scale=column([row.listen_scale for row in rows]),
        listen_top_k=column([row.listen_top_k for row in rows], torch.int64),
        must_speak=column([row.must_speak for row in rows], torch.bool),
        is_greedy=column([row.is_greedy for row in rows], torch.bool),
        temperature=column([row.temperature for row in rows]),
        top_k=column([row.top_k for row in rows], torch.int64),
        top_p=column([row.top_p for row in rows]),
        seeds=column([row.seed for row in rows], torch.int64),
        counters=column([row.counter for row in rows], torch.int64),
    )


def softmax(scores: Sequence[float]) -> list[float]:
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / sum(weights) for weight in weights]


def first_largest(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda token: scores[token])


def penalised(row: Row) -> list[float]:
    scores = [-math.inf if token in FORBIDDEN else score for token, score in enumerate(row.logits)]
    for token in set(row.history):
        scores[token] /= row.repetition_penalty
    end = scores[TURN_EOS]
    scores[TURN_EOS] = end / row.length_penalty if end > 0 else end * row.length_penalty
    scores[LISTEN] *= row.listen_scale
    return scores


def truncated(row: Row, scores: Sequence[float]) -> dict[int, float]:
    """Ids that can be drawn, with their scores."""
    cooled = [score / row.temperature for score in scores]
    order = sorted(range(V), key=lambda token: -cooled[token])
    kth = cooled[order[min(row.top_k, V) - 1]]
    order = [token for token in order if cooled[token] >= kth]
    kept, mass_before = {}, 0.0
    for token, probability in zip(order, softmax([cooled[token] for token in order]), strict=True):
        if mass_before > row.top_p:
            break
        kept[token] = cooled[token]
        mass_before += probability
    return kept


def plain(row: Row) -> Choice:
    """The rules in order, without a tensor but for the noise."""
    seed, counter = torch.tensor([row.seed]), torch.tensor([row.counter])
    if row.is_greedy:
        is_chunk_eos = first_largest(row.logits) == CHUNK_EOS
    else:
        is_chunk_eos = uniform(seed, 2 * counter + 1).item() < softmax(row.logits)[CHUNK_EOS]
    if is_chunk_eos and not row.must_speak:
        return Choice(CHUNK_EOS, is_recorded=False)
    scores = penalised(row)
    if row.must_speak:
        scores[LISTEN] = scores[TURN_EOS] = -math.inf
    elif sum(score > scores[LISTEN] for score in scores) < row.listen_top_k:
        return Choice(LISTEN, is_recorded=False)
    if row.is_greedy:
        return Choice(first_largest(scores))
    noise = gumbel(seed, 2 * counter, V)[0].tolist()
    kept = truncated(row, scores)
    return Choice(max(kept, key=lambda token: kept[token] + noise[token]))


def random_rows(seed: int) -> list[Row]:
    """Rows of coarse logits, so that ties are frequent."""
    rng = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=rng))

    def real(low: float, high: float) -> float:
        # As float32 holds it: the operator sees the same number.
        return float(low + (high - low) * torch.rand(1, generator=rng))

    return [
        Row(
            logits=[whole(-6, 6) / 2 for _ in range(V)],
            history=[whole(0, V - 1) for _ in range(whole(0, 6))],
            repetition_penalty=real(0.8, 1.5),
            length_penalty=real(0.8, 1.5),
            listen_scale=real(0.5, 2),
            listen_top_k=max(0, whole(-6, 3)),
            must_speak=whole(0, 3) == 0,
            is_greedy=whole(0, 3) == 0,
            temperature=real(0.3, 2),
            top_k=whole(1, V + 3),
            top_p=real(0.1, 1),
            seed=whole(0, 2**40),
            counter=whole(0, 1000),
        )
        for _ in range(40)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_every_row_of_a_crowd_decides_as_plain_python_does(seed: int) -> None:
    rows = random_rows(seed)
    assert sample(rows) == [plain(row) for row in rows]


def test_a_row_decides_the_same_alone_and_in_a_crowd() -> None:
    rows = random_rows(99)
    assert [choice for row in rows for choice in sample([row])] == sample(rows)


def test_a_step_without_rows_decides_nothing() -> None:
    assert sample([]) == []


def logits(**of: float) -> list[float]:
    """All 0 but for the named ids: `t5=2.0`."""
    return [of.get(f"t{token}", 0.0) for token in range(V)]


def test_chunk_eos_wins_if_it_is_the_likeliest_of_the_raw_logits() -> None:
    assert sample([Row(logits(t9=2.0, t5=1.0), history=[0], repetition_penalty=9.0)]) == [
        Choice(CHUNK_EOS, is_recorded=False)
    ]


def test_a_likeliest_id_other_than_chunk_eos_has_no_say_in_what_follows() -> None:
    assert sample([Row(logits(t9=1.0, t5=2.0, t6=1.9), history=[5], repetition_penalty=2.0)]) == [Choice(6)]


def test_forbidden_ids_are_never_chosen() -> None:
    assert sample([Row(logits(t3=9.0, t4=1.0))]) == [Choice(4)]


def test_repetition_divides_whatever_the_sign_and_once_however_often() -> None:
    low = {f"t{token}": -8.0 for token in range(V)}
    # -3 / 2 = -1.5 is raised above -2, and not to -0.75 by its second place in the history.
    assert sample([Row(logits(**{**low, "t5": -3.0, "t6": -2.0}), history=[5, 5], repetition_penalty=2.0)]) == [
        Choice(5)
    ]
    assert sample([Row(logits(**{**low, "t5": -3.0, "t6": -1.0}), history=[5, 5], repetition_penalty=2.0)]) == [
        Choice(6)
    ]
    assert sample([Row(logits(t5=3.0, t6=2.0), history=[5], repetition_penalty=2.0)]) == [Choice(6)]


def test_empty_places_of_a_history_mean_no_id() -> None:
    assert sample([Row(logits(t0=3.0, t11=2.9), history=[-1, -1], repetition_penalty=2.0)]) == [Choice(0)]


def test_the_length_penalty_lowers_the_end_of_a_turn_by_its_sign() -> None:
    assert sample([Row(logits(t1=3.0, t6=2.9))]) == [Choice(TURN_EOS)]
    assert sample([Row(logits(t1=3.0, t6=2.9), length_penalty=1.1)]) == [Choice(6)]
    below = {f"t{token}": -8.0 for token in range(V)}
    assert sample([Row(logits(**{**below, "t1": -2.0, "t6": -2.1}))]) == [Choice(TURN_EOS)]
    assert sample([Row(logits(**{**below, "t1": -2.0, "t6": -2.1}), length_penalty=1.1)]) == [Choice(6)]


def test_the_listen_scale_multiplies_the_listen_logit() -> None:
    assert sample([Row(logits(t2=2.0, t6=2.5))]) == [Choice(6)]
    assert sample([Row(logits(t2=2.0, t6=2.5), listen_scale=1.5)]) == [Choice(LISTEN)]


def test_listening_is_forced_when_fewer_ids_than_asked_for_are_above_it_and_is_not_recorded() -> None:
    two_above = logits(t2=1.0, t6=2.0, t7=3.0)
    assert sample([Row(two_above, listen_top_k=2)]) == [Choice(7)]
    assert sample([Row(two_above, listen_top_k=3)]) == [Choice(LISTEN, is_recorded=False)]
    # An id that is level with it is not above it, and neither are forbidden ones.
    assert sample([Row(logits(t2=1.0, t6=1.0, t3=5.0, t9=0.5), listen_top_k=1)]) == [Choice(LISTEN, is_recorded=False)]


def drawn(row: Row, num_draws: int = 3000) -> Counter[int]:
    """How often each id comes, counting draws up."""
    return Counter(
        choice.token for choice in sample([replace(row, is_greedy=False, counter=i) for i in range(num_draws)])
    )


NEVER = -60.0
"""A logit of chunk_eos at which it is never drawn."""


def test_ids_that_tie_with_the_last_of_top_k_survive() -> None:
    row = Row(logits(t9=NEVER, t4=2.0, t5=1.0, t6=1.0, t7=1.0), top_k=2)
    assert set(drawn(row)) == {4, 5, 6, 7}
    assert set(drawn(replace(row, top_k=1))) == {4}


def test_top_p_keeps_an_id_while_the_mass_before_it_does_not_exceed_the_limit() -> None:
    # Four equal ids of mass 1/4 each, exact in float32; of equal ids the lower comes first.
    quarters = Row(logits(t9=NEVER, t4=9.0, t5=9.0, t6=9.0, t7=9.0), top_k=4)
    assert set(drawn(replace(quarters, top_p=0.5))) == {4, 5, 6}
    assert set(drawn(replace(quarters, top_p=0.4999))) == {4, 5}
    assert set(drawn(replace(quarters, top_p=0.0001))) == {4}
    assert set(drawn(quarters)) == {4, 5, 6, 7}


def test_top_k_comes_before_top_p() -> None:
    # Among the top 2 each has mass 1/2; among all 4 the mass before the third id would still be 1/2.
    row = Row(logits(t9=NEVER, t4=9.0, t5=9.0, t6=8.0, t7=8.0), top_k=2, top_p=0.49)
    assert set(drawn(row)) == {4}
    assert set(drawn(replace(row, top_k=4))) == {4, 5}


def check_distribution(counts: Counter[int], wanted: dict[int, float]) -> None:
    """Chi-square with fixed seeds: a correct sampler is beyond five deviations about once in a million."""
    num_draws, num_free = sum(counts.values()), len(wanted) - 1
    assert set(counts) <= set(wanted)
    chi_square = sum((counts[token] - num_draws * p) ** 2 / (num_draws * p) for token, p in wanted.items())
    assert abs(chi_square - num_free) < 5 * math.sqrt(2 * num_free)


UNEVEN = Row(logits(t9=NEVER, t1=-1.0, t2=0.5, t4=1.0, t5=2.0, t6=1.5, t7=-2.0), temperature=0.7, top_k=6, top_p=0.9)


@pytest.mark.parametrize(("num_seeds", "num_draws"), [(1, 20_000), (20_000, 1), (100, 200)])
def test_draws_follow_the_truncated_distribution(num_seeds: int, num_draws: int) -> None:
    kept = truncated(UNEVEN, penalised(UNEVEN))
    assert 2 < len(kept) < 6
    uneven = replace(UNEVEN, is_greedy=False)
    rows = [replace(uneven, seed=seed, counter=i) for seed in range(num_seeds) for i in range(num_draws)]
    wanted = dict(zip(kept, softmax(list(kept.values())), strict=True))
    check_distribution(Counter(choice.token for choice in sample(rows)), wanted)


def test_chunk_eos_comes_as_often_as_the_raw_logits_say_and_does_not_bias_the_other_draw() -> None:
    row = replace(UNEVEN, logits=logits(t9=1.0, t4=1.0, t5=2.0, t6=1.5), temperature=0.5)
    share = softmax(row.logits)[CHUNK_EOS]
    kept = truncated(row, penalised(row))
    others = softmax(list(kept.values()))
    wanted = {CHUNK_EOS: share, **{token: (1 - share) * p for token, p in zip(kept, others, strict=True)}}
    check_distribution(drawn(row, 20_000), wanted)


def test_logits_of_another_shape_than_their_rules_are_refused() -> None:
    for shape in ((2, V), (1, V + 1)):
        with pytest.raises(ShapeError, match="sample_text wants logits"):
            sample_text(torch.zeros(shape), rules_of([Row(logits())]))
