"""The same engine on a GPU; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import build
from antiphon.config import EngineConfig, SessionConfig
from antiphon.core.sampling import Draws
from antiphon.core.window import BasicWindow, SlideMode
from antiphon.engine import Engine, UnitResult
from antiphon.models.minicpmo.checkpoint import open_checkpoint
from antiphon.models.minicpmo.tokens import load_tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

NUM_UNITS = 30


def greedy_call(folder: Path, device: str, dtype: torch.dtype, slide: SlideMode) -> list[UnitResult]:
    session = SessionConfig(window=BasicWindow(200, 120), slide=slide, draws=Draws.MOST_LIKELY)
    config = EngineConfig(torch.device(device), dtype)
    with torch.inference_mode():
        engine = Engine.load(open_checkpoint(folder), load_tokenizer(folder), config, session)
        call = engine.open("a", session, torch.empty(0), build.voice(engine))
        return [call.run_unit(build.second(unit)) for unit in range(NUM_UNITS)]


def samples_of(results: list[UnitResult]) -> Tensor:
    return torch.cat([speech.samples for result in results for speech in result.speech])


@pytest.mark.parametrize("slide", [SlideMode.ROTATE_QUERY, SlideMode.ROTATE_KEYS])
def test_a_float32_call_decides_on_the_gpu_what_it_decides_on_the_cpu(tiny_checkpoint: Path, slide: SlideMode) -> None:
    here, there = (greedy_call(tiny_checkpoint, device, torch.float32, slide) for device in ("cpu", "cuda"))
    assert any(result.outcome.slide for result in here)
    assert [result.outcome.token_ids for result in here] == [result.outcome.token_ids for result in there]
    codec = [[speech.chunk.codec_tokens for result in call for speech in result.speech] for call in (here, there)]
    assert codec[0] == codec[1]
    # Full scale is 1; the end-to-end golden cases allow 5e-3 for the vocoder's summed phase.
    torch.testing.assert_close(samples_of(there), samples_of(here), rtol=0, atol=5e-3)


@pytest.mark.parametrize("slide", SlideMode)
def test_a_bfloat16_call_runs_and_speaks(tiny_checkpoint: Path, slide: SlideMode) -> None:
    results = greedy_call(tiny_checkpoint, "cuda", torch.bfloat16, slide)
    samples = samples_of(results)
    assert samples.isfinite().all()
    assert 0.01 < samples.abs().max() < 1
    assert any(result.outcome.slide for result in results)
