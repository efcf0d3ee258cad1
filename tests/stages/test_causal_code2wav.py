"""Code2wav with flow and vocoder of minicpmo-utils 1.0.7. The stage does not know which it has: test_code2wav.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import build_voice
from antiphon.core.batch_grid import BatchGrid
from antiphon.errors import AntiphonError
from antiphon.models.minicpmo.flow import MelSynthesizer
from antiphon.models.minicpmo.hift_config import Generation
from antiphon.models.minicpmo.vocoder import SeededNoise
from antiphon.stages.code2wav.renderer import ChunkRow, Renderer, grid_on
from antiphon.stages.code2wav.state import Code2WavState
from antiphon.units import OUTPUT_SAMPLES_PER_UNIT, SAMPLES_PER_MEL_FRAME
from build_voice import CPU

STEP = 1 / 32768
TOLERANCE = 3 * STEP
"""A step of PCM for its rounding, the rest for sums that a shared solve rounds in another order."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """alone, shared: renderers with one session in a solve, and with many."""

    synthesizer: MelSynthesizer
    alone: Renderer
    shared: Renderer

    def open(self, who: int) -> Code2WavState:
        voice = self.synthesizer.build_voice(build_voice.prompt(10 + 20 * who, seed=who))
        return self.alone.open(voice, SeededNoise(who, CPU))


@pytest.fixture(scope="module")
def setup() -> Setup:
    with torch.inference_mode():
        synthesizer = build_voice.synthesizer(generation=Generation.V1_0_7)
        vocoder = build_voice.vocoder(Generation.V1_0_7)
        grids = (grid_on(torch.device(name), BatchGrid((1, 2, 4))) for name in ("cpu", "cuda"))
        return Setup(synthesizer, *(Renderer(synthesizer, vocoder, grid) for grid in grids))


def heard(result: Tensor | AntiphonError) -> Tensor:
    assert isinstance(result, Tensor), result
    return result


def said(
    setup: Setup, state: Code2WavState, tokens: Sequence[int], *, is_turn_end: bool = False, is_flush: bool = False
) -> Tensor:
    (result,) = setup.alone.speak([ChunkRow(state, tokens, is_turn_end, is_flush)])
    return heard(result)


def test_every_unit_of_a_turn_is_a_second_and_the_last_one_is_all_that_is_left(setup: Setup) -> None:
    state = setup.open(0)
    assert len(said(setup, state, range(25))) == OUTPUT_SAMPLES_PER_UNIT
    assert len(said(setup, state, range(25))) == OUTPUT_SAMPLES_PER_UNIT
    # 3 tokens that were looked at, 4 new ones, and the 8 frames that the vocoder held back
    assert len(said(setup, state, range(4), is_turn_end=True)) == (2 * 7 + 8) * SAMPLES_PER_MEL_FRAME


def test_a_flushed_first_unit_is_filled_with_silence_on_the_left(setup: Setup) -> None:
    first = said(setup, setup.open(0), range(10), is_flush=True)
    silence = OUTPUT_SAMPLES_PER_UNIT - 2 * 10 * SAMPLES_PER_MEL_FRAME + 8 * SAMPLES_PER_MEL_FRAME
    assert len(first) == OUTPUT_SAMPLES_PER_UNIT
    assert not first[:silence].any()
    assert first[silence:].any()


def test_a_turn_begins_as_any_turn_whatever_was_said_before(setup: Setup) -> None:
    used = setup.open(1)
    said(setup, used, range(60))
    said(setup, used, range(5), is_turn_end=True)
    fresh = setup.alone.open(used.voice, used.vocoder.noise)
    assert torch.equal(said(setup, used, range(40)), said(setup, fresh, range(40)))


def test_sessions_share_solves_and_hear_nothing_of_each_other(setup: Setup) -> None:
    """They begin one unit after the other, and one ends: first, later and last chunks meet."""
    units = [range(30), range(30, 55), range(55, 80), range(80, 87)]
    alone = [
        [said(setup, state, unit, is_turn_end=unit is units[-1]) for unit in units]
        for state in (setup.open(who) for who in range(3))
    ]
    states = [setup.open(who) for who in range(3)]
    for moment in range(len(units) + 2):
        speaking = [who for who in range(3) if 0 <= moment - who < len(units)]
        rows = [
            ChunkRow(states[who], units[moment - who], is_turn_end=moment - who == len(units) - 1, is_flush=False)
            for who in speaking
        ]
        for who, result in zip(speaking, setup.shared.speak(rows), strict=True):
            torch.testing.assert_close(heard(result), alone[who][moment - who], rtol=0, atol=TOLERANCE)
