"""Voices by what they are made from: a recording, or the default one that ships. For whoever opens calls.

Computing one runs two networks on the CPU and takes up to seconds; what the vocoder makes of it is the engine's.
Shown by tests/server/test_incoming.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from antiphon.errors import CheckpointError
from antiphon.models.minicpmo.checkpoint import VOICE_MODEL_FILES, Checkpoint
from antiphon.models.minicpmo.model import model_config
from antiphon.models.minicpmo.voice import VoicePreparer
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.recording import read_voice, to_input_rate


@dataclass(frozen=True, slots=True, eq=False)
class PreparedVoice:
    """prompt: for the vocoder. reference: [n] float32, 16 kHz, for the thinker's prompt; n = 0 for none."""

    prompt: VoicePrompt
    reference: NDArray[np.float32]


class VoiceBook:
    """Makes voices with the models of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises: CheckpointError if it lacks them."""
        if checkpoint.missing_voice_models:
            raise CheckpointError(
                f"{checkpoint.vocoder_folder} lacks {', '.join(checkpoint.missing_voice_models)}; a voice is computed "
                "with them: add them from the released checkpoint"
            )
        speaker, tokens = (checkpoint.vocoder_folder / name for name in VOICE_MODEL_FILES)
        self._preparer = VoicePreparer(tokens, speaker, model_config(checkpoint).flow.num_mel_bins)

    def prepare(self, samples: NDArray[np.float32], rate_hz: int) -> PreparedVoice:
        """samples: [channels, n] float32. Raises: AudioError."""
        sound = torch.from_numpy(samples)
        return PreparedVoice(self._preparer.prepare(sound, rate_hz), to_input_rate(sound, rate_hz).numpy())

    def read(self, path: Path) -> PreparedVoice:
        """A recording. Raises: AudioError."""
        samples, rate_hz = read_voice(path)
        return self.prepare(samples.numpy(), rate_hz)

    def default(self) -> PreparedVoice:
        """The voice that ships, which the prompt does not mention."""
        with as_file(files("antiphon") / "assets" / "default_voice.flac") as path:
            return PreparedVoice(self.read(path).prompt, np.empty(0, np.float32))
