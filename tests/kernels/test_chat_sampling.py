"""The sampling rules of chats against plain Python (REFERENCE 14.5, 14.4): their text, and how their speech is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from antiphon.errors import ShapeError
from antiphon.kernels.sampling.contract import ChatRules, CodecCut, CodecRules
from antiphon.kernels.sampling.op import codec_scores, sample_chat
from antiphon.kernels.sampling.reference import MIN_KEPT

V = 7


@dataclass(frozen=True, slots=True)
class Row:
    """One row's logits and settings; by themselves the settings change nothing."""

    logits: Sequence[float]
    forbidden: Sequence[int] = ()
    history: Sequence[int] = ()
    penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = V
    top_p: float = 1.0
    is_greedy: bool = False
    seed: int = 0
    counter: int = 0


def rules_of(rows: Sequence[Row]) -> ChatRules:
    longest = max((len(row.history) for row in rows), default=0)
    histories = [[*row.history, *[-1] * (longest - len(row.history))] for row in rows]
    forbidden = [[token in row.forbidden for token in range(V)] for row in rows]
    return ChatRules(
        forbidden=torch.tensor(forbidden, dtype=torch.bool).view(len(rows), V),
        history=torch.tensor(histories, dtype=torch.int64).view(len(rows), longest),
        repetition_penalty=torch.tensor([row.penalty for row in rows]),
        is_greedy=torch.tensor([row.is_greedy for row in rows], dtype=torch.bool),
        temperature=torch.tensor([row.temperature for row in rows]),
        top_k=torch.tensor([row.top_k for row in rows], dtype=torch.int64),
        top_p=torch.tensor([row.top_p for row in rows]),
        seeds=torch.tensor([row.seed for row in rows], dtype=torch.int64),
        counters=torch.tensor([row.counter for row in rows], dtype=torch.int64),
    )


def sample(rows: Sequence[Row]) -> list[int]:
    logits = torch.tensor([row.logits for row in rows], dtype=torch.float32).view(len(rows), V)
    return sample_chat(logits, rules_of(rows)).tolist()


def probabilities(scores: Sequence[float]) -> list[float]:
    weights = [math.exp(score) for score in scores]
    return [weight / sum(weights) for weight in weights]


def plain(row: Row) -> list[float]:
    """The distribution that a row draws from."""
    scores = [-math.inf if token in row.forbidden else logit for token, logit in enumerate(row.logits)]
    for token in {*row.history}:
        scores[token] = scores[token] * row.penalty if scores[token] < 0 else scores[token] / row.penalty
    scores = [score / row.temperature for score in scores]
    best = sorted(range(V), key=lambda token: -scores[token])
    scores = [score if token in best[: row.top_k] else -math.inf for token, score in enumerate(scores)]
    mass = 0.0
    found = probabilities(scores)
    for token in best:
        if mass > row.top_p:
            scores[token] = -math.inf
        mass += found[token]
    return probabilities(scores)


LOGITS = (1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.0)
CASES = [
    Row(LOGITS),
    Row(LOGITS, forbidden=(2, 5)),
    Row(LOGITS, history=(2, 2, 4), penalty=2.0),
    Row(LOGITS, history=(1, 4), penalty=0.5),
    Row(LOGITS, temperature=0.5),
    Row(LOGITS, top_k=2),
    Row(LOGITS, top_p=0.5),
    Row(LOGITS, forbidden=(2,), history=(5,), penalty=1.3, temperature=1.7, top_k=4, top_p=0.8),
]


@pytest.mark.parametrize("row", CASES)
def test_draws_are_distributed_as_the_rules_say(row: Row) -> None:
    num_draws = 4000
    drawn = sample([replace(row, counter=counter) for counter in range(num_draws)])
    for token, probability in enumerate(plain(row)):
        # Five standard deviations of a count of independent draws.
        margin = 5 * math.sqrt(probability * (1 - probability) / num_draws)
        assert abs(drawn.count(token) / num_draws - probability) <= margin, token


def test_the_likeliest_token_is_that_after_penalties_and_bans() -> None:
    greedy = [
        Row(LOGITS, is_greedy=True, temperature=0.1, top_k=1, top_p=0.1),
        Row(LOGITS, is_greedy=True, forbidden=(2,)),
        Row(LOGITS, is_greedy=True, history=(2,), penalty=3.0),
        Row([-1.0] * 6 + [-1.1], is_greedy=True, history=(0, 1, 2, 3, 4, 5), penalty=2.0),
    ]
    assert sample(greedy) == [2, 5, 5, 6]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = [replace(row, seed=seed, counter=3) for seed, row in enumerate(CASES)]
    assert sample(rows) == [sample([row])[0] for row in rows]
    assert sample([]) == []


def test_logits_that_do_not_fit_their_rules_are_refused() -> None:
    with pytest.raises(ShapeError):
        sample_chat(torch.zeros(2, V), rules_of([Row(LOGITS)]))


def kept(logits: Sequence[float], top_p: float, top_k: int, *, is_cut: bool = True) -> list[int]:
    """Ids that a row of a chat's speech may draw."""
    rules = CodecRules(
        history=torch.empty(1, 0, dtype=torch.int64),
        repetition_penalty=torch.ones(1),
        temperature=torch.ones(1),
        is_eos_masked=torch.zeros(1, dtype=torch.bool),
        is_greedy=torch.zeros(1, dtype=torch.bool),
        seeds=torch.zeros(1, dtype=torch.int64),
        counters=torch.zeros(1, dtype=torch.int64),
        cut=CodecCut(torch.tensor([is_cut]), torch.tensor([top_p]), torch.tensor([top_k])),
    )
    scores = codec_scores(torch.tensor([logits]), rules)[0]
    assert scores[scores.isfinite()].tolist() == torch.tensor(logits)[scores.isfinite()].tolist()
    return scores.isfinite().nonzero()[:, 0].tolist()


SPEECH = [math.log(weight) for weight in (0.05, 0.3, 0.1, 0.25, 0.2, 0.07, 0.03)]


def test_speech_is_cut_to_the_likeliest_tokens_that_make_up_the_mass_and_are_not_too_many() -> None:
    assert kept(SPEECH, 0.6, V) == [1, 3, 4]
    assert kept(SPEECH, 0.8, V) == [1, 2, 3, 4]
    assert kept(SPEECH, 0.8, 3) == [1, 3, 4]
    assert kept(SPEECH, 1.0, 5) == [1, 2, 3, 4, 5]


def test_speech_always_has_a_choice() -> None:
    assert len(kept(SPEECH, 0.01, V)) == len(kept(SPEECH, 1.0, 1)) == MIN_KEPT


def test_the_speech_of_a_call_is_not_cut_beside_that_of_a_chat() -> None:
    assert kept(SPEECH, 1.0, 1, is_cut=False) == [*range(V)]
