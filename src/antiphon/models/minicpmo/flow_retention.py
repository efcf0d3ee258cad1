"""Which generated tokens and frames stay in the flow's memory, as ranges. Pure Python; for `flow_membership.py`.

The reference trims one packed cache after every chunk to "the first P and the last 100 entries", P being the prompt's
mel frames. What that keeps differs per network, because their orders differ (REFERENCE 9.5, 9.6; the tables of
tests/golden/code2wav/README.md). Prompt entries are never dropped here, only left unread: they belong to the voice.
Test: tests/models/test_flow.py simulates the packed cache.
"""

from __future__ import annotations

from collections.abc import Callable

from antiphon.units import MEL_FRAMES_PER_CODEC_TOKEN

PINNED_FRAMES = 100
PINNED_TOKENS = PINNED_FRAMES // MEL_FRAMES_PER_CODEC_TOKEN


TokenRetention = Callable[[int, int], tuple[range, ...]]
"""Prompt tokens, and entries of `prompt ‖ speech` (old before new) of the token-rate layers -> the entries that follow
the prompt from now on."""


def estimator_speech_frames(num_prompt_frames: int, num_speech_frames: int) -> tuple[range, ...]:
    """The generated frames that stay, of [newest chunk, the one before, ..., first chunk], each in time order.

    The order is newest first, so "the first P" are the newest P. A prompt shorter than 100 frames leaves room in
    "the last 100", and the oldest generated frames stay there for the rest of the turn.
    """
    pinned = max(0, PINNED_FRAMES - num_prompt_frames)
    if num_speech_frames <= num_prompt_frames + pinned:
        return (range(num_speech_frames),)
    return range(num_prompt_frames), range(num_speech_frames - pinned, num_speech_frames)


def estimator_prompt_frames(num_prompt_frames: int, num_speech_frames: int) -> tuple[range, ...]:
    """The prompt frames that the estimator still reads beside `num_speech_frames` retained generated ones.

    The prompt's last 100 always; of those before, the first, as far as the generated frames leave room.
    """
    head = max(0, num_prompt_frames - max(num_speech_frames, PINNED_FRAMES))
    return range(head), range(max(0, num_prompt_frames - PINNED_FRAMES), num_prompt_frames)


def encoder_speech_frames(num_speech_frames: int) -> range:
    """Frame-rate layers, old before new: the newest 100 generated frames (and the whole prompt)."""
    return range(max(0, num_speech_frames - PINNED_FRAMES), num_speech_frames)


def newest_speech_tokens(num_prompt_tokens: int, num_tokens: int) -> tuple[range, ...]:
    """The `TokenRetention` of 1.0.7: the newest 50 generated tokens."""
    return (range(max(num_prompt_tokens, num_tokens - PINNED_TOKENS), num_tokens),)


def frozen_speech_tokens(num_prompt_tokens: int, num_tokens: int) -> tuple[range, ...]:
    """The `TokenRetention` of 1.0.5.

    The reference stores these entries A twice in a row, trims the doubled row and reads the first half of the result:
    the first generated tokens of the turn, for ever. For a prompt under 50 tokens the tail of the result comes from
    "the last 100" of A ‖ A, which may run over the seam into the prompt again; such entries are duplicates, as there.
    """
    if num_tokens - num_prompt_tokens <= PINNED_TOKENS:
        return (range(num_prompt_tokens, num_tokens),)
    num_first = min(num_prompt_tokens, PINNED_TOKENS)
    start = (2 * num_tokens - PINNED_FRAMES) % num_tokens
    end = start + PINNED_TOKENS - num_first
    seam = min(end, num_tokens)
    return range(num_prompt_tokens, num_prompt_tokens + num_first), range(start, seam), range(end - seam)
