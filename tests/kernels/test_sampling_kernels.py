"""The kernels of sampling choose what the reference chooses: interpreted, and on a GPU where there is one.

That the reference follows the rules is shown by test_text_sampling.py, test_chat_sampling.py and
test_codec_sampling.py. Choices could differ where two sums of float32 are within rounding; seeds are fixed, and no row
here is so.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from antiphon.kernels.sampling import reference
from antiphon.kernels.sampling.contract import ChatRules, CodecCut, CodecRules, TextChoice, TextRules
from antiphon.kernels.sampling.op import sample_chat, sample_codec, sample_text
from kernels.places import Place, Run

RELEASED_V = 151_748
RELEASED_C = 6562


class Dice:
    """Random operands for `num_rows` rows."""

    def __init__(self, seed: int, num_rows: int) -> None:
        self._rng = torch.Generator().manual_seed(seed)
        self.num_rows = num_rows

    def real(self, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(self.num_rows, generator=self._rng)

    def whole(self, low: int, high: int) -> Tensor:
        """Both ends may come."""
        return torch.randint(low, high + 1, (self.num_rows,), generator=self._rng)

    def one_in(self, times: int) -> Tensor:
        return self.whole(1, times) == 1

    def logits(self, num_ids: int, *, is_coarse: bool) -> Tensor:
        """Coarse ones tie often."""
        values = 3 * torch.randn(self.num_rows, num_ids, generator=self._rng)
        return (2 * values).round() / 2 if is_coarse else values

    def history(self, width: int, num_ids: int) -> Tensor:
        """Ids with repetitions among likely and unlikely ones, and empty places."""
        ids = torch.randint(0, num_ids, (self.num_rows, width), generator=self._rng)
        ids[:, ::3] = ids[:, ::3] % max(1, num_ids // 8)
        ids[:, 5::7] = -1
        return ids

    def mask(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._rng) < 0.05


def text_rules(dice: Dice, V: int, width: int) -> TextRules:
    return TextRules(
        forbidden=dice.mask(V).index_fill(0, torch.tensor([V - 1]), value=True),
        chunk_eos=V - 1,
        turn_eos=1,
        listen=V // 2,
        history=dice.history(width, V),
        repetition_penalty=dice.real(0.8, 1.5),
        length_penalty=dice.real(0.8, 1.5),
        listen_scale=dice.real(0.5, 2),
        listen_top_k=dice.whole(-6, 3).clamp(min=0),
        must_speak=dice.one_in(4),
        is_greedy=dice.one_in(4),
        temperature=dice.real(0.3, 2),
        top_k=dice.whole(1, V + 3),
        top_p=dice.real(0.1, 1),
        seeds=dice.whole(-(2**62), 2**62),
        counters=dice.whole(0, 2**40),
    )


def chat_rules(dice: Dice, V: int, width: int) -> ChatRules:
    return ChatRules(
        forbidden=dice.mask(dice.num_rows, V),
        history=dice.history(width, V),
        repetition_penalty=dice.real(0.8, 1.5),
        is_greedy=dice.one_in(4),
        temperature=dice.real(0.3, 2),
        top_k=dice.whole(1, V + 3),
        top_p=dice.real(0.1, 1),
        seeds=dice.whole(-(2**62), 2**62),
        counters=dice.whole(0, 2**40),
    )


def codec_rules(dice: Dice, C: int, width: int, *, has_cuts: bool) -> CodecRules:
    cut = CodecCut(is_cut=~dice.one_in(3), top_p=dice.real(0.1, 1), top_k=dice.whole(1, C + 3))
    return CodecRules(
        history=dice.history(width, C),
        repetition_penalty=dice.real(0.8, 1.5),
        temperature=dice.real(0.3, 2),
        is_eos_masked=dice.one_in(2),
        is_greedy=dice.one_in(4),
        seeds=dice.whole(-(2**62), 2**62),
        counters=dice.whole(0, 2**40),
        cut=cut if has_cuts else None,
    )


def text_on(device: torch.device, rules: TextRules) -> TextRules:
    """The rules there, as rows of few tensors, which is how a stage uploads them: aligned to nothing."""
    chat = chat_on(device, as_chat(rules))
    length, scale = torch.stack([rules.length_penalty, rules.listen_scale]).to(device)
    listen_top_k, must_speak = torch.stack([rules.listen_top_k, rules.must_speak.long()]).to(device)
    return TextRules(
        forbidden=rules.forbidden.to(device),
        chunk_eos=rules.chunk_eos,
        turn_eos=rules.turn_eos,
        listen=rules.listen,
        history=chat.history,
        repetition_penalty=chat.repetition_penalty,
        length_penalty=length,
        listen_scale=scale,
        listen_top_k=listen_top_k,
        must_speak=must_speak.bool(),
        is_greedy=chat.is_greedy,
        temperature=chat.temperature,
        top_k=chat.top_k,
        top_p=chat.top_p,
        seeds=chat.seeds,
        counters=chat.counters,
    )


def as_chat(rules: TextRules) -> ChatRules:
    """What calls and chats share."""
    return ChatRules(
        forbidden=rules.forbidden,
        history=rules.history,
        repetition_penalty=rules.repetition_penalty,
        is_greedy=rules.is_greedy,
        temperature=rules.temperature,
        top_k=rules.top_k,
        top_p=rules.top_p,
        seeds=rules.seeds,
        counters=rules.counters,
    )


def chat_on(device: torch.device, rules: ChatRules) -> ChatRules:
    penalty, temperature, top_p = torch.stack([rules.repetition_penalty, rules.temperature, rules.top_p]).to(device)
    numbers = torch.stack([rules.top_k, rules.seeds, rules.counters, rules.is_greedy.long()]).to(device)
    top_k, seeds, counters, is_greedy = numbers
    return ChatRules(
        forbidden=rules.forbidden.to(device),
        history=rules.history.to(device),
        repetition_penalty=penalty,
        is_greedy=is_greedy.bool(),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seeds=seeds,
        counters=counters,
    )


def codec_on(device: torch.device, rules: CodecRules) -> CodecRules:
    cut = rules.cut
    return CodecRules(
        history=rules.history.to(device),
        repetition_penalty=rules.repetition_penalty.to(device),
        temperature=rules.temperature.to(device),
        is_eos_masked=rules.is_eos_masked.to(device),
        is_greedy=rules.is_greedy.to(device),
        seeds=rules.seeds.to(device),
        counters=rules.counters.to(device),
        cut=None if cut is None else CodecCut(cut.is_cut.to(device), cut.top_p.to(device), cut.top_k.to(device)),
    )


def text_at(place: Place, logits: Tensor, rules: TextRules) -> TextChoice:
    if place is Place.INTERPRETED:
        from antiphon.kernels.sampling import kernel

        return kernel.sample_text(logits, rules)
    return sample_text(logits.to(place.device), text_on(place.device, rules))


def chat_at(place: Place, logits: Tensor, rules: ChatRules) -> Tensor:
    if place is Place.INTERPRETED:
        from antiphon.kernels.sampling import kernel

        return kernel.sample_chat(logits, rules)
    return sample_chat(logits.to(place.device), chat_on(place.device, rules))


def codec_at(place: Place, logits: Tensor, rules: CodecRules) -> Tensor:
    if place is Place.INTERPRETED:
        from antiphon.kernels.sampling import kernel

        return kernel.sample_codec(logits, rules)
    return sample_codec(logits.to(place.device), codec_on(place.device, rules))


def compare_text(place: Place, logits: Tensor, rules: TextRules) -> None:
    got, want = text_at(place, logits, rules), reference.sample_text(logits, rules)
    assert got.ids.tolist() == want.ids.tolist()
    assert got.is_recorded.tolist() == want.is_recorded.tolist()


def compare_chat(place: Place, logits: Tensor, rules: ChatRules) -> list[int]:
    """What both choose."""
    got: list[int] = chat_at(place, logits, rules).tolist()
    assert got == reference.sample_chat(logits, rules).tolist()
    return got


def compare_codec(place: Place, logits: Tensor, rules: CodecRules) -> list[int]:
    """What both choose."""
    got: list[int] = codec_at(place, logits, rules).tolist()
    assert got == reference.sample_codec(logits, rules).tolist()
    return got


def num_rows(place: Place, num_ids: int) -> int:
    """The interpreter takes a tenth of a second for a row."""
    if place is Place.INTERPRETED:
        return 5 if num_ids < 1000 else 3
    return 200


def check_text(place: Place, seed: int, V: int, width: int) -> None:
    dice = Dice(seed, num_rows(place, V))
    logits = dice.logits(V, is_coarse=seed % 2 == 0)
    rules = text_rules(dice, V, width)
    if seed == 1:
        rules = replace(rules, top_k=torch.full((dice.num_rows,), 20))
    compare_text(place, logits, rules)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("V", "width"), [(12, 0), (100, 6), (3000, 600)])
def test_text_is_chosen_as_the_reference_chooses(at_kernel: Run, seed: int, V: int, width: int) -> None:
    at_kernel(check_text, seed, V, width)


def check_chat(place: Place, seed: int, V: int, width: int) -> None:
    dice = Dice(seed, num_rows(place, V))
    compare_chat(place, dice.logits(V, is_coarse=seed % 2 == 0), chat_rules(dice, V, width))


@pytest.mark.parametrize(("seed", "V", "width"), [(0, 7, 0), (1, 3000, 70)])
def test_a_chats_text_is_chosen_as_the_reference_chooses(at_kernel: Run, seed: int, V: int, width: int) -> None:
    at_kernel(check_chat, seed, V, width)


def check_codec(place: Place, seed: int, C: int, width: int, has_cuts: bool) -> None:  # noqa: FBT001
    dice = Dice(seed, num_rows(place, C))
    logits = dice.logits(C, is_coarse=seed % 2 == 0)
    compare_codec(place, logits, codec_rules(dice, C, width, has_cuts=has_cuts))


@pytest.mark.parametrize(("seed", "C", "width"), [(0, 4, 0), (0, 100, 70), (1, RELEASED_C, 16)])
@pytest.mark.parametrize("has_cuts", [True, False], ids=["cut", "whole"])
def test_speech_is_chosen_as_the_reference_chooses(
    at_kernel: Run,
    seed: int,
    C: int,
    width: int,
    has_cuts: bool,  # noqa: FBT001
) -> None:
    at_kernel(check_codec, seed, C, width, has_cuts)


def check_half(place: Place, dtype: torch.dtype) -> None:
    """Logits of the model's dtype tie often; whatever is level with the k-th stays."""
    dice = Dice(5, 4)
    logits = dice.logits(3000, is_coarse=False).to(dtype)
    rules = replace(text_rules(dice, 3000, 40), is_greedy=torch.zeros(4, dtype=torch.bool))
    compare_text(place, logits, rules)


def test_half_precision_logits_are_judged_in_float32(at_kernel: Run) -> None:
    at_kernel(check_half, torch.float16)


def check_levels(place: Place) -> None:
    """All ids are level: those of the first masses come, in order of ids, across groups and tiles."""
    V, rows = 4500, 4
    logits = torch.zeros(rows, V)
    dice = Dice(1, rows)
    rules = replace(
        chat_rules(dice, V, 0),
        forbidden=torch.zeros(rows, V, dtype=torch.bool),
        is_greedy=torch.zeros(rows, dtype=torch.bool),
        top_k=torch.tensor([1, 5, V, V]),
        top_p=torch.tensor([0.3, 0.001, 0.9, 1.0]),
    )
    ids = compare_chat(place, logits, rules)
    assert len(set(ids)) > 1


def test_level_scores_stay_in_order_of_ids(at_kernel: Run) -> None:
    at_kernel(check_levels)


def check_quarters(place: Place) -> None:
    """Four level ids of mass 1/4, exact in float32: the mass before the third does not exceed 0.5."""
    rows = 9
    logits = torch.zeros(rows, 300)
    logits[:, [4, 70, 131, 299]] = 9.0
    dice = Dice(4, rows)
    rules = replace(
        chat_rules(dice, 300, 0),
        forbidden=torch.zeros(rows, 300, dtype=torch.bool),
        is_greedy=torch.zeros(rows, dtype=torch.bool),
        top_k=torch.full((rows,), 4),
        top_p=torch.full((rows,), 0.5),
    )
    assert set(compare_chat(place, logits, rules)) == {4, 70, 131}
    # Of almost the same mass, but in bits: one above three, whose last bits are all ones.
    above, level = torch.tensor([0x41100010, 0x4110000F], dtype=torch.int32).view(torch.float32)
    logits[:, [4, 70, 299]], logits[:, 131] = level, above
    rules = replace(rules, top_p=torch.full((rows,), 0.6), temperature=torch.ones(rows))
    assert set(compare_chat(place, logits, rules)) == {4, 70, 131}


def check_cut(place: Place) -> None:
    """Eight level ids of mass 1/8, exact in float32: half of the rows keep those with less than 0.5 before them."""
    rows = 20
    logits = torch.zeros(rows, 300)
    logits[:, [4, 9, 70, 131, 140, 200, 250, 290]] = 90.0
    is_by_mass = torch.arange(rows) < rows // 2
    rules = CodecRules(
        history=torch.full((rows, 1), -1),
        repetition_penalty=torch.ones(rows),
        temperature=torch.ones(rows),
        is_eos_masked=torch.ones(rows, dtype=torch.bool),
        is_greedy=torch.zeros(rows, dtype=torch.bool),
        seeds=torch.arange(40, 40 + rows),
        counters=torch.zeros(rows, dtype=torch.int64),
        cut=CodecCut(
            torch.ones(rows, dtype=torch.bool),
            top_p=torch.where(is_by_mass, 0.5, 1.0),
            top_k=torch.where(is_by_mass, 300, 5),
        ),
    )
    ids = compare_codec(place, logits, rules)
    assert set(ids[: rows // 2]) == {4, 9, 70, 131}
    assert set(ids[rows // 2 :]) == {4, 9, 70, 131, 140}


def test_a_cut_keeps_the_lower_of_level_tokens(at_kernel: Run) -> None:
    at_kernel(check_cut)


def check_long_history(place: Place) -> None:
    """1.05 ** 100 takes a token below another, 1.05 ** 36 would not."""
    logits = torch.zeros(1, 20)
    logits[0, 3], logits[0, 5] = 10.0, 1.0
    rules = replace(
        codec_rules(Dice(0, 1), 20, 1, has_cuts=False),
        history=torch.full((1, 100), 3),
        repetition_penalty=torch.tensor([1.05]),
        is_greedy=torch.ones(1, dtype=torch.bool),
    )
    assert compare_codec(place, logits, rules) == [5]


def test_speech_counts_repetitions_in_the_whole_history(at_kernel: Run) -> None:
    at_kernel(check_long_history)


def check_repeated_listen(place: Place) -> None:
    dice = Dice(0, 1)
    rules = replace(
        text_rules(dice, 12, 2),
        forbidden=torch.zeros(12, dtype=torch.bool),
        history=torch.tensor([[-1, 6]]),
        repetition_penalty=torch.tensor([2.0]),
        listen_scale=torch.ones(1),
        listen_top_k=torch.ones(1, dtype=torch.int64),
        must_speak=torch.zeros(1, dtype=torch.bool),
        is_greedy=torch.ones(1, dtype=torch.bool),
    )
    logits = torch.zeros(1, 12)
    logits[0, rules.listen], logits[0, 9] = 2.0, 1.5
    # Halved, listening is second and is not forced.
    compare_text(place, logits, rules)
    assert text_at(place, logits, rules).ids.tolist() == [9]
    fresh = replace(rules, history=torch.tensor([[-1, 5]]))
    compare_text(place, logits, fresh)
    assert text_at(place, logits, fresh).ids.tolist() == [rules.listen]


def test_listening_is_ranked_with_its_penalty(at_kernel: Run) -> None:
    at_kernel(check_repeated_listen)


def test_an_id_stays_while_the_mass_before_it_does_not_exceed_the_limit(at_kernel: Run) -> None:
    at_kernel(check_quarters)


def check_signs(place: Place) -> None:
    """A zero is a zero: -0.0 is level with 0.0, for the k-th and for the order."""
    logits = torch.tensor([[-0.0, 0.0, -0.0, -1.0], [0.0, -0.0, 0.0, -1.0]]).repeat(3, 1)
    dice = Dice(2, 6)
    rules = replace(
        chat_rules(dice, 4, 0),
        forbidden=torch.zeros(6, 4, dtype=torch.bool),
        top_k=torch.full((6,), 1),
        top_p=torch.full((6,), 0.5),
    )
    assert set(compare_chat(place, logits, rules)) == {0, 1}


def test_both_zeros_are_level(at_kernel: Run) -> None:
    at_kernel(check_signs)


def check_nothing(place: Place) -> None:
    dice, logits = Dice(0, 0), torch.zeros(0, 9)
    compare_text(place, logits, text_rules(dice, 9, 3))
    compare_chat(place, logits, chat_rules(dice, 9, 3))
    compare_codec(place, logits, codec_rules(dice, 9, 3, has_cuts=True))


def test_a_step_without_rows_decides_nothing(at_kernel: Run) -> None:
    at_kernel(check_nothing)


def check_broken(place: Place) -> None:
    """A row of a broken network ends in some id, which the next step can embed."""
    dice = Dice(3, 3)
    chat = replace(chat_rules(dice, 300, 4), forbidden=torch.zeros(3, 300, dtype=torch.bool))
    for logits in (torch.full((3, 300), torch.nan), torch.full((3, 300), -torch.inf)):
        for ids in (
            text_at(place, logits, text_rules(dice, 300, 4)).ids,
            chat_at(place, logits, chat),
            codec_at(place, logits, codec_rules(dice, 300, 4, has_cuts=True)),
        ):
            assert ((ids >= 0) & (ids < 300)).all()


def test_logits_that_are_no_numbers_give_an_id_all_the_same(at_kernel: Run) -> None:
    at_kernel(check_broken)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the released vocabulary is slow to interpret")
@pytest.mark.parametrize("top_k", [1, 20, 100, 5000, RELEASED_V])
def test_the_released_vocabulary_is_sampled_on_a_gpu_as_on_the_cpu(top_k: int) -> None:
    dice = Dice(top_k, 33)
    logits = dice.logits(RELEASED_V, is_coarse=False).bfloat16()
    rules = replace(text_rules(dice, RELEASED_V, 512), top_k=torch.full((33,), top_k))
    compare_text(Place.GPU, logits, rules)
    compare_chat(Place.GPU, logits, replace(chat_rules(dice, RELEASED_V, 512), top_k=torch.full((33,), top_k)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a graph is a GPU's")
def test_sampling_can_be_captured_in_a_graph_and_replayed() -> None:
    dice, device = Dice(1, 5), torch.device("cuda")
    logits, rules = dice.logits(RELEASED_V, is_coarse=False), text_rules(dice, RELEASED_V, 512)
    there, text = torch.zeros_like(logits, device=device), text_on(device, rules)
    speech, codec = dice.logits(RELEASED_C, is_coarse=False), codec_rules(dice, RELEASED_C, 16, has_cuts=False)
    speech_there, codec_there = torch.zeros_like(speech, device=device), codec_on(device, codec)
    sample_text(there, text)
    sample_codec(speech_there, codec_there)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choice, spoken = sample_text(there, text), sample_codec(speech_there, codec_there)
    there.copy_(logits)
    speech_there.copy_(speech)
    graph.replay()
    assert choice.ids.tolist() == reference.sample_text(logits, rules).ids.tolist()
    assert spoken.tolist() == reference.sample_codec(speech, codec).tolist()
