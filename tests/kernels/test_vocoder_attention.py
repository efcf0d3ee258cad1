"""Attention over voices, sessions' own entries and chunks: against float64 formulas, and the kernel, interpreted."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor

import pytest
import torch

from antiphon.errors import ShapeError
from antiphon.kernels.vocoder_attention.contract import Entries, Reading, Sink
from antiphon.kernels.vocoder_attention.op import vocoder_attention
from kernels.vocoder_attention_cases import CASES, NUM_LAYERS, NUM_PLACES, RNG, entries, random, run_kernel


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Executor]:
    """A process of its own: Triton reads the variable when it is imported, and here others may need the compiler."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
            yield process


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layer", [0, NUM_LAYERS - 1])
def test_it_is_the_formula(name: str, layer: int) -> None:
    asked = CASES[name]
    got = vocoder_attention(asked.q, asked.k, asked.v, asked.reading, layer, bias=asked.bias, scale=asked.scale)
    torch.testing.assert_close(got.double(), asked.expected(layer), rtol=0, atol=asked.tolerance())


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_the_formula(name: str, interpreter: Executor) -> None:
    asked = CASES[name]
    got = torch.from_numpy(interpreter.submit(run_kernel, name, 1).result())
    assert (got.shape, got.dtype) == (asked.q.shape, asked.q.dtype)
    torch.testing.assert_close(got.double(), asked.expected(1), rtol=0, atol=asked.tolerance())


def test_a_session_alone_gets_the_same_bits_as_with_its_entries_elsewhere() -> None:
    """The same numbers at other places of the arena and in another voice object, in the same order."""
    asked = CASES["released heads"]
    own = asked.reading.listed[0, : asked.reading.counts[0]].tolist()
    order = torch.randperm(NUM_PLACES, generator=RNG)
    moved = {int(old): new for new, old in enumerate(order)}
    arena = Entries(asked.reading.arena.keys[:, order], asked.reading.arena.values[:, order])
    voice = Entries(asked.reading.voices[0].keys.clone(), asked.reading.voices[0].values.clone())
    there = Reading.of(arena, [voice], [[moved[entry] if entry >= 0 else entry for entry in own]])
    here = Reading.of(asked.reading.arena, asked.reading.voices[:1], [own])
    q, k, v = asked.q[:2], asked.k[:2], asked.v[:2]
    one, other = (vocoder_attention(q, k, v, reading, 2, bias=None, scale=0.1) for reading in (here, there))
    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_writes_every_sessions_entries_to_its_places_and_nothing_else(dtype: torch.dtype) -> None:
    kept = entries(10, (2, 3, 4), dtype)
    before = kept.keys.clone()
    keys, values = random(4, 3, 2, 4), random(4, 3, 2, 4)
    Sink.of(kept, [7, 2, 9, 0]).write(1, keys, values)
    for row, places in enumerate(([7, 2], [9, 0])):
        for entry, place in enumerate(places):
            for guidance in range(2):
                batch = 2 * row + guidance
                assert torch.equal(kept.keys[1, place, guidance], keys[batch, :, entry].to(dtype))
                assert torch.equal(kept.values[1, place, guidance], values[batch, :, entry].to(dtype))
    untouched = [1, 3, 4, 5, 6, 8]
    assert torch.equal(kept.keys[1, untouched], before[1, untouched])
    assert torch.equal(kept.keys[::2], before[::2])


def test_a_sink_of_no_places_writes_nothing() -> None:
    kept = entries(4, (1, 2, 4), torch.float32)
    before = kept.keys.clone()
    Sink.of(kept, ()).write(0, random(1, 2, 3, 4), random(1, 2, 3, 4))
    assert torch.equal(kept.keys, before)


def test_tensors_that_do_not_fit_are_refused() -> None:
    asked = CASES["ragged"]
    with pytest.raises(ShapeError, match="wants q, k, v"):
        vocoder_attention(asked.q[:3], asked.k, asked.v, asked.reading, 0, bias=None, scale=1.0)
    with pytest.raises(ShapeError, match="a layer"):
        vocoder_attention(asked.q, asked.k, asked.v, asked.reading, NUM_LAYERS, bias=None, scale=1.0)
    with pytest.raises(ShapeError, match="wants a bias"):
        vocoder_attention(asked.q, asked.k, asked.v, asked.reading, 0, bias=asked.q, scale=1.0)
    foreign = entries(3, (2, 2, 4), torch.bfloat16)
    reading = Reading.of(asked.reading.arena, [foreign], [[-1]])
    with pytest.raises(ShapeError, match="a voice's entries"):
        vocoder_attention(asked.q[:2], asked.k[:2], asked.v[:2], reading, 0, bias=None, scale=1.0)
