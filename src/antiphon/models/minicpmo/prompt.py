"""What stands in front of the first unit: `prefix ‖ reference audio ‖ suffix`. Text only; the stage embeds it.

Source: REFERENCE 4.1 (the demo wraps instructions like this also when there is no reference audio).
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_INSTRUCTIONS = "Streaming Omni Conversation."


@dataclass(frozen=True, slots=True)
class PromptText:
    """The reference audio's embeddings stand between prefix and suffix; `previous` between them and the suffix."""

    prefix: str
    suffix: str


def wrap(instructions: str) -> PromptText:
    """The prompt around `instructions`, which may be empty and may contain any text."""
    prefix = f"<|im_start|>system\n{instructions}\n<|audio_start|>"
    return PromptText(prefix, "<|audio_end|><|im_end|>")
