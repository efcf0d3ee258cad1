"""Flow and vocoder on a GPU, launched and replayed, in all numbers they compute in; skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import build_voice
from antiphon.core.batch_grid import BatchGrid
from antiphon.models.minicpmo.captured import GraphRecorder, NumRuns
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.hift_config import Generation
from antiphon.models.minicpmo.vocoder import NoNoise
from antiphon.stages.code2wav.renderer import ChunkRow, Renderer, grid_on
from antiphon.stages.code2wav.state import Code2WavState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

PROMPTS = (3, 10, 30, 60)
"""Tokens."""

NUM_CHUNKS = 6


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Choir:
    """Four sessions that speak at the same time."""

    def __init__(self, device: str, generation: Generation, compute: Compute, *, is_recorded: bool = False) -> None:
        where = torch.device(device)
        synthesizer = build_voice.synthesizer(device=where, generation=generation, compute=compute)
        grid = grid_on(where, BatchGrid((1, 2, 4)))
        self.renderer = Renderer(synthesizer, build_voice.vocoder(generation, where, compute), grid)
        if is_recorded:
            for _ in self.renderer.capture((10, 25, 28), 2 * max(PROMPTS), GraphRecorder.on(where)):
                pass
        voices = [synthesizer.build_voice(build_voice.prompt(num, seed=num)) for num in PROMPTS]
        self.states = [self.renderer.open(voice, NoNoise(where)) for voice in voices]

    def sing(self, number: int, nums_tokens: Sequence[int], *, is_turn_end: bool = False) -> list[Tensor]:
        """A chunk of each."""
        rows = [self._row(state, range(100 * number, 100 * number + num), is_turn_end) for state, num in zip(
            self.states, nums_tokens, strict=True
        )]  # fmt: skip
        results = [result for result in self.renderer.speak(rows) if isinstance(result, Tensor)]
        assert len(results) == len(rows), "a chunk failed"
        return results

    def _row(self, state: Code2WavState, tokens: Sequence[int], is_turn_end: bool) -> ChunkRow:  # noqa: FBT001
        return ChunkRow(state, tokens, is_turn_end=is_turn_end, is_flush=False)


def song(choir: Choir) -> list[Tensor]:
    """Per session, on the host: whole chunks, then a last one of another length for each."""
    pieces = [choir.sing(number, (25, 25, 25, 25)) for number in range(NUM_CHUNKS)]
    pieces.append(choir.sing(NUM_CHUNKS, (3, 9, 22, 25), is_turn_end=True))
    return [torch.cat(own).cpu() for own in zip(*pieces, strict=True)]


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("generation", Generation)
def test_float32_on_the_gpu_sounds_as_on_the_cpu(generation: Generation, is_recorded: bool) -> None:  # noqa: FBT001
    here = song(Choir("cpu", generation, Compute.FLOAT32))
    there = song(Choir("cuda", generation, Compute.FLOAT32, is_recorded=is_recorded))
    for one, other in zip(here, there, strict=True):
        # Full scale is 1; the end-to-end golden cases allow 5e-3 for the vocoder's summed phase.
        torch.testing.assert_close(other, one, rtol=0, atol=5e-3)


@pytest.mark.parametrize("generation", Generation)
def test_whole_chunks_and_the_ends_of_turns_are_replayed(generation: Generation) -> None:
    choir = Choir("cuda", generation, Compute.FLOAT32, is_recorded=True)
    choir.sing(0, (25, 25, 25, 25))
    assert choir.renderer.num_runs == NumRuns(num_replayed=2)
    for number in range(1, NUM_CHUNKS):
        choir.sing(number, (25, 25, 25, 25))
    before = choir.renderer.num_runs
    assert before.num_replayed >= 2 + NUM_CHUNKS
    choir.sing(NUM_CHUNKS, (1, 1, 1, 1), is_turn_end=True)
    assert choir.renderer.num_runs.num_launched == before.num_launched, "ends of turns are filled up"


@pytest.mark.parametrize("compute", [Compute.TF32, Compute.BFLOAT16])
def test_other_numbers_speak_on_and_stay_near_float32(compute: Compute) -> None:
    """Of the flow's mel; what a listener gets of it is measured by `antiphon bench error`."""
    mels = []
    for own in (Compute.FLOAT32, compute):
        choir = Choir("cuda", Generation.V1_0_7, own, is_recorded=True)
        mels.append(song(choir))
    for one, other in zip(*mels, strict=True):
        assert other.isfinite().all()
        assert not torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("generation", Generation)
def test_the_host_never_waits_while_chunks_are_rendered(generation: Generation, is_recorded: bool) -> None:  # noqa: FBT001
    choir = Choir("cuda", generation, Compute.FLOAT32, is_recorded=is_recorded)
    song(choir)
    with no_waiting():
        choir.sing(0, (25, 25, 25, 25))
        choir.sing(1, (25, 25, 25, 25))
        choir.sing(2, (3, 9, 22, 25), is_turn_end=True)
