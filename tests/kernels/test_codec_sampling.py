"""The talker's sampling rules against plain Python (REFERENCE 8.2)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.sampling.contract import CodecRules
from antiphon.kernels.sampling.draws import gumbel
from antiphon.kernels.sampling.op import codec_scores, sample_codec
from kernels.formulas import EPS

C = 9
EOS = C - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One row's logits and settings; by themselves the settings change nothing."""

    logits: Sequence[float]
    history: Sequence[int] = ()
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    is_eos_masked: bool = False
    is_greedy: bool = False
    seed: int = 0
    counter: int = 0


def logits_of(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([row.logits for row in rows], dtype=torch.float32).view(len(rows), C)


def rules_of(rows: Sequence[Row]) -> CodecRules:
    longest = max((len(row.history) for row in rows), default=0)
    histories = [[*row.history, *[-1] * (longest - len(row.history))] for row in rows]
    return CodecRules(
        history=torch.tensor(histories, dtype=torch.int64).view(len(rows), longest),
        repetition_penalty=torch.tensor([row.repetition_penalty for row in rows]),
        temperature=torch.tensor([row.temperature for row in rows]),
        is_eos_masked=torch.tensor([row.is_eos_masked for row in rows], dtype=torch.bool),
        is_greedy=torch.tensor([row.is_greedy for row in rows], dtype=torch.bool),
        seeds=torch.tensor([row.seed for row in rows], dtype=torch.int64),
        counters=torch.tensor([row.counter for row in rows], dtype=torch.int64),
    )


def sample(rows: Sequence[Row]) -> list[int]:
    return sample_codec(logits_of(rows), rules_of(rows)).tolist()


def plain_scores(row: Row) -> list[float]:
    scores = [logit / row.temperature for logit in row.logits]
    for token, count in Counter(row.history).items():
        penalty = row.repetition_penalty**count
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    if row.is_eos_masked:
        scores[EOS] = -math.inf
    return scores


def plain(row: Row) -> int:
    noise = gumbel(torch.tensor([row.seed]), torch.tensor([row.counter]), C)[0].tolist()
    scores = [score + (0.0 if row.is_greedy else noise[token]) for token, score in enumerate(plain_scores(row))]
    return max(range(C), key=lambda token: scores[token])


def random_rows(num_rows: int = 60) -> list[Row]:
    rng = torch.Generator().manual_seed(0)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=rng))

    return [
        Row(
            logits=torch.randn(C, generator=rng).tolist(),
            history=[whole(0, C - 1) for _ in range(whole(0, 16))],
            repetition_penalty=1 + whole(0, 8) / 16,
            temperature=whole(2, 8) / 4,
            is_eos_masked=whole(0, 1) == 1,
            is_greedy=whole(0, 3) == 0,
            seed=whole(0, 2**40),
            counter=whole(0, 1000),
        )
        for _ in range(num_rows)
    ]


def test_every_row_of_a_crowd_decides_as_plain_python_does() -> None:
    rows = random_rows()
    assert sample(rows) == [plain(row) for row in rows]


def test_scores_are_those_of_plain_python() -> None:
    rows = random_rows()
    got = codec_scores(logits_of(rows), rules_of(rows))
    want = torch.tensor([plain_scores(row) for row in rows], dtype=torch.float64)
    # One rounding each for the cooled logit and the product, and a power of up to 16 factors.
    torch.testing.assert_close(got.double(), want, rtol=(2 + 16) * EPS, atol=0)


def test_a_row_decides_the_same_alone_and_in_a_crowd() -> None:
    rows = random_rows()
    assert [token for row in rows for token in sample([row])] == sample(rows)


def test_a_step_without_rows_decides_nothing() -> None:
    assert sample([]) == []


def test_the_penalty_counts_repetitions_and_lowers_whatever_the_sign() -> None:
    row = Row([3.0, -1.0, 0.0, 0, 0, 0, 0, 0, 0], history=[0, 1, 0, 1, 1], repetition_penalty=2.0)
    assert codec_scores(logits_of([row]), rules_of([row]))[0, :3].tolist() == [0.75, -8.0, 0.0]


def test_the_temperature_comes_before_the_penalty() -> None:
    row = Row([3.0] * C, history=[0], repetition_penalty=2.0, temperature=0.5)
    assert codec_scores(logits_of([row]), rules_of([row]))[0, :2].tolist() == [3.0, 6.0]


def test_a_chunk_that_may_not_end_does_not() -> None:
    likely = Row([0.0] * EOS + [30.0])
    assert set(sample([replace(likely, counter=i) for i in range(100)])) == {EOS}
    masked = [replace(likely, is_eos_masked=True, counter=i) for i in range(300)]
    assert set(sample(masked)) == set(range(EOS))
    assert sample([replace(likely, is_eos_masked=True, is_greedy=True)]) == [0]


@pytest.mark.parametrize(("num_seeds", "num_draws"), [(1, 20_000), (20_000, 1), (100, 200)])
def test_draws_follow_the_whole_distribution(num_seeds: int, num_draws: int) -> None:
    row = Row(
        [1.0, 2.0, -1.0, 0.5, 0.0, 1.5, -0.5, 0.0, 0.7], history=[1, 1, 2], repetition_penalty=1.3, temperature=0.8
    )
    counts = Counter(
        sample([replace(row, seed=seed, counter=i) for seed in range(num_seeds) for i in range(num_draws)])
    )
    weights = [math.exp(score) for score in plain_scores(row)]
    wanted = [counts.total() * weight / sum(weights) for weight in weights]
    chi_square = sum((counts[token] - want) ** 2 / want for token, want in enumerate(wanted))
    # Seeds are fixed; a correct sampler is beyond five deviations about once in a million.
    assert abs(chi_square - (C - 1)) < 5 * math.sqrt(2 * (C - 1))


def test_logits_of_another_shape_than_their_rules_are_refused() -> None:
    rules = rules_of([Row([0.0] * C)])
    for logits in (torch.zeros(2, C), torch.zeros(C)):
        with pytest.raises(ShapeError, match="codec logits must be"):
            sample_codec(logits, rules)
        with pytest.raises(ShapeError, match="codec logits must be"):
            codec_scores(logits, rules)
