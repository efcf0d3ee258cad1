"""How the talker says a chat's answer: all of every handoff, in seconds, by the rules of REFERENCE 14.5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import build
from antiphon.core.context import Context
from antiphon.core.messages import Address, CodecChunk, GoOn, Handoff
from antiphon.core.sampling import CHAT_CODEC, CodecSampling, Draws
from antiphon.core.window import SlideMode
from antiphon.errors import AntiphonError
from antiphon.kernels.sampling.contract import CodecCut, CodecRules
from antiphon.kernels.sampling.op import sample_codec
from antiphon.kernels.sampling.reference import MIN_KEPT
from antiphon.models.minicpmo.checkpoint import Part, WeightFile
from antiphon.models.minicpmo.config import DecoderConfig, TalkerConfig
from antiphon.models.minicpmo.talker import TalkerNetwork
from antiphon.models.minicpmo.tiny.weights import random_weights
from antiphon.stages.loop import Ready
from antiphon.stages.paged import CacheConfig, PagedDecoder
from antiphon.stages.step_packing import Row
from antiphon.stages.talker.speaker import MAX_CHUNK_TOKENS, MAX_HANDOFF_TOKENS
from antiphon.stages.talker.stage import TalkerStage, turn_cache
from antiphon.stages.talker.state import TalkerSession, TalkerState

NUM_CODEC_TOKENS = 60
EOS = NUM_CODEC_TOKENS - 1
CONFIG = TalkerConfig(
    DecoderConfig(16, 1, 2, 2, 8, 24, 1e4, 1e-6, has_qk_norm=False), 12, 20, NUM_CODEC_TOKENS, 19, 2000, 18
)
SAMPLING = replace(CHAT_CODEC, repetition_penalty=1.3, top_p=0.7, top_k=20)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random_network() -> TalkerNetwork:
    with torch.device("meta"):
        network = TalkerNetwork(CONFIG)
    network.load_state_dict(random_weights(Part("talker", network, WeightFile.MAIN, "")), assign=True)
    network.prepare()
    return network


def stage(num_calls: int = 1, num_chats: int = 1) -> TalkerStage:
    num_blocks = (num_calls + num_chats) * turn_cache(CONFIG.max_position_tokens).num_blocks
    return TalkerStage(random_network(), CacheConfig(num_blocks), num_chats)


def session(name: str, seed: int, sampling: CodecSampling = SAMPLING, *, is_chat: bool = True) -> TalkerSession:
    return TalkerSession(name, sampling, Draws.SAMPLED, seed, is_chat=is_chat)


def handoff(name: str, number: int, *, ends_turn: bool, num_tokens: int = 3) -> Handoff[Tensor]:
    rng = torch.Generator().manual_seed(number)
    hidden = torch.randn(num_tokens, CONFIG.llm_hidden_size, generator=rng)
    ids = torch.randint(0, CONFIG.text_eos_id, (num_tokens,), generator=rng)
    return Handoff(Address(name, 0, 0, number), 0.0, number, tuple(ids.tolist()), hidden, ends_turn)


def answer(name: str) -> list[Handoff[Tensor]]:
    return [handoff(name, number, ends_turn=number == 3, num_tokens=(3, 10, 0, 2)[number]) for number in range(4)]


def step_until(talker: TalkerStage, name: str) -> CodecChunk:
    while True:
        result = talker.step().get(name)
        if isinstance(result, AntiphonError):
            raise result
        if isinstance(result, CodecChunk):
            return result
        assert result is None or isinstance(result, Ready)


def say(talker: TalkerStage, state: TalkerState, said: Handoff[Tensor]) -> list[CodecChunk]:
    """All chunks of a handoff."""
    name = state.session.session_id
    talker.start(state, said)
    chunks = [step_until(talker, name)]
    while chunks[-1].goes_on:
        talker.start(state, GoOn(Address(name, 0, 0, 1000 + len(chunks)), 0.0))
        chunks.append(step_until(talker, name))
    return chunks


class Patient:
    """The same answer by the plain rules: one row after the other, each token read before the next row."""

    def __init__(self, settings: TalkerSession) -> None:
        self.network, self.settings = random_network(), settings
        self.decoder = PagedDecoder(self.network, CONFIG.decoder, CacheConfig(200), build.CPU, torch.float32)
        self.context = Context(self.decoder.pool, SlideMode.ROTATE_QUERY, CONFIG.max_position_tokens)
        self.said: list[int] = []
        self.num_draws = 0

    def choose(self, state: Tensor) -> int:
        sampling = self.settings.sampling
        cut = CodecCut(torch.tensor([True]), torch.tensor([sampling.top_p]), torch.tensor([sampling.top_k]))
        rules = CodecRules(
            history=torch.tensor([self.said[-sampling.repetition_window_tokens :]], dtype=torch.int64),
            repetition_penalty=torch.tensor([sampling.repetition_penalty]),
            temperature=torch.tensor([sampling.temperature]),
            is_eos_masked=torch.tensor([False]),
            is_greedy=torch.tensor([False]),
            seeds=torch.tensor([self.settings.seed]),
            counters=torch.tensor([self.num_draws]),
            cut=cut if self.num_draws else None,
        )
        self.num_draws += 1
        return int(sample_codec(self.network.logits(state), rules))

    def say(self, heard: Handoff[Tensor]) -> list[int]:
        marks = (*heard.token_ids, *([CONFIG.text_eos_id] if heard.ends_turn else []), CONFIG.audio_bos_id)
        embeds = self.network.emb_text(torch.tensor(marks))
        spoken = self.network.projector_semantic(heard.hidden)
        embeds[: len(spoken)] += spoken / spoken.norm(dim=-1, keepdim=True)
        drawn: list[int] = []
        while len(drawn) < MAX_HANDOFF_TOKENS:
            row = Row(self.context, self.context.append(embeds.shape[0]))
            token = self.choose(self.decoder.run([row], embeds)[-1:])
            if token == EOS:
                break
            drawn.append(token)
            self.said.append(token)
            embeds = self.network.embed_codes(torch.tensor([token]))
        return drawn


def test_all_of_every_handoff_is_said_as_if_every_token_was_waited_for() -> None:
    talker = stage()
    lengths = []
    for seed in range(6):
        settings = session("chat", seed)
        patient, state = Patient(settings), talker.open(settings)
        for said in answer("chat"):
            expected = patient.say(said)
            chunks = say(talker, state, said)
            assert [token for chunk in chunks for token in chunk.codec_tokens] == expected
            assert all(len(chunk.codec_tokens) == MAX_CHUNK_TOKENS for chunk in chunks[:-1])
            assert [chunk.ends_turn for chunk in chunks] == [False] * (len(chunks) - 1) + [said.ends_turn]
            assert not any(chunk.is_first_of_turn for chunk in chunks)
            lengths.append(len(expected))
        talker.close(state)
        talker.speaker.decoder.pool.check([])
    assert max(lengths) > 2 * MAX_CHUNK_TOKENS
    assert len({*lengths}) > 5


def test_the_first_token_of_an_answer_is_of_all_and_the_others_are_of_the_likeliest() -> None:
    narrow = replace(SAMPLING, top_k=1, repetition_penalty=1.0)
    firsts: set[tuple[int, ...]] = set()
    seconds: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for seed in range(40):
        talker = stage()
        state = talker.open(session("chat", seed, narrow))
        tokens = [token for chunk in say(talker, state, answer("chat")[1]) for token in chunk.codec_tokens]
        firsts.add(tuple(tokens[:1]))
        seconds.setdefault(tuple(tokens[:1]), set()).add(tuple(tokens[1:2]))
    assert len(firsts) > MIN_KEPT
    assert max(map(len, seconds.values())) <= MIN_KEPT


def test_chats_that_speak_together_say_what_each_says_alone() -> None:
    def chunks_of(talker: TalkerStage, states: list[TalkerState]) -> list[list[tuple[int, ...]]]:
        said: list[list[tuple[int, ...]]] = [[] for _ in states]
        for number in range(4):
            for state in states:
                talker.start(state, answer(state.session.session_id)[number])
            going = {state.session.session_id: at for at, state in enumerate(states)}
            while going:
                for name, result in talker.step().items():
                    if isinstance(result, CodecChunk):
                        at = going[name]
                        said[at].append(result.codec_tokens)
                        if result.goes_on:
                            talker.start(states[at], GoOn(Address(name, 0, 0, 1000 + len(said[at])), 0.0))
                        else:
                            del going[name]
        return said

    together = stage(num_chats=4)
    crowd = chunks_of(together, [together.open(session(f"chat {seed}", seed)) for seed in range(4)])
    for seed, said in enumerate(crowd):
        talker = stage()
        assert chunks_of(talker, [talker.open(session(f"chat {seed}", seed))]) == [said]


def test_a_chat_waits_for_a_room_of_chats_and_no_call_does() -> None:
    talker = stage(num_calls=1, num_chats=1)
    first, second = (talker.open(session(name, 1)) for name in ("first", "second"))
    call = talker.open(session("call", 2, CodecSampling(), is_chat=False))
    say(talker, first, handoff("first", 0, ends_turn=False))
    talker.start(second, handoff("second", 0, ends_turn=False))
    talker.start(call, handoff("call", 0, ends_turn=False))
    assert step_until(talker, "call").codec_tokens
    assert talker.is_idle
    talker.close(first)
    assert step_until(talker, "second").codec_tokens


@pytest.mark.parametrize("at", range(0, 60, 3))
def test_a_chat_closed_at_any_step_gives_everything_back(at: int) -> None:
    talker = stage()
    state = talker.open(session("chat", 3))
    talker.start(state, handoff("chat", 0, ends_turn=False))
    for _ in range(at):
        for result in talker.step().values():
            if isinstance(result, CodecChunk) and result.goes_on:
                talker.start(state, GoOn(Address("chat", 0, 0, 1), 0.0))
    talker.close(state)
    talker.close(state)
    talker.speaker.decoder.pool.check([])
    again = talker.open(session("again", 3))
    assert say(talker, again, handoff("again", 0, ends_turn=True))[-1].ends_turn
