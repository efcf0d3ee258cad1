"""Attention over voices, sessions' own entries and chunks: against float64 formulas, and the kernel, interpreted."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.vocoder_attention.contract import Entries, Products, Reading
from antiphon.kernels.vocoder_attention.op import vocoder_attention
from kernels.runners import Runner, runners
from kernels.vocoder_attention_cases import CASES, NUM_LAYERS, NUM_PLACES, RNG, Case, entries, interpreted, run_kernel

CPU = torch.device("cpu")


def attend(asked: Case, layer: int) -> Tensor:
    return vocoder_attention(
        asked.q,
        asked.k,
        asked.v,
        asked.reading(CPU),
        layer,
        by_distance=asked.by_distance,
        scale=asked.scale,
        products=Products.FLOAT32,
    )


def assert_is_the_formula(got: Tensor, asked: Case, layer: int, tolerance: float) -> None:
    want = asked.expected(layer)
    is_real = ~want.isnan()
    assert is_real.any()
    torch.testing.assert_close(got.double()[is_real], want[is_real], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layer", [0, NUM_LAYERS - 1])
def test_it_is_the_formula(name: str, layer: int) -> None:
    assert_is_the_formula(attend(CASES[name], layer), CASES[name], layer, CASES[name].tolerance())


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_the_formula(name: str, runner: Runner, interpreter: Executor) -> None:
    asked = CASES[name]
    match runner:
        case Runner.INTERPRETER:
            got = torch.from_numpy(interpreter.submit(interpreted, name, 1).result())
        case Runner.GPU:
            got = run_kernel(name, 1, runner, Products.FLOAT32)
            assert got.dtype == asked.q.dtype
    assert got.shape == asked.q.shape
    assert_is_the_formula(got, asked, 1, asked.tolerance())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", CASES)
def test_tensor_cores_come_to_the_formula_within_what_they_round(name: str) -> None:
    """TF32 drops 13 bits of each factor: scores of up to 20, then values of up to 5."""
    asked = CASES[name]
    rounding = 2 * (20 + 5) * 2.0**-11
    assert_is_the_formula(run_kernel(name, 1, Runner.GPU, Products.TF32), asked, 1, asked.tolerance() + rounding)


def test_a_session_alone_gets_the_same_bits_as_with_its_entries_elsewhere() -> None:
    """The same numbers at other places of the arena and in another voice object, in the same order."""
    asked = CASES["released heads"]
    own = asked.lists[0]
    order = torch.randperm(NUM_PLACES, generator=RNG)
    moved = {int(old): new for new, old in enumerate(order)}
    arena = Entries(asked.arena.keys[:, order], asked.arena.values[:, order])
    voice = Entries(asked.voices[0].keys.clone(), asked.voices[0].values.clone())
    there = Reading.of(arena, [voice], [[moved[entry] if entry >= 0 else entry for entry in own]], [9])
    here = Reading.of(asked.arena, asked.voices[:1], [own], [9])
    q, k, v = asked.q[:2], asked.k[:2], asked.v[:2]
    one, other = (
        vocoder_attention(q, k, v, reading, 2, by_distance=None, scale=0.1, products=Products.FLOAT32)
        for reading in (here, there)
    )
    assert torch.equal(one, other)


def test_tensors_that_do_not_fit_are_refused() -> None:
    asked = CASES["ragged pasts"]
    reading = asked.reading(CPU)

    def refused(match: str, reading: Reading, *qkv: Tensor, layer: int = 0, by_distance: Tensor | None = None) -> None:
        q, k, v = qkv
        with pytest.raises(ShapeError, match=match):
            vocoder_attention(q, k, v, reading, layer, by_distance=by_distance, scale=1.0, products=Products.FLOAT32)

    refused("wants q, k, v", reading, asked.q[:3], asked.k, asked.v)
    refused("a layer", reading, asked.q, asked.k, asked.v, layer=NUM_LAYERS)
    refused("side by side", reading, asked.q.mT.contiguous().mT, asked.k, asked.v)
    refused("wants scores by distance", reading, asked.q, asked.k, asked.v, by_distance=asked.q)
    with pytest.raises(ShapeError, match="a voice's entries"):
        Reading.of(asked.arena, [entries(3, (2, 2, 4), torch.bfloat16)], [[-1]], [50])
