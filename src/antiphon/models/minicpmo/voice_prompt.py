"""The three things that define a voice, as numbers. Made from a recording by `voice.py`, or given directly.

Not the conditioned `Voice`: that is what the flow computes from this (`flow.py`). Test: tests/models/test_voice.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.errors import AudioError
from antiphon.units import MEL_FRAMES_PER_CODEC_TOKEN


@dataclass(frozen=True, slots=True, eq=False)
class VoicePrompt:
    """A short piece of someone's speech, as the vocoder takes it.

    tokens:  its n codec tokens
    mel:     [2 n, M] float32; its log-mel frames at 24 kHz
    speaker: [S] float32; its speaker embedding, not normalised
    Raises: AudioError if the shapes do not fit each other or a value is not finite.
    """

    tokens: tuple[int, ...]
    mel: Tensor
    speaker: Tensor

    def __post_init__(self) -> None:
        num_frames = len(self.tokens) * MEL_FRAMES_PER_CODEC_TOKEN
        if not self.tokens or self.mel.dim() != 2 or self.mel.shape[0] != num_frames or self.speaker.dim() != 1:
            raise AudioError(
                f"a voice of {len(self.tokens)} codec tokens needs a mel [{num_frames}, bins] and a speaker [size]; "
                f"got {tuple(self.mel.shape)} and {tuple(self.speaker.shape)}; compute all three from one recording"
            )
        if not (torch.isfinite(self.mel).all() and torch.isfinite(self.speaker).all()):
            raise AudioError("the voice's mel or speaker embedding holds NaN or infinity; compute it again")
