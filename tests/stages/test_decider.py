"""Units of the golden checkpoint's language model: what is drawn ahead and read late, and stopped at any time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

import build
from antiphon.core.context import Context
from antiphon.core.duplex import DuplexConfig, DuplexTokens, UnitDecisions, Wish
from antiphon.core.sampling import Draws, TextSampling
from antiphon.core.window import BasicWindow, SlideMode
from antiphon.errors import AntiphonError
from antiphon.kernels.sampling.contract import TextRules
from antiphon.kernels.sampling.op import sample_text
from antiphon.kernels.transfer import Download
from antiphon.models.minicpmo.model import Model
from antiphon.models.minicpmo.tokens import TextTokenizer, load_tokenizer
from antiphon.stages import stepping
from antiphon.stages.paged import CacheConfig, PagedDecoder
from antiphon.stages.step_packing import Row
from antiphon.stages.stepping import Request, StepLoop
from antiphon.stages.thinker import choosing
from antiphon.stages.thinker.choosing import TextDraw
from antiphon.stages.thinker.decider import Decider, DeciderState, DeciderSteps
from antiphon.stages.thinker.memory import MemorySteps, ThinkerMemory
from antiphon.stages.thinker.state import ThinkerSession, UnitOutcome

CACHE = CacheConfig(400)
MAX_TOKENS = 400
NUM_INPUT_TOKENS = 11
SAMPLING = TextSampling(repetition_penalty=1.5, repetition_window_tokens=7, length_penalty=1.3)
"""A history that is soon full and matters."""
SESSION = replace(
    build.SESSION,
    window=BasicWindow(high_tokens=90, low_tokens=60),
    duplex=DuplexConfig(max_decided_tokens=8, num_forced_listens=1),
    sampling=SAMPLING,
)
NUM_UNITS = 12

Ended = UnitOutcome | AntiphonError


@pytest.fixture(scope="module", autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def golden() -> Model:
    return build.model(build.GOLDEN_CHECKPOINT)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer(build.GOLDEN_CHECKPOINT)


def session(number: int) -> ThinkerSession:
    """Sessions that differ in everything that a choice depends on."""
    return replace(
        SESSION,
        session_id=str(number),
        slide=list(SlideMode)[number % 3],
        sampling=replace(SAMPLING, repetition_window_tokens=3 + 2 * number, temperature=0.7 + 0.3 * number),
        draws=Draws.MOST_LIKELY if number == 4 else Draws.SAMPLED,
        seed=number,
    )


def heard(number: int, unit: int, size: int) -> Tensor:
    """The input of a unit, [11, hidden]."""
    return 0.05 * torch.randn(NUM_INPUT_TOKENS, size, generator=torch.Generator().manual_seed(1000 * number + unit))


@dataclass(slots=True)
class Talk:
    """Sessions on one decider. heard: units of each so far."""

    decider: Decider
    states: dict[int, DeciderState] = field(default_factory=dict)
    num_heard: dict[int, int] = field(default_factory=dict)

    def open(self, number: int, settings: ThinkerSession) -> DeciderState:
        state = self.decider.open(settings, MAX_TOKENS)
        build.run_alone(self.decider.loop, self.decider.prompt(state, self.decider.embed((1, 2, 3)), ()))
        self.states[number], self.num_heard[number] = state, 0
        return state

    def start(self, number: int, wish: Wish = Wish.FREE) -> None:
        state = self.states[number]
        size = self.decider.embed(()).shape[1]
        work = self.decider.decide(state, heard(number, self.num_heard[number], size), deadline_s=0.0, wish=wish)
        self.num_heard[number] += 1
        self.decider.loop.add(state.session.session_id, work, 0.0)

    def finish(self) -> dict[str, UnitOutcome]:
        """What all started units come to."""
        ends: dict[str, UnitOutcome] = {}
        while not self.decider.loop.is_idle:
            for end in self.decider.loop.step():
                assert isinstance(end.result, UnitOutcome)
                ends[end.session_id] = end.result
        return ends

    def live(self, number: int, wish: Wish = Wish.FREE) -> UnitOutcome:
        self.start(number, wish)
        (outcome,) = self.finish().values()
        return outcome


def talk(golden: Model, tokenizer: TextTokenizer) -> Talk:
    return Talk(Decider(golden.thinker, tokenizer, CACHE))


class Patient:
    """The same session by the plain rules: one row after the other, each choice read before the next row."""

    def __init__(self, golden: Model, tokenizer: TextTokenizer, settings: ThinkerSession) -> None:
        network = golden.thinker
        self.network, self.tokenizer, self.settings = network, tokenizer, settings
        decoder = PagedDecoder(network, network.config.decoder, CACHE, build.CPU, torch.float32)
        self.loop: StepLoop[TextDraw, object] = StepLoop(decoder, build.NoDraws())
        self.memory = ThinkerMemory(network, decoder, settings.window, settings.slide, MAX_TOKENS)
        self.history: deque[int] = deque(maxlen=settings.sampling.repetition_window_tokens)
        self.num_draws = self.num_units = 0
        self.is_turn_open = False
        build.run_alone(self.loop, self.memory.feed_prompt(network.embed_ids((1, 2, 3))))

    def feed(self, embeds: Tensor) -> Tensor:
        steps: MemorySteps[Tensor] = self.memory.feed(embeds)
        states = build.run_alone(self.loop, steps)
        assert isinstance(states, Tensor)
        return states[-1:]

    def choose(self, state: Tensor) -> int:
        special, sampling = self.tokenizer.special, self.settings.sampling
        forbidden = torch.zeros(self.network.config.vocab_size, dtype=torch.bool)
        forbidden[list(special.forbidden)] = True
        rules = TextRules(
            forbidden=forbidden,
            chunk_eos=special.duplex.chunk_eos,
            turn_eos=special.duplex.turn_eos,
            listen=special.duplex.listen,
            history=torch.tensor([[*self.history]], dtype=torch.int64),
            repetition_penalty=torch.tensor([sampling.repetition_penalty]),
            length_penalty=torch.tensor([sampling.length_penalty]),
            listen_scale=torch.tensor([sampling.listen_scale]),
            listen_top_k=torch.tensor([sampling.listen_top_k]),
            must_speak=torch.tensor([False]),
            is_greedy=torch.tensor([self.settings.draws is Draws.MOST_LIKELY]),
            temperature=torch.tensor([sampling.temperature]),
            top_k=torch.tensor([sampling.top_k]),
            top_p=torch.tensor([sampling.top_p]),
            seeds=torch.tensor([self.settings.seed]),
            counters=torch.tensor([self.num_draws]),
        )
        choice = sample_text(self.network.logits(state), rules)
        self.num_draws += 1
        if bool(choice.is_recorded):
            self.history.append(int(choice.ids))
        return int(choice.ids)

    def live(self, embeds: Tensor) -> tuple[tuple[int, ...], list[Tensor]]:
        """The unit's tokens, and the states of what the talker is given."""
        duplex = self.settings.duplex
        unit = UnitDecisions(
            self.tokenizer.special.duplex,
            duplex,
            is_turn_open=self.is_turn_open,
            is_forced_listen=self.num_units < duplex.num_forced_listens,
        )
        state = self.feed(embeds)
        states: list[Tensor] = []
        while not unit.is_done and (token := unit.take(self.choose(state))) is not None:
            state = self.feed(self.network.embed_ids((token,)))
            states.append(state)
        self.feed(self.network.embed_ids(unit.closing_ids))
        words = self.tokenizer.text_ids(unit.previous_ids())
        build.run_alone(self.loop, self.memory.close_unit(self.num_units, words))
        self.num_units += 1
        self.is_turn_open = unit.is_turn_open
        hidden = [states[row] for said in unit.utterances() for row in said.rows]
        return (*unit.fed, *unit.closing_ids), hidden


@pytest.mark.parametrize("is_crowd", [False, True], ids=["alone", "in a crowd"])
def test_units_are_those_of_a_session_that_waits_for_every_choice(
    golden: Model, tokenizer: TextTokenizer, *, is_crowd: bool
) -> None:
    talks = talk(golden, tokenizer)
    patients = [Patient(golden, tokenizer, session(number)) for number in range(6)]
    for number in range(6):
        talks.open(number, session(number))
    num_late, num_full, num_slides = 0, 0, 0
    for unit in range(NUM_UNITS):
        outcomes: dict[str, UnitOutcome] = {}
        for number in range(6):
            talks.start(number)
            if not is_crowd:
                outcomes |= talks.finish()
        outcomes |= talks.finish()
        for number, patient in enumerate(patients):
            outcome = outcomes[str(number)]
            tokens, hidden = patient.live(heard(number, unit, golden.thinker.config.decoder.hidden_size))
            assert outcome.token_ids == tokens
            got = [state for handoff in outcome.handoffs for state in handoff.hidden]
            for state, wanted in zip(got, hidden, strict=True):
                torch.testing.assert_close(state, wanted[0], rtol=1e-3, atol=1e-4)
            assert talks.states[number].num_draws == patient.num_draws
            assert outcome.num_context_tokens == patient.memory.context.num_tokens
            num_late += len(tokens) > 3
            num_full += len(tokens) == SESSION.duplex.max_output_tokens
            num_slides += outcome.slide is not None
    assert min(num_late, num_full, num_slides) > 3, "the checkpoint did not do all that is compared"


def test_a_unit_takes_a_step_for_its_input_and_each_decision_and_none_to_find_its_end_or_to_close_it(
    golden: Model, tokenizer: TextTokenizer
) -> None:
    talks = talk(golden, tokenizer)
    limit = SESSION.duplex.max_decided_tokens
    kinds: set[str] = set()
    for number in (0, 1, 3, 4):  # number 2 computes its units anew, in steps of their own
        talks.open(number, session(number))
        for unit in range(NUM_UNITS):
            was_open = talks.states[number].is_turn_open
            talks.start(number)
            num_before = talks.decider.decoder.num_runs.num_launched
            while not talks.decider.loop.is_idle:
                ends = talks.decider.loop.step()
            assert isinstance(ends[0].result, UnitOutcome)
            num_fed = len(ends[0].result.token_ids) - 2
            is_settled = not num_fed and not was_open
            kind = "listens" if is_settled else "is full" if num_fed == limit - 1 else "ends late"
            # A terminator that is read late was fed by the row that would have gone on. A slide is seen by the close.
            num_steps = talks.decider.decoder.num_runs.num_launched - num_before
            num_steps -= ends[0].result.slide is not None
            assert num_steps == {"listens": 1, "is full": 1 + num_fed, "ends late": 2 + num_fed}[kind], (kind, unit)
            kinds.add(kind)
    assert kinds == {"listens", "is full", "ends late"}


def in_order(decoder: PagedDecoder, early: list[Download]) -> type[Download]:
    """Copies that are there once a later step was launched, as a busy device has them; on a CPU they always are.

    early: where those are noted that are read before.
    """

    class InOrder(Download):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__(tensor)
            self._num_launched = decoder.num_runs.num_launched

        @property
        def is_there(self) -> bool:
            return decoder.num_runs.num_launched > self._num_launched

        def read(self) -> Tensor:
            if not self.is_there:
                early.append(self)
            return super().read()

    return InOrder


def test_while_others_have_rows_to_run_no_unit_waits_for_the_step_under_way(
    golden: Model, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    talks = talk(golden, tokenizer)
    decider = talks.decider
    talks.open(0, session(0))
    early: list[Download] = []
    copy = in_order(decider.decoder, early)
    for module in (stepping, choosing):
        monkeypatch.setattr(module, "Download", copy)

    def busy() -> DeciderSteps:
        context = Context(decider.decoder.pool, SlideMode.ROTATE_QUERY, MAX_TOKENS)
        for _ in range(MAX_TOKENS):
            yield Request(Row(context, context.append(1)), decider.embed((1,)), None)
        raise AssertionError("nobody was to be busy for so long")

    decider.loop.add("busy", busy(), 0.0)
    num_said = 0
    for _ in range(NUM_UNITS):
        talks.start(0)
        ends: list[UnitOutcome] = []
        while not ends:
            ends = [end.result for end in decider.loop.step() if isinstance(end.result, UnitOutcome)]
        num_said += sum(len(handoff.hidden) for handoff in ends[0].handoffs)
    assert num_said > NUM_UNITS, "too little was said to wait for"
    assert not early, f"the host waited for {len(early)} copies"


def speaking(golden: Model, tokenizer: TextTokenizer, number: int, unit: int) -> Talk:
    """A session after so many units."""
    talks = talk(golden, tokenizer)
    talks.open(number, replace(session(number), duplex=replace(SESSION.duplex, num_forced_listens=0)))
    for _ in range(unit):
        talks.live(number)
    return talks


@pytest.mark.parametrize("number", range(3))
def test_an_interruption_at_any_step_ends_the_unit_there_and_its_turn_and_nobody_hears_it(
    golden: Model, tokenizer: TextTokenizer, number: int
) -> None:
    special = tokenizer.special.duplex
    num_cut = num_left_open = 0
    for unit in (1, 2, 4):
        whole = speaking(golden, tokenizer, number, unit).live(number)
        fed = whole.token_ids[:-2]
        for num_steps in range(len(fed) + 4):
            talks = speaking(golden, tokenizer, number, unit)
            state = talks.states[number]
            turn, was_speaking, was_open = state.turn, state.is_speaking, state.is_turn_open
            talks.start(number)
            for _ in range(num_steps):
                talks.decider.loop.step()
            if talks.decider.loop.is_idle:
                break
            talks.decider.interrupt(state, epoch=state.epoch + 1)
            assert (state.epoch, state.turn, state.num_handoffs) == (1, turn + was_speaking, 0)
            (outcome,) = talks.finish().values()
            assert (outcome.handoffs, outcome.texts) == ((), ())
            if outcome.token_ids != whole.token_ids:
                # The first decision is read before the next row where nothing is said; others are one row ahead of what
                # is read.
                num_decisions = 1 if num_steps < 2 and not was_open else num_steps + 1
                assert num_decisions in decisions_kept(outcome, whole, special, was_open=was_open)
                num_cut += 1
            state.memory.context.check()
            # Only a turn that the closing tokens left open is still to be closed.
            assert state.is_interrupted is state.is_turn_open
            if state.is_turn_open:
                num_left_open += 1
                after = talks.live(number)
                assert after.token_ids == (special.turn_eos, special.listen, special.unit_end)
            assert not state.is_turn_open
            check_next_answer(talks, number, turn + was_speaking)
    assert num_cut
    assert num_left_open


def decisions_kept(outcome: UnitOutcome, whole: UnitOutcome, tokens: DuplexTokens, *, was_open: bool) -> Iterator[int]:
    """With how many decisions of the whole unit, and the end of the turn, the interrupted one can be explained.

    was_open: a turn was, before the unit.
    """
    fed, said = whole.token_ids[:-2], outcome.token_ids[:-2]
    terminator = tokens.listen if set(said) <= {tokens.turn_eos} else tokens.chunk_eos
    assert outcome.token_ids[-2:] == (terminator, tokens.unit_end)
    for number in range(len(fed) + 1):
        start = fed[:number]
        is_open = start[-1] != tokens.turn_eos if start else was_open
        if said == ((*start, tokens.turn_eos) if is_open else start):
            yield number


def check_next_answer(talks: Talk, number: int, turn: int) -> None:
    """What is heard next is numbered from 0 in its epoch, as the next turn."""
    for _ in range(NUM_UNITS):
        handoffs = talks.live(number).handoffs
        if handoffs:
            assert [handoff.address.seq for handoff in handoffs] == list(range(len(handoffs)))
            assert (handoffs[0].address.epoch, handoffs[0].address.turn) == (1, turn)
            return


@pytest.mark.parametrize("number", [0, 1])
def test_a_held_session_ends_its_turn_and_then_begins_none(
    golden: Model, tokenizer: TextTokenizer, number: int
) -> None:
    """And the wasted draw after the end is used again: what is free afterwards depends on nothing else."""
    turn_eos = tokenizer.special.duplex.turn_eos
    talks = speaking(golden, tokenizer, number, unit=0)
    talks.live(number, Wish.SPEAK)
    num_units = 1
    while talks.states[number].is_turn_open:
        outcome = talks.live(number, Wish.HOLD)
        num_units += 1
        assert num_units < 40, "the turn of this session never ends"
    *said, terminator, _ = outcome.token_ids
    assert said.count(turn_eos) == 1
    assert said[-1] == turn_eos
    assert terminator == tokenizer.special.duplex.chunk_eos
    num_draws = talks.states[number].num_draws
    for _ in range(5):
        assert talks.live(number, Wish.HOLD).is_listen
    assert talks.states[number].num_draws == num_draws


@pytest.mark.parametrize("number", [0, 1])
def test_a_turn_that_is_asked_for_among_the_first_units_goes_on_to_its_end(
    golden: Model, tokenizer: TextTokenizer, number: int
) -> None:
    """The units that listen whatever the model says are for who was not asked."""
    free, early = talk(golden, tokenizer), talk(golden, tokenizer)
    free.open(number, replace(session(number), duplex=replace(SESSION.duplex, num_forced_listens=0)))
    early.open(number, replace(session(number), duplex=replace(SESSION.duplex, num_forced_listens=5)))
    wish = Wish.SPEAK
    for _ in range(40):
        outcome = early.live(number, wish)
        assert outcome.token_ids == free.live(number, wish).token_ids
        wish = Wish.HOLD
        if any(handoff.ends_turn for handoff in outcome.handoffs):
            break
    else:
        raise AssertionError("the turn of this session never ends")


def test_closing_at_any_step_gives_everything_back(golden: Model, tokenizer: TextTokenizer) -> None:
    for num_steps in range(8):
        talks = talk(golden, tokenizer)
        state = talks.open(1, replace(session(1), duplex=replace(SESSION.duplex, num_forced_listens=0)))
        talks.live(1)
        talks.start(1)
        for _ in range(num_steps):
            talks.decider.loop.step()
        talks.decider.close(state)
        talks.decider.close(state)
        assert talks.decider.loop.is_idle
        assert talks.decider.chooser.table.num_held == 0
        talks.decider.decoder.pool.check([])
