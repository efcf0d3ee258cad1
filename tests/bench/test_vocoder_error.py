"""What fewer bits cost in sound: the figures mean what they say. Of the tiny model; also on a GPU if there is one."""

from __future__ import annotations

import math

import pytest
import torch

from antiphon.bench.vocoder_error import EXACT, PRECISIONS, Precision, VocoderError, vocoder_errors
from antiphon.config import Dtype
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.model import Section
from antiphon.models.minicpmo.source import ModelSize, RandomWeights

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_fewer_bits_cost_a_little_and_all_of_them_nothing(device: str) -> None:
    where = torch.device(device)
    model = RandomWeights(ModelSize.TINY).load(Section.VOCODER, where, torch.float32)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        errors = {error.precision: error for error in vocoder_errors(model, where, 3, PRECISIONS)}
    exact = errors[EXACT]
    if device == "cpu":
        assert exact == VocoderError(EXACT, 0.0, 0.0, math.inf, math.inf)
    assert exact.mel_db < 1e-3
    rounded = errors[Precision(Compute.BFLOAT16, Dtype.BFLOAT16)]
    assert 1e-3 < rounded.mel_db < 1
    assert rounded.sound_db < 3
    kept = errors[Precision(Compute.FLOAT32, Dtype.BFLOAT16)]
    assert exact.mel_db < kept.mel_db < rounded.mel_db
