"""Chats in the thinker's stage: their prompts bit by bit, their answers token by token, failures that are their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import build
from antiphon.core.chat import PIECE_TOKENS, AnswerConfig, ChatMessage, ConversationSize, PictureFile, Role, Sound
from antiphon.core.messages import Address, GoOn
from antiphon.core.sampling import CHAT_TEXT, Draws
from antiphon.errors import AntiphonError, AudioError, ContextLengthExceeded, ResourceExhausted
from antiphon.models.minicpmo.chat_prompt import ChatModel, ChatPrompt, HeardSound, chat_prompt
from antiphon.models.minicpmo.model import Model
from antiphon.models.minicpmo.tokens import TextTokenizer, load_tokenizer
from antiphon.stages.draw_table import DrawPlace, Newest
from antiphon.stages.loop import Ready
from antiphon.stages.stepping import StepLoop
from antiphon.stages.thinker.answering import ChatState
from antiphon.stages.thinker.choosing import ChatDraw, TextChooser, TextDraw, Turn, UnitDraw
from antiphon.stages.thinker.decider import Decider
from antiphon.stages.thinker.stage import ThinkerStage
from antiphon.stages.thinker.state import ChatSession, PieceOutcome
from chats import noise, picture

ANSWER = AnswerConfig(max_tokens=35, max_context_tokens=600, is_spoken=True)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Model:
    return build.model(tiny_checkpoint)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> TextTokenizer:
    return load_tokenizer(tiny_checkpoint)


class Thinker:
    """A stage with the model's cache."""

    def __init__(self, model: Model, tokenizer: TextTokenizer, num_blocks: int = 120) -> None:
        self.decider: Decider = build.decider(model, tokenizer, num_blocks)
        self.stage: ThinkerStage = build.thinker_stage(model, tokenizer, self.decider)
        self._model = ChatModel(tokenizer, model.config.vision, model.config.audio)

    def prompt(self, *parts: str | PictureFile | Sound[Tensor]) -> ChatPrompt:
        return chat_prompt([ChatMessage(Role.USER, parts)], self._model, is_spoken=True, max_tokens=10_000)

    def open(self, session: ChatSession) -> ChatState:
        state = self.stage.open(session)
        assert isinstance(state, ChatState)
        return state

    def ready(self, *states: ChatState) -> int:
        """Steps until the prompts are computed. Raises: what one fails with."""
        waiting, num_steps = {state.session.session_id for state in states}, 0
        while waiting:
            num_steps += 1
            for name, result in self.stage.step().items():
                if isinstance(result, AntiphonError):
                    raise result
                assert isinstance(result, Ready)
                waiting.discard(name)
        return num_steps

    def pieces(self, state: ChatState) -> list[PieceOutcome]:
        """All of the answer of one that is ready; it is closed then."""
        pieces: list[PieceOutcome] = []
        while not pieces or pieces[-1].end is None:
            self.stage.start(state, GoOn(Address(state.session.session_id, 0, 0, len(pieces)), 0.0))
            result: object = None
            while not isinstance(result, PieceOutcome):
                result = self.stage.step().get(state.session.session_id)
                assert not isinstance(result, AntiphonError), result
            pieces.append(result)
        self.stage.close(state)
        return pieces


def session(prompt: ChatPrompt, name: str = "chat", draws: Draws = Draws.SAMPLED) -> ChatSession:
    return ChatSession(name, prompt, ANSWER, CHAT_TEXT, draws, seed=5, deadline_s=0.0)


def spoken_ids(pieces: list[PieceOutcome]) -> list[int]:
    return [token for piece in pieces for handoff in piece.handoffs for token in handoff.token_ids]


def ids_of(prompt: ChatPrompt) -> tuple[int, ...]:
    (ids,) = prompt.pieces
    assert isinstance(ids, tuple)
    return ids


def test_an_answer_is_what_the_model_says_when_it_is_asked_anew_after_every_token(
    model: Model, tokenizer: TextTokenizer
) -> None:
    thinker = Thinker(model, tokenizer)
    plain = replace(CHAT_TEXT, repetition_penalty=1.0)
    asked = ids_of(thinker.prompt("Hello"))
    wanted = replace(session(thinker.prompt("Hello"), draws=Draws.MOST_LIKELY), sampling=plain)
    whole = thinker.open(wanted)
    thinker.ready(whole)
    pieces = thinker.pieces(whole)
    special = tokenizer.special.chat
    said: list[int] = []
    while len(said) < pieces[-1].num_tokens:
        so_far = (*asked, *said)
        prompt = ChatPrompt((so_far,), ConversationSize(len(so_far), 0, 0))
        state = thinker.open(replace(wanted, prompt=prompt))
        thinker.ready(state)
        assert state.drawn is not None
        said.append(state.drawn.read())
        thinker.stage.close(state)
    assert [token for token in said if token != special.piece_end] == spoken_ids(pieces)
    assert special.piece_end in said
    thinker.decider.decoder.pool.check([])


def test_words_are_handed_on_with_the_states_at_their_own_places(model: Model, tokenizer: TextTokenizer) -> None:
    """Speech differs from its text if they are one token off."""
    thinker = Thinker(model, tokenizer)
    never_ending = AnswerConfig(max_tokens=9, max_context_tokens=600, is_spoken=True)
    state = thinker.open(replace(session(thinker.prompt("Hello")), answer=never_ending))
    thinker.ready(state)
    (first, *_) = thinker.pieces(state)
    (handoff, *_) = first.handoffs
    assert len(handoff.token_ids) > 3
    sequence = (*ids_of(thinker.prompt("Hello")), *handoff.token_ids)
    memory = thinker.decider.chat_memory(200)
    loop: StepLoop[TextDraw, Tensor] = StepLoop(thinker.decider.decoder, build.NoDraws())
    states = build.run_alone(loop, memory.feed(memory.embed(sequence)))
    expected = states[-len(handoff.token_ids) :]
    # Another order of sums, through all layers.
    torch.testing.assert_close(handoff.hidden, expected, rtol=0, atol=1e-4)


def test_pieces_are_short_and_the_last_one_ends_the_turn(model: Model, tokenizer: TextTokenizer) -> None:
    thinker = Thinker(model, tokenizer)
    state = thinker.open(session(thinker.prompt("Hello")))
    thinker.ready(state)
    pieces = thinker.pieces(state)
    counts = [0, *(piece.num_tokens for piece in pieces)]
    assert all(after - before <= PIECE_TOKENS for before, after in zip(counts, counts[1:], strict=False))
    handoffs = [handoff for piece in pieces for handoff in piece.handoffs]
    assert [handoff.ends_turn for handoff in handoffs] == [False] * (len(handoffs) - 1) + [True]
    assert [handoff.address.seq for handoff in handoffs] == [*range(len(handoffs))]
    assert all(handoff.hidden.shape[0] == len(handoff.token_ids) for handoff in handoffs)
    assert tokenizer.decode(tuple(spoken_ids(pieces))) == "".join(piece.text for piece in pieces)


def test_an_answer_that_is_only_written_is_handed_to_nobody(model: Model, tokenizer: TextTokenizer) -> None:
    thinker = Thinker(model, tokenizer)
    state = thinker.open(replace(session(thinker.prompt("Hello")), answer=replace(ANSWER, is_spoken=False)))
    thinker.ready(state)
    assert all(not piece.handoffs for piece in thinker.pieces(state))


def test_what_cannot_be_said_is_not_in_a_spoken_answer(model: Model, tokenizer: TextTokenizer) -> None:
    thinker = Thinker(model, tokenizer)
    banned = {*tokenizer.special.unspeakable, *tokenizer.special.chat.decisions}
    hot = replace(CHAT_TEXT, temperature=50.0, top_k=1000, top_p=1.0)
    state = thinker.open(replace(session(thinker.prompt("Hello")), sampling=hot))
    thinker.ready(state)
    assert not banned & {*spoken_ids(thinker.pieces(state))}
    assert {tokenizer.encode(mark)[0] for mark in ":#@*()[]&/$"} <= banned


def test_pictures_and_sounds_are_embedded_one_in_a_step(model: Model, tokenizer: TextTokenizer) -> None:
    """So that no call beside them waits for all of them."""
    thinker = Thinker(model, tokenizer)
    text, media = thinker.prompt("Hello"), thinker.prompt(picture(1), noise(2), picture(3), noise(4))
    written = thinker.open(session(text))
    num_steps = thinker.ready(written)
    thinker.stage.close(written)
    assert thinker.ready(thinker.open(session(media))) >= num_steps + 3


@pytest.mark.parametrize("are_chats", [[True, False, False], [False, True, False, True], [False, False, True]])
def test_calls_and_chats_choose_in_one_step_by_their_own_rules(
    model: Model, tokenizer: TextTokenizer, are_chats: list[bool]
) -> None:
    """In whichever order they stand."""
    states = torch.randn(len(are_chats), model.config.thinker.decoder.hidden_size, generator=torch.manual_seed(1))

    def chosen(rows: list[int]) -> list[int]:
        chooser = TextChooser(model.thinker, tokenizer.special)
        draws: list[TextDraw] = []
        for row in rows:
            place = DrawPlace(chooser.table.take(4), Newest.FORGOTTEN, 4)
            hot = replace(CHAT_TEXT, temperature=5.0, top_p=1.0)
            if are_chats[row]:
                draws.append(ChatDraw(hot, Draws.SAMPLED, place, is_spoken=True, seed=row, counter=0))
            else:
                draws.append(UnitDraw(hot, Draws.SAMPLED, place, Turn.CLOSED, must_speak=False, seed=row, counter=0))
        ids: list[int] = chooser.choose(states[rows], draws).read().tolist()
        return ids

    together = chosen([*range(len(are_chats))])
    assert together == [chosen([row])[0] for row in range(len(are_chats))]
    assert len({*together}) == len(together)


def test_a_chat_that_cannot_be_embedded_fails_alone(model: Model, tokenizer: TextTokenizer) -> None:
    thinker = Thinker(model, tokenizer)
    broken = HeardSound(torch.zeros(3, 3, 3), num_tokens=10)
    first = thinker.open(session(ChatPrompt((broken,), ConversationSize(10, 10, 0)), "broken"))
    second = thinker.open(session(thinker.prompt("Hello"), "whole"))
    with pytest.raises(AudioError):
        thinker.ready(first)
    thinker.stage.close(first)
    thinker.ready(second)
    assert thinker.pieces(second)[-1].end is not None
    thinker.decider.decoder.pool.check([])


def test_a_chat_reserves_what_it_may_come_to(model: Model, tokenizer: TextTokenizer) -> None:
    thinker = Thinker(model, tokenizer, num_blocks=10)
    asked = thinker.prompt("Hello")
    size = thinker.decider.decoder.pool.block_size
    num_free = thinker.stage.survey().num_unreserved_blocks
    state = thinker.open(session(asked))
    reserved = num_free - thinker.stage.survey().num_unreserved_blocks
    assert reserved * size >= asked.num_tokens + ANSWER.max_tokens
    for number in range(num_free // reserved - 1):
        thinker.open(session(asked, f"chat {number}"))
    with pytest.raises(ResourceExhausted):
        thinker.open(session(asked, "one too many"))
    with pytest.raises(ContextLengthExceeded):
        thinker.open(session(thinker.prompt("a" * 10 * size), "long"))
    thinker.stage.close(state)
    thinker.stage.close(state)
