"""Which speech model a server has: silero's if the operator names its file, else energy, which needs no library.

Shown by tests/server/vad/test_choice.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from antiphon.server.vad.energy import EnergyModel
from antiphon.server.vad.speech import NewSpeechModel


@dataclass(frozen=True, slots=True, eq=False)
class SpeechModels:
    """What a server detects speech with. name: for the operator. new: a model for another caller."""

    name: str
    new: NewSpeechModel


def speech_models(file: Path | None) -> SpeechModels:
    """file: the option `vad_model`. Raises: ConfigError if it is not what silero comes in."""
    if file is None:
        return SpeechModels("energy", EnergyModel)
    # Only here: with energy nobody has to load onnxruntime for it.
    from antiphon.server.vad.silero import SileroNetwork

    return SpeechModels(f"silero in {file}", SileroNetwork(file).new_model)
