"""Turns of the talker on a small random network. Numbers: the golden kind talker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import build
from antiphon.core.context import Context
from antiphon.core.messages import Address, CodecChunk, Handoff
from antiphon.core.sampling import CodecSampling, Draws
from antiphon.core.window import SlideMode
from antiphon.errors import AntiphonError, ResourceExhausted
from antiphon.kernels.sampling.contract import CodecRules
from antiphon.kernels.sampling.op import sample_codec
from antiphon.models.minicpmo.checkpoint import Part, WeightFile
from antiphon.models.minicpmo.config import DecoderConfig, TalkerConfig
from antiphon.models.minicpmo.talker import TalkerNetwork
from antiphon.models.minicpmo.tiny.weights import random_weights
from antiphon.stages.paged import CacheConfig, PagedDecoder
from antiphon.stages.step_packing import Row
from antiphon.stages.talker.speaker import MAX_CHUNK_TOKENS
from antiphon.stages.talker.stage import TalkerStage
from antiphon.stages.talker.state import TalkerSession, TalkerState

CONFIG = TalkerConfig(
    DecoderConfig(
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=24,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        has_qk_norm=False,
    ),
    llm_hidden_size=12,
    num_text_tokens=20,
    num_codec_tokens=16,
    audio_bos_id=19,
    max_position_tokens=4096,
    text_eos_id=18,
)
EOS = CONFIG.num_codec_tokens - 1
"""One token of sixteen: most chunks that may end do, and few at once."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random_network(config: TalkerConfig = CONFIG) -> TalkerNetwork:
    with torch.device("meta"):
        network = TalkerNetwork(config)
    network.load_state_dict(random_weights(Part("talker", network, WeightFile.MAIN, "")), assign=True)
    network.prepare()
    return network


def stage(config: TalkerConfig = CONFIG, *, num_blocks: int = 300, chain_steps: int = 1) -> TalkerStage:
    return TalkerStage(random_network(config), CacheConfig(num_blocks), chain_steps=chain_steps)


def session(seed: int = 0, draws: Draws = Draws.SAMPLED) -> TalkerSession:
    return TalkerSession("call", CodecSampling(), draws, seed)


def handoff(num_tokens: int = 3, *, unit: int = 0, ends_turn: bool = False) -> Handoff[Tensor]:
    """Words of unit `unit`, with states of their own."""
    rng = torch.Generator().manual_seed(unit)
    hidden = torch.randn(num_tokens, CONFIG.llm_hidden_size, generator=rng)
    ids = torch.randint(0, CONFIG.audio_bos_id, (num_tokens,), generator=rng)
    return Handoff(Address("call", epoch=1, turn=2, seq=unit), 0.0, unit, tuple(ids.tolist()), hidden, ends_turn)


def speak(talker: TalkerStage, state: TalkerState, said: Handoff[Tensor]) -> CodecChunk:
    return build.run_alone(talker.speaker.loop, talker.speaker.speak(state, said))


def turn(talker: TalkerStage, state: TalkerState, num_chunks: int) -> list[CodecChunk]:
    return [
        speak(talker, state, handoff(2 + unit % 3, unit=unit, ends_turn=unit == num_chunks - 1))
        for unit in range(num_chunks)
    ]


def said(talker: TalkerStage, settings: TalkerSession) -> list[tuple[int, ...]]:
    return [chunk.codec_tokens for chunk in turn(talker, talker.open(settings), 4)]


def test_a_turn_of_any_length_stays_within_the_positions_and_forgets_its_oldest_chunks() -> None:
    config = replace(CONFIG, max_position_tokens=120)
    talker = stage(config)
    state = talker.open(session())
    lengths: list[int] = []
    num_dropped = 0
    for unit in range(200):
        heard = handoff(unit % 7, unit=unit)
        room = config.max_position_tokens - (len(heard.token_ids) + 1 + MAX_CHUNK_TOKENS)
        chunk = speak(talker, state, heard)
        state.context.check()
        kept = [record.unit for record in state.context.units]
        assert kept == list(range(kept[0], unit + 1))
        # It fits, and one chunk more would not have; equal lengths are cut one chunk early (low is below high).
        assert sum(lengths[kept[0] :]) <= room
        assert kept[0] == num_dropped or sum(lengths[kept[0] - 1 :]) >= room
        num_dropped = kept[0]
        lengths.append(len(heard.token_ids) + 1 + len(chunk.codec_tokens))
        assert state.context.num_tokens == sum(lengths[num_dropped:]) <= config.max_position_tokens
    assert num_dropped > 190
    assert state.context.shift == sum(lengths[:num_dropped])
    speak(talker, state, handoff(unit=200, ends_turn=True))
    assert state.context.num_tokens == 0
    talker.speaker.decoder.pool.check([])


@pytest.mark.parametrize("chain_steps", [2, 5, 25])
def test_chains_say_what_steps_one_by_one_say(chain_steps: int) -> None:
    """Of sessions that begin one after the other, so that conditions come between chains; some chunks end early."""

    def all_said(chain_steps: int) -> list[object]:
        talker = stage(chain_steps=chain_steps)
        states = [talker.open(replace(session(seed), session_id=f"call {seed}")) for seed in range(4)]
        said: list[object] = []
        for unit in range(4):
            chunks: dict[str, object] = {}
            for number, state in enumerate(states):
                heard = handoff(2 + number, unit=unit, ends_turn=unit == 3)
                talker.speaker.loop.add(state.session.session_id, talker.speaker.speak(state, heard), 0.0)
                chunks |= {one.session_id: one.result for one in talker.speaker.loop.step()}
            while not talker.speaker.loop.is_idle:
                chunks |= {one.session_id: one.result for one in talker.speaker.loop.step()}
            said += [chunks[f"call {seed}"] for seed in range(4)]
            said += [(state.context.num_tokens, state.context.num_blocks, state.num_draws) for state in states]
            for state in states:
                state.context.check()
        assert (talker.speaker.chains.num_runs.num_launched > 0) is (chain_steps > 1)
        return said

    found = all_said(chain_steps)
    assert found == all_said(1)
    assert len({len(chunk.codec_tokens) for chunk in found if isinstance(chunk, CodecChunk)}) > 1


def test_a_session_holds_no_block_before_and_between_its_turns() -> None:
    talker = stage()
    state = talker.open(session())
    talker.speaker.decoder.pool.check([])
    for _ in range(2):
        first, middle, last = turn(talker, state, 3)
        assert [chunk.is_first_of_turn for chunk in (first, middle, last)] == [True, False, False]
        assert [chunk.ends_turn for chunk in (first, middle, last)] == [False, False, True]
        talker.speaker.decoder.pool.check([])


def test_closing_in_the_middle_of_a_turn_gives_everything_back_and_may_be_repeated() -> None:
    talker = stage()
    state = talker.open(session())
    speak(talker, state, handoff())
    assert state.context.num_blocks > 0
    talker.close(state)
    talker.close(state)
    talker.speaker.decoder.pool.check([])


def test_a_chunk_says_whose_it_is() -> None:
    talker = stage()
    heard = handoff(unit=7)
    chunk = speak(talker, talker.open(session()), heard)
    assert (chunk.address, chunk.unit) == (heard.address, 7)


def test_the_same_seed_says_the_same_and_other_seeds_something_else() -> None:
    talker = stage()
    by_seed = [said(talker, session(seed)) for seed in range(5)]
    assert said(stage(), session(3)) == by_seed[3]
    assert len({tuple(chunks) for chunks in by_seed}) == 5


def test_the_most_likely_tokens_do_not_depend_on_the_seed() -> None:
    talker = stage()
    first, second = (said(talker, session(seed, Draws.MOST_LIKELY)) for seed in (1, 2))
    assert first == second


def test_turns_of_a_session_do_not_repeat_their_draws() -> None:
    talker = stage()
    state = talker.open(session())
    first, second = turn(talker, state, 4), turn(talker, state, 4)
    assert [chunk.codec_tokens for chunk in first] != [chunk.codec_tokens for chunk in second]


def test_sessions_in_one_pool_do_not_hear_each_other() -> None:
    alone = said(stage(), session(5))
    talker = stage()
    state, other = talker.open(session(5)), talker.open(session(6))
    together = []
    for unit in range(4):
        speak(talker, other, handoff(5, unit=50 + unit))
        together.append(speak(talker, state, handoff(2 + unit % 3, unit=unit, ends_turn=unit == 3)).codec_tokens)
    assert together == alone


def test_only_the_first_and_the_last_chunk_of_a_turn_may_be_short() -> None:
    talker = stage()
    chunks = [turn(talker, talker.open(session(seed)), 3) for seed in range(20)]
    assert all(EOS not in chunk.codec_tokens for three in chunks for chunk in three)
    lengths = [{len(three[place].codec_tokens) for three in chunks} for place in range(3)]
    assert lengths[1] == {MAX_CHUNK_TOKENS}
    for place in (0, 2):
        assert min(lengths[place]) < MAX_CHUNK_TOKENS
        assert max(lengths[place]) == MAX_CHUNK_TOKENS


def test_a_chunk_may_be_empty_and_still_be_remembered() -> None:
    talker = stage(replace(CONFIG, num_codec_tokens=2))
    states = [talker.open(session(seed)) for seed in range(6)]
    chunks = [speak(talker, state, handoff(3)) for state in states]
    empty = [state for state, chunk in zip(states, chunks, strict=True) if not chunk.codec_tokens]
    assert empty
    # The condition is in the context, with audio_bos behind it: the next chunk goes on with the turn.
    assert all(state.context.num_tokens == 4 for state in empty)
    assert not speak(talker, empty[0], handoff(unit=1)).is_first_of_turn


def test_a_unit_without_words_goes_on_with_the_turn() -> None:
    talker = stage()
    state = talker.open(session())
    before = speak(talker, state, handoff(3))
    chunk = speak(talker, state, handoff(0, unit=1))
    assert len(chunk.codec_tokens) == MAX_CHUNK_TOKENS
    assert state.context.num_tokens == 4 + len(before.codec_tokens) + 1 + MAX_CHUNK_TOKENS


def test_a_full_chunk_draws_one_token_more_than_it_keeps() -> None:
    talker = stage()
    state = talker.open(session())
    speak(talker, state, handoff())
    num_draws = state.num_draws
    speak(talker, state, handoff(unit=1))
    assert state.num_draws == num_draws + MAX_CHUNK_TOKENS + 1


@pytest.mark.parametrize("num_left", [0, 1])
def test_a_chunk_that_finds_no_block_is_refused_and_closing_gives_everything_back(num_left: int) -> None:
    """For its condition, and for its own tokens."""
    talker = stage()
    pool = talker.speaker.decoder.pool
    state = talker.open(session())
    speak(talker, state, handoff())
    others = pool.allocate(pool.num_free_blocks - num_left)
    with pytest.raises(ResourceExhausted):
        speak(talker, state, handoff(3 if num_left else 30, unit=1))
    talker.close(state)
    pool.check([others])
    pool.release(others)
    assert speak(talker, talker.open(session()), handoff()).codec_tokens


def test_sessions_that_speak_together_say_what_each_says_alone() -> None:
    seeds = range(5)
    by_seed = [said(stage(num_blocks=1600), session(seed)) for seed in seeds]
    talker = stage(num_blocks=1600)
    states = [talker.open(session(seed)) for seed in seeds]
    together: list[list[tuple[int, ...]]] = [[] for _ in seeds]
    for unit in range(4):
        heard = handoff(2 + unit % 3, unit=unit, ends_turn=unit == 3)
        works = ((str(seed), talker.speaker.speak(states[seed], heard)) for seed in seeds)
        ends = build.run_together(talker.speaker.loop, works)
        for seed in seeds:
            chunk = ends[str(seed)]
            assert not isinstance(chunk, AntiphonError)
            together[seed].append(chunk.codec_tokens)
    assert together == by_seed
    talker.speaker.decoder.pool.check([])


class Patient:
    """The same session by the plain rules: one row after the other, each token read before the next row."""

    def __init__(self, settings: TalkerSession) -> None:
        self.network, self.settings = random_network(), settings
        self.decoder = PagedDecoder(self.network, CONFIG.decoder, CacheConfig(40), build.CPU, torch.float32)
        self.context = Context(self.decoder.pool, SlideMode.ROTATE_QUERY, CONFIG.max_position_tokens)
        self.num_draws = 0

    def choose(self, state: Tensor, drawn: list[int], *, is_eos_masked: bool) -> int:
        sampling = self.settings.sampling
        rules = CodecRules(
            history=torch.tensor([drawn[-sampling.repetition_window_tokens :]], dtype=torch.int64),
            repetition_penalty=torch.tensor([sampling.repetition_penalty]),
            temperature=torch.tensor([sampling.temperature]),
            is_eos_masked=torch.tensor([is_eos_masked]),
            is_greedy=torch.tensor([self.settings.draws is Draws.MOST_LIKELY]),
            seeds=torch.tensor([self.settings.seed]),
            counters=torch.tensor([self.num_draws]),
        )
        self.num_draws += 1
        return int(sample_codec(self.network.logits(state), rules))

    def speak(self, heard: Handoff[Tensor]) -> tuple[int, ...]:
        may_end = heard.ends_turn or not self.context.num_tokens
        embeds = self.network.condition(torch.tensor(heard.token_ids, dtype=torch.int64), heard.hidden)
        drawn: list[int] = []
        while not drawn or (drawn[-1] != EOS and len(drawn) <= MAX_CHUNK_TOKENS):
            if drawn:
                embeds = self.network.embed_codes(torch.tensor(drawn[-1:]))
            row = Row(self.context, self.context.append(embeds.shape[0]))
            state = self.decoder.run([row], embeds)[-1:]
            drawn.append(self.choose(state, drawn, is_eos_masked=not may_end))
        if heard.ends_turn:
            self.context.free()
        return tuple(token for token in drawn if token != EOS)[:MAX_CHUNK_TOKENS]


@pytest.mark.parametrize("draws", Draws)
def test_chunks_are_those_of_a_session_that_waits_for_every_token(draws: Draws) -> None:
    sampling = CodecSampling(repetition_penalty=1.4, repetition_window_tokens=5)
    settings = [TalkerSession(str(seed), sampling, draws, seed) for seed in range(6)]
    patients = [Patient(one) for one in settings]
    talker = stage(num_blocks=1600)
    states = [talker.open(one) for one in settings]
    num_short = 0
    for unit in range(12):
        heard = handoff(2 + unit % 3, unit=unit, ends_turn=unit % 3 == 2)
        for state in states:
            talker.start(state, heard)
        ends: dict[str, CodecChunk] = {}
        while len(ends) < len(states):
            ends |= {key: chunk for key, chunk in talker.step().items() if isinstance(chunk, CodecChunk)}
        for state, patient in zip(states, patients, strict=True):
            chunk = ends[state.session.session_id]
            assert chunk.codec_tokens == patient.speak(heard)
            assert state.num_draws == patient.num_draws
            assert state.context.num_tokens == patient.context.num_tokens
            num_short += len(chunk.codec_tokens) < MAX_CHUNK_TOKENS
    if draws is Draws.SAMPLED:
        assert num_short > 6


def test_an_end_costs_one_row_and_a_full_chunk_none() -> None:
    talker = stage()
    num_ended = num_full = 0
    for seed in range(8):
        state = talker.open(session(seed))
        talker.step()  # it is ready
        talker.start(state, handoff())
        num_steps = 0
        while not talker.is_idle:
            ends = list(talker.step().values())
            num_steps += 1
        (chunk,) = ends
        assert isinstance(chunk, CodecChunk)
        num_tokens = len(chunk.codec_tokens)
        # The condition, each token, and either the end that was fed unseen or the wait for one token too many.
        assert num_steps == 1 + num_tokens + 1
        assert state.context.num_tokens == 4 + num_tokens
        num_ended += num_tokens < MAX_CHUNK_TOKENS
        num_full += num_tokens == MAX_CHUNK_TOKENS
        talker.close(state)
    assert num_ended
    assert num_full
    talker.speaker.decoder.pool.check([])


@pytest.mark.parametrize("num_steps", range(5))
def test_closing_while_it_speaks_gives_blocks_and_draws_back(num_steps: int) -> None:
    talker = stage()
    state = talker.open(session())
    speak(talker, state, handoff())
    talker.start(state, handoff(unit=1))
    for _ in range(num_steps):
        talker.step()
    assert talker.speaker.chooser.table.num_held == min(num_steps, 1)
    talker.close(state)
    assert talker.speaker.chooser.table.num_held == 0
    talker.speaker.decoder.pool.check([])
