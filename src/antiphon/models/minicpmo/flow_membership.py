"""Which entries the next chunk of a turn reads, as lists of numbers. Pure Python; the entries are in `flow_cache.py`.

An entry e ≥ 0 is the session's own, at place e of the arena; the voice's entry i is -1 - i. `flow_retention.py` says
what the reference keeps. Test: tests/models/test_flow.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from antiphon.models.minicpmo.flow_retention import (
    PINNED_FRAMES,
    TokenRetention,
    encoder_speech_frames,
    estimator_prompt_frames,
    estimator_speech_frames,
)

Listed = tuple[int, ...]


class Retention(Enum):
    """What is remembered of a turn beside the voice."""

    REFERENCE = "reference"
    """As the official code: the newest frames, as many as the voice has, beside the voice's last 2 s; and at token
    rate what the checkpoint's generation keeps (`flow_rules.py`)."""
    VOICE_FIRST = "voice_first"
    """The whole voice and the newest 2 s. Not what the official code computes; takes less memory."""


def of_voice(entries: Iterable[int]) -> Listed:
    return tuple(-1 - entry for entry in entries)


def own_of(listed: Iterable[int]) -> Listed:
    """The places that a session holds, each once, in order."""
    return tuple(dict.fromkeys(entry for entry in listed if entry >= 0))


def max_speech_frames(retention: Retention, num_prompt_frames: int) -> int:
    """The most generated frames that the estimator remembers with such a voice."""
    return max(num_prompt_frames, PINNED_FRAMES) if retention is Retention.REFERENCE else PINNED_FRAMES


def next_tokens(kept: TokenRetention, num_prompt: int, listed: Sequence[int], new: Sequence[int]) -> Listed:
    """Of the encoder's token-rate layers, old before new. listed: what this chunk read. new: its own places."""
    seen = (*listed, *new)
    return (*seen[:num_prompt], *(seen[index] for entries in kept(num_prompt, len(seen)) for index in entries))


def next_frames(num_prompt: int, listed: Sequence[int], new: Sequence[int]) -> Listed:
    """Of the encoder's frame-rate layers, old before new."""
    speech = (*listed[num_prompt:], *new)
    kept = encoder_speech_frames(len(speech))
    return (*listed[:num_prompt], *speech[kept.start : kept.stop])


def next_steps(retention: Retention, num_prompt: int, listed: Sequence[int], new: Sequence[int]) -> Listed:
    """Of the estimator, in every Euler step. It knows no order; ours is the one that the retention counts in."""
    old = own_of(listed)
    match retention:
        case Retention.REFERENCE:
            speech = (*new, *old)
            kept = estimator_speech_frames(num_prompt, len(speech))
            own = tuple(speech[index] for entries in kept for index in entries)
            prompt = estimator_prompt_frames(num_prompt, len(own))
            return (*own, *(entry for entries in prompt for entry in of_voice(entries)))
        case Retention.VOICE_FIRST:
            return (*(*old, *new)[-PINNED_FRAMES:], *of_voice(range(num_prompt)))
