"""The numbers that the flow's estimator computes in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import build_voice
from antiphon.models.minicpmo.flow import MelSynthesizer
from antiphon.models.minicpmo.flow_cache import SpeechState
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.flow_inputs import FlowRow


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def turn(synthesizer: MelSynthesizer) -> Tensor:
    """[T, M] of three chunks."""
    voice = synthesizer.build_voice(build_voice.prompt(20))
    speech, mels = SpeechState.at_turn_start(voice), []
    for first in (0, 100, 200):
        row = FlowRow(range(first, first + 28), voice, speech, is_last=False)
        ((mel, speech),) = synthesizer.speak([row])
        mels.append(mel[0])
    return torch.cat(mels)


def test_bfloat16_products_differ_from_float32_by_what_they_round_and_the_mel_stays_float32() -> None:
    """Each product rounds its factors to 2^-9; three steps of two layers with two rows add up a few dozen of these."""
    exact, rounded = (turn(build_voice.synthesizer(compute=one)) for one in (Compute.FLOAT32, Compute.BFLOAT16))
    assert rounded.dtype == torch.float32
    error = (rounded - exact).norm() / exact.norm()
    assert 1e-5 < error < 30 * 2.0**-9


def test_tf32_is_float32_where_there_are_no_tensor_cores() -> None:
    exact, same = (turn(build_voice.synthesizer(compute=one)) for one in (Compute.FLOAT32, Compute.TF32))
    assert torch.equal(exact, same)
