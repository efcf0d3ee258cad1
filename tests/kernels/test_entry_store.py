"""Where a chunk's keys and values go, and the norms before: against float64 formulas, and the kernel, interpreted."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest
import torch
from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.entry_store.op import norm_and_store, store
from antiphon.kernels.vocoder_attention.contract import Entries, Sink
from kernels.entry_store_cases import CASES, LAYER, NUM_LAYERS, Case, interpreted, run_kernel
from kernels.runners import Runner, runners

CPU = torch.device("cpu")


def ran(asked: Case, *, is_normed: bool) -> tuple[Tensor, Tensor, Tensor]:
    entries = Entries(asked.entries.keys.clone(), asked.entries.values.clone())
    qkv, sink = asked.qkv.clone(), Sink.of(entries, asked.places)
    if is_normed:
        norm_and_store(qkv, asked.norms(CPU), LAYER, sink)
    else:
        store(qkv, LAYER, sink)
    return qkv, entries.keys, entries.values


def assert_is_the_formula(got: tuple[Tensor, ...], asked: Case, *, is_normed: bool) -> None:
    for one, want in zip(got, asked.expected(is_normed=is_normed), strict=True):
        torch.testing.assert_close(one.double(), want, rtol=0, atol=asked.tolerance())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_normed", [True, False])
def test_it_is_the_formula(name: str, is_normed: bool) -> None:  # noqa: FBT001 - by pytest
    assert_is_the_formula(ran(CASES[name], is_normed=is_normed), CASES[name], is_normed=is_normed)


@pytest.mark.parametrize("runner", runners())
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_normed", [True, False])
def test_the_kernel_is_the_formula(name: str, is_normed: bool, runner: Runner, interpreter: Executor) -> None:  # noqa: FBT001
    match runner:
        case Runner.INTERPRETER:
            got = tuple(torch.from_numpy(one) for one in interpreter.submit(interpreted, name, is_normed).result())
        case Runner.GPU:
            got = run_kernel(name, is_normed, runner)
    assert_is_the_formula(got, CASES[name], is_normed=is_normed)


def test_nothing_but_the_places_is_written() -> None:
    asked = CASES["two sessions"]
    _, keys, _ = ran(asked, is_normed=True)
    untouched = [place for place in range(keys.shape[1]) if place not in asked.places]
    assert torch.equal(keys[LAYER, untouched], asked.entries.keys[LAYER, untouched])
    others = [layer for layer in range(NUM_LAYERS) if layer != LAYER]
    assert torch.equal(keys[others], asked.entries.keys[others])


def test_a_chunk_of_nothing_stores_nothing() -> None:
    asked = CASES["one"]
    store(asked.qkv[:, :0], LAYER, Sink.of(asked.entries, ()))


def test_tensors_that_do_not_fit_are_refused() -> None:
    asked = CASES["two sessions"]
    sink = Sink.of(asked.entries, asked.places)
    with pytest.raises(ShapeError, match="rows of 2"):
        store(asked.qkv[:3], LAYER, sink)
    with pytest.raises(ShapeError, match="contiguous"):
        store(asked.qkv.transpose(0, 1), LAYER, sink)
    with pytest.raises(ShapeError, match="but places for"):
        store(asked.qkv, LAYER, Sink.of(asked.entries, asked.places[:3]))
    with pytest.raises(ShapeError, match=f"layer {NUM_LAYERS} of {NUM_LAYERS}"):
        norm_and_store(asked.qkv, asked.norms(CPU), NUM_LAYERS, sink)
