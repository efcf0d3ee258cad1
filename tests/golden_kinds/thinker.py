"""Golden kind thinker: windows (every slide that equals the reference), the sampler, the greedy duplex loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

import build
from antiphon.core.context import Slide
from antiphon.core.duplex import DuplexConfig, Wish
from antiphon.core.sampling import Draws, TextSampling
from antiphon.core.window import BasicWindow, ContextWindow, OffWindow, SlideMode, WindowPolicy
from antiphon.kernels.rotation import rotate, rotation
from antiphon.kernels.sampling.contract import TextRules
from antiphon.kernels.sampling.op import sample_text
from antiphon.models.minicpmo.config import thinker_config
from antiphon.models.minicpmo.prompt import PromptText
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.models.minicpmo.tokens import PREVIOUS_MARKER, TextTokenizer, special_tokens
from antiphon.stages.paged import CacheConfig, PagedDecoder
from antiphon.stages.stepping import StepLoop
from antiphon.stages.thinker.choosing import TextChooser, TextDraw
from antiphon.stages.thinker.decider import Decider
from antiphon.stages.thinker.memory import ThinkerMemory
from antiphon.stages.thinker.state import ThinkerSession, UnitOutcome
from golden_kinds.report import Comparison, Outcome, scaled
from golden_kinds.weights import filled

KIND = "thinker"
TOLERANCE = 1e-4
MAX_TOKENS = 8192
CACHE = CacheConfig.for_tokens(MAX_TOKENS, num_segments=3)

Mode = Literal["off", "basic", "context"]


class WindowUnit(BaseModel):
    embeds: int
    tokens: list[int]
    listen: bool
    cache_before: int
    cache_after: int
    retained_units: list[int]
    preserved: int
    previous_token_ids: list[int]


class WindowCase(BaseModel):
    mode: Mode
    suffix: str
    high: int
    low: int
    context_max_units: int
    context_previous_max_tokens: int
    units: list[WindowUnit]
    slides: int


class SamplerCase(BaseModel):
    history: list[int]
    listen_top_k: int | None
    listen_prob_scale: float
    text_repetition_penalty: float
    text_repetition_window_size: int
    length_penalty: float
    token: int
    history_after: list[int]


class WindowLimits(BaseModel):
    """As the reference names them; those of other modes are absent."""

    basic_window_high_tokens: int = 0
    basic_window_low_tokens: int = 0
    context_max_units: int = 0
    context_previous_max_tokens: int = 0

    def policy(self, mode: Mode, tokenizer: TextTokenizer) -> WindowPolicy:
        match mode:
            case "off":
                return OffWindow(MAX_TOKENS)
            case "basic":
                return BasicWindow(self.basic_window_high_tokens, self.basic_window_low_tokens)
            case "context":
                marker = tokenizer.encode(PREVIOUS_MARKER)
                return ContextWindow(self.context_max_units, self.context_previous_max_tokens, marker)


class DuplexUnit(BaseModel):
    all_tokens: list[int]
    condition_tokens: list[int]
    is_listen: bool
    text: str
    end_of_turn: bool
    cache_after: int
    retained_units: list[int]
    previous_token_ids: list[int]


class DuplexCase(BaseModel):
    mode: Mode
    prefix: str
    suffix: str
    force_listen_count: int
    max_new_speak_tokens_per_chunk: int
    window: WindowLimits
    units: list[DuplexUnit]


class Cases(BaseModel):
    config: dict[str, object]
    window: dict[str, WindowCase]
    sampler: dict[str, SamplerCase]
    duplex: dict[str, DuplexCase]


@dataclass(frozen=True, slots=True)
class Model:
    network: ThinkerNetwork
    tokenizer: TextTokenizer


def run(folder: Path) -> Iterator[Outcome]:
    """Compare every case of the folder."""
    cases = Cases.model_validate_json((folder / "cases.json").read_text())
    expected = load_file(folder / "cases.safetensors")
    config = thinker_config(cases.config)
    network = filled(lambda: ThinkerNetwork(config), load_file(folder / "weights.safetensors"), "llm.")
    network.prepare()
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = Model(network, TextTokenizer(tokens, special_tokens(tokens, "<|im_end|>", ())))
    for name, window in cases.window.items():
        for slide in exact_slides(is_sliding=window.slides > 0):
            yield _window(model, f"window.{name}.{slide.value}", window, slide, _named(expected, name))
    for number, sampler in cases.sampler.items():
        yield _sampler(model, f"sampler.{number}", sampler, expected[f"sampler.{number}.logits"])
    for name, duplex in cases.duplex.items():
        is_sliding = len(duplex.units[-1].retained_units) < len(duplex.units)
        for slide in exact_slides(is_sliding=is_sliding):
            yield _duplex(model, f"duplex.{name}.{slide.value}", duplex, slide, _named(expected, name))


def exact_slides(*, is_sliding: bool) -> tuple[SlideMode, ...]:
    """Slides with the reference's meaning; a recomputed history is shorter, so it only equals where nothing slides."""
    exact = (SlideMode.ROTATE_QUERY, SlideMode.ROTATE_KEYS)
    return exact if is_sliding else (*exact, SlideMode.REPREFILL)


def _named(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}


def _window(model: Model, name: str, case: WindowCase, slide: SlideMode, want: Mapping[str, Tensor]) -> Outcome:
    compared = Comparison(KIND, name)
    config = model.network.config.decoder
    decoder = PagedDecoder(model.network, config, CACHE, torch.device("cpu"), torch.float32)
    limits = WindowLimits(
        basic_window_high_tokens=case.high,
        basic_window_low_tokens=case.low,
        context_max_units=case.context_max_units,
        context_previous_max_tokens=case.context_previous_max_tokens,
    )
    memory = ThinkerMemory(model.network, decoder, limits.policy(case.mode, model.tokenizer), slide, MAX_TOKENS)
    loop: StepLoop[TextDraw, Tensor | Slide | None]
    loop = StepLoop(decoder, TextChooser(model.network, model.tokenizer.special))

    def feed(embeds: Tensor) -> Tensor:
        fed = build.run_alone(loop, memory.feed(embeds))
        assert isinstance(fed, Tensor)
        return fed

    build.run_alone(loop, memory.feed_prompt(want["prefix_embeds"]))
    build.run_alone(loop, memory.feed_suffix(model.tokenizer.encode(case.suffix)))
    special = model.tokenizer.special.duplex
    states: list[Tensor] = []
    num_slides = row = 0
    for number, unit in enumerate(case.units):
        feed(memory.embed((special.unit_start,)))
        states.append(feed(want["unit_embeds"][row : row + unit.embeds])[-1])
        row += unit.embeds
        states += (feed(memory.embed((token,)))[-1] for token in unit.tokens)
        feed(memory.embed((special.unit_end,)))
        compared.equal(memory.context.num_tokens, unit.cache_before)
        words = () if unit.listen else model.tokenizer.text_ids(tuple(unit.tokens[1:]))
        num_slides += build.run_alone(loop, memory.close_unit(number, words)) is not None
        memory.context.check()
        compared.equal(memory.context.num_tokens, unit.cache_after)
        compared.equal([record.unit for record in memory.context.units], unit.retained_units)
        compared.equal(memory.context.num_anchor_tokens, unit.preserved)
        compared.equal(memory.context.previous, unit.previous_token_ids)
        _compare_cache(compared, memory, decoder, want, f"after_unit{number}")
    _compare_cache(compared, memory, decoder, want, "final")
    hidden = torch.stack(states)
    compared.close(hidden, want["hidden"], scaled(TOLERANCE, want["hidden"]))
    compared.close(model.network.logits(hidden), want["logits"], scaled(TOLERANCE, want["logits"]))
    compared.equal(num_slides, case.slides)
    memory.free()
    decoder.pool.check([])
    return compared.outcome()


def _compare_cache(
    compared: Comparison, memory: ThinkerMemory, decoder: PagedDecoder, want: Mapping[str, Tensor], name: str
) -> None:
    """The whole cache in order of position, keys rotated back to where their tokens stand now."""
    if f"{name}.k" not in want:
        return
    context, size = memory.context, decoder.pool.block_size
    slots: list[int] = []
    for segment in context.segments():
        own = [block * size + offset for block in segment.blocks for offset in range(size)]
        slots += own[segment.first_slot : segment.first_slot + segment.num_tokens]
    shifts = torch.tensor([0] * context.num_anchor_tokens + [-context.shift] * (len(slots) - context.num_anchor_tokens))
    head_dim = decoder.cache.keys.shape[-1]
    back = rotation(shifts, head_dim, decoder.rope_theta)
    keys = torch.stack([rotate(layer[slots], back) for layer in decoder.cache.keys.flatten(1, 2)])
    values = decoder.cache.values.flatten(1, 2)[:, slots]
    for got, part in ((keys, "k"), (values, "v")):
        compared.close(got.transpose(1, 2), want[f"{name}.{part}"], scaled(TOLERANCE, want[f"{name}.{part}"]))


def _sampler(model: Model, name: str, case: SamplerCase, logits: Tensor) -> Outcome:
    special = model.tokenizer.special
    history = deque(case.history, maxlen=case.text_repetition_window_size)
    forbidden = torch.zeros(logits.shape[0], dtype=torch.bool)
    forbidden[list(special.forbidden)] = True
    rules = TextRules(
        forbidden=forbidden,
        chunk_eos=special.duplex.chunk_eos,
        turn_eos=special.duplex.turn_eos,
        listen=special.eos,  # what the reference's listen rules act on
        history=torch.tensor([[*history]]),
        repetition_penalty=torch.tensor([case.text_repetition_penalty]),
        length_penalty=torch.tensor([case.length_penalty]),
        listen_scale=torch.tensor([case.listen_prob_scale]),
        listen_top_k=torch.tensor([case.listen_top_k or 0]),
        must_speak=torch.tensor([False]),
        is_greedy=torch.tensor([True]),
        temperature=torch.tensor([1.0]),
        top_k=torch.tensor([logits.shape[0]]),
        top_p=torch.tensor([1.0]),
        seeds=torch.tensor([0]),
        counters=torch.tensor([0]),
    )
    choice = sample_text(logits[None], rules)
    compared = Comparison(KIND, name)
    compared.equal(int(choice.ids), case.token)
    after = [*case.history, int(choice.ids)] if bool(choice.is_recorded) else case.history
    compared.equal(after, case.history_after)
    return compared.outcome()


def _duplex(model: Model, name: str, case: DuplexCase, slide: SlideMode, want: Mapping[str, Tensor]) -> Outcome:
    compared = Comparison(KIND, name)
    decider = Decider(model.network, model.tokenizer, CACHE)
    session = ThinkerSession(
        session_id=name,
        prompt=PromptText(case.prefix, case.suffix),
        reference=torch.empty(0),
        window=case.window.policy(case.mode, model.tokenizer),
        slide=slide,
        max_pictures=0,
        max_slices=1,
        max_text_tokens=0,
        duplex=DuplexConfig(case.max_new_speak_tokens_per_chunk, case.force_listen_count),
        sampling=TextSampling(),
        draws=Draws.MOST_LIKELY,
        seed=0,
        keeps_inputs=False,
        deadline_s=0.0,
    )
    state = decider.open(session, MAX_TOKENS)
    prefix, suffix = (model.tokenizer.encode(text) for text in (case.prefix, case.suffix))
    build.run_alone(decider.loop, decider.prompt(state, state.memory.embed(prefix), suffix))
    conditions: list[Tensor] = []
    for unit, embeds in zip(case.units, want["unit_embeds"].chunk(len(case.units)), strict=True):
        start = state.memory.embed((model.tokenizer.special.duplex.unit_start,))
        outcome = build.run_alone(
            decider.loop, decider.decide(state, torch.cat([start, embeds]), deadline_s=0.0, wish=Wish.FREE)
        )
        assert isinstance(outcome, UnitOutcome)
        _compare_unit(compared, model, outcome, unit)
        if not unit.is_listen:
            conditions += (handoff.hidden for handoff in outcome.handoffs)
    hidden = torch.cat(conditions)
    compared.close(hidden, want["condition_hidden"], scaled(TOLERANCE, want["condition_hidden"]))
    state.memory.free()
    decider.decoder.pool.check([])
    return compared.outcome()


def _compare_unit(compared: Comparison, model: Model, got: UnitOutcome, want: DuplexUnit) -> None:
    compared.equal(got.token_ids, want.all_tokens)
    compared.equal(got.is_listen, want.is_listen)
    compared.equal(got.num_context_tokens, want.cache_after)
    compared.equal(got.retained_units, want.retained_units)
    compared.equal(got.previous_ids, want.previous_token_ids)
    if want.is_listen:
        return  # The reference throws away what such a unit said before it listened; we say it.
    said = [token for handoff in got.handoffs for token in handoff.token_ids]
    compared.equal(said, want.condition_tokens)
    compared.equal(model.tokenizer.decode(tuple(said)), want.text)
    compared.equal(got.handoffs[-1].ends_turn, want.end_of_turn)
