"""Sessions of a small random thinker, below its stage: context and cache together. Fixtures are where they are used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

import build
from antiphon.core.context import Segment
from antiphon.core.window import BasicWindow, ContextWindow, SlideMode, WindowPolicy
from antiphon.kernels.rotation import rotate, rotation
from antiphon.models.minicpmo.checkpoint import Part, WeightFile
from antiphon.models.minicpmo.config import DecoderConfig, ThinkerConfig
from antiphon.models.minicpmo.decoder import Layer
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.models.minicpmo.tiny.weights import random_weights
from antiphon.stages.paged import CacheConfig, PagedDecoder
from antiphon.stages.stepping import StepLoop
from antiphon.stages.thinker.choosing import TextDraw
from antiphon.stages.thinker.memory import MemorySteps, ThinkerMemory
from core.brute_force import slots_of

CONFIG = ThinkerConfig(
    DecoderConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        has_qk_norm=True,
    ),
    vocab_size=50,
    max_position_tokens=10_000,
)
ResultT = TypeVar("ResultT")

SUFFIX, MARKER = (1, 2, 3), (4, 5)
EPS = torch.finfo(torch.float32).eps
BASIC = BasicWindow(high_tokens=40, low_tokens=25)
CONTEXT = ContextWindow(max_units=3, previous_max_tokens=6, marker=MARKER)
UNITS = (5, 9, 1, 7, 6, 11, 3, 8, 5, 10, 2, 7, 9, 4, 6, 8)
"""Tokens of each unit: every remainder by the block sizes used here."""

GAIN = 4
"""How much more a state may move than what moves it: two layers with their residuals, and a norm."""


def random_network() -> ThinkerNetwork:
    with torch.device("meta"):
        network = ThinkerNetwork(CONFIG)
    network.load_state_dict(random_weights(Part("thinker", network, WeightFile.MAIN, "")), assign=True)
    network.prepare()
    return network


def paged(network: ThinkerNetwork, *, num_blocks: int = 64, block_size: int = 4) -> PagedDecoder:
    """Its cache is full of NaN: whoever reads a slot that was not written shows it."""
    decoder = PagedDecoder(
        network, CONFIG.decoder, CacheConfig(num_blocks, block_size), torch.device("cpu"), torch.float32
    )
    decoder.cache.keys.fill_(torch.nan)
    decoder.cache.values.fill_(torch.nan)
    return decoder


def embeds(num_tokens: int, seed: int) -> Tensor:
    return torch.randn(num_tokens, CONFIG.decoder.hidden_size, generator=torch.Generator().manual_seed(seed))


def played(decoder: PagedDecoder, steps: MemorySteps[ResultT]) -> ResultT:
    """Run a memory's work on its decoder, alone."""
    loop: StepLoop[TextDraw, ResultT] = StepLoop(decoder, build.NoDraws())
    return build.run_alone(loop, steps)


@dataclass(slots=True)
class Session:
    """A session and everything it was told. lengths: tokens of its units, over and over.

    states: of every token fed into the ring so far.
    """

    network: ThinkerNetwork
    decoder: PagedDecoder
    window: WindowPolicy
    mode: SlideMode
    prompt_tokens: int = 6
    suffix: tuple[int, ...] = SUFFIX
    lengths: tuple[int, ...] = UNITS
    max_tokens: int = 5000
    keeps_inputs: bool = False
    states: list[Tensor] = field(default_factory=list)
    num_slides: int = 0
    memory: ThinkerMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = ThinkerMemory(
            self.network, self.decoder, self.window, self.mode, self.max_tokens, keeps_inputs=self.keeps_inputs
        )
        played(self.decoder, self.memory.feed_prompt(embeds(self.prompt_tokens, seed=1)))
        played(self.decoder, self.memory.feed_suffix(self.suffix))

    def feed(self, inputs: Tensor) -> Tensor:
        return played(self.decoder, self.memory.feed(inputs))

    def live(self, unit: int) -> None:
        """One unit in two pieces; every third one listens, the others say a word or more."""
        inputs = self.inputs(unit)
        for piece in (inputs[:1], inputs[1:]):
            if piece.shape[0]:
                self.states.append(self.feed(piece))
        self.num_slides += played(self.decoder, self.memory.close_unit(unit, self.words(unit))) is not None
        self.memory.context.check()

    def talk(self, units: range) -> MemorySteps[int]:
        """Many units as one piece of work. Returns the number of the last one."""
        for unit in units:
            yield from self.memory.feed(self.inputs(unit))
            yield from self.memory.close_unit(unit, self.words(unit))
        return units[-1]

    def inputs(self, unit: int) -> Tensor:
        return embeds(self.lengths[unit % len(self.lengths)], seed=100 + unit)

    def words(self, unit: int) -> tuple[int, ...]:
        length = self.lengths[unit % len(self.lengths)]
        return tuple(range(10 + unit % 16, 10 + unit % 16 + min(3, length))) if unit % 3 else ()

    @property
    def anchor(self) -> list[tuple[Tensor, Tensor]]:
        return [stored(self.decoder, segment) for segment in self.memory.context.segments()[:-1]]

    @property
    def ring(self) -> tuple[Tensor, Tensor]:
        return stored(self.decoder, self.memory.context.segments()[-1])


def stored(decoder: PagedDecoder, segment: Segment) -> tuple[Tensor, Tensor]:
    """Keys and values [L, T, Hkv, D] of a segment, copied."""
    slots = list(slots_of(segment, decoder.pool.block_size))
    return decoder.cache.keys.flatten(1, 2)[:, slots], decoder.cache.values.flatten(1, 2)[:, slots]


def first_layer(network: ThinkerNetwork, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What the first layer stores: functions of a token and its place alone.

    inputs: [T, hidden]; positions: [T] int64, what keys are rotated to. Returns keys and values [T, Hkv, D].
    """
    config, layer = network.config.decoder, network.model.layers[0]
    assert isinstance(layer, Layer)
    _, keys, values = layer.self_attn.heads(layer.self_attn.qkv_proj(layer.input_layernorm(inputs)))
    return rotate(layer.self_attn.k_norm(keys), rotation(positions, config.head_dim, config.rope_theta)), values
