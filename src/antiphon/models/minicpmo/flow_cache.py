"""What the flow remembers: a voice, shared and never written, and the speech of one turn, private to its session.

Attention reads both together; they are joined only for the call. Everything here is immutable: a chunk makes a new
`SpeechState`, so a failed chunk leaves the old one whole. Sizes are real lengths and real Euler steps. Not the rule
of what stays: `flow_retention.py`. Test: tests/models/test_flow.py, golden code2wav.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.models.minicpmo.flow_retention import (
    TokenRetention,
    encoder_speech_frames,
    estimator_prompt_frames,
    estimator_speech_frames,
)


@dataclass(frozen=True, slots=True, eq=False)
class KeysValues:
    """Attention's memory of a run of entries (tokens or mel frames), of one layer or of several stacked ones.

    keys, values: [..., B, H, T, D] floating; the leading dimension, where there is one, counts layers.
    """

    keys: Tensor
    values: Tensor

    @staticmethod
    def joined(parts: Iterable[KeysValues]) -> KeysValues:
        """The parts one after the other along T."""
        parts = tuple(parts)
        return KeysValues(
            torch.cat([part.keys for part in parts], dim=-2), torch.cat([part.values for part in parts], dim=-2)
        )

    @staticmethod
    def stacked(layers: Sequence[KeysValues]) -> KeysValues:
        return KeysValues(torch.stack([one.keys for one in layers]), torch.stack([one.values for one in layers]))

    def split(self, num_sessions: int) -> list[KeysValues]:
        """Views of what is whose: equal shares of B, in order."""
        shares = zip(self.keys.chunk(num_sessions, dim=-4), self.values.chunk(num_sessions, dim=-4), strict=True)
        return [KeysValues(keys, values) for keys, values in shares]

    @property
    def num_entries(self) -> int:
        return self.keys.shape[-2]

    def layer(self, index: int) -> KeysValues:
        return KeysValues(self.keys[index], self.values[index])

    def view(self, entries: range) -> KeysValues:
        return KeysValues(
            self.keys[..., entries.start : entries.stop, :], self.values[..., entries.start : entries.stop, :]
        )

    def copy(self, ranges: Iterable[range]) -> KeysValues:
        """The entries of all ranges in a tensor of their own, so that nothing else is kept alive."""
        return KeysValues.joined(self.view(entries) for entries in ranges)


Past = tuple[KeysValues, ...]
"""Runs of entries that attention reads as one; held apart because their owners differ."""


@dataclass(frozen=True, slots=True, eq=False)
class EncoderCache:
    """What the encoder remembers of a run of tokens.

    lookahead_tail:  [B, C, 2] floating; last outputs of the lookahead convolution
    upsampling_tail: [B, C, 4] floating; last inputs of the convolution after the upsampling
    tokens, frames:  entries of the token-rate and of the frame-rate layers, old before new
    """

    lookahead_tail: Tensor
    upsampling_tail: Tensor
    tokens: KeysValues
    frames: KeysValues

    def split(self, num_sessions: int) -> list[EncoderCache]:
        """Each session's share; the entries are views, the tails are not."""
        tails = (self.lookahead_tail.chunk(num_sessions), self.upsampling_tail.chunk(num_sessions))
        shares = zip(*tails, self.tokens.split(num_sessions), self.frames.split(num_sessions), strict=True)
        return [EncoderCache(one.clone(), other.clone(), tokens, frames) for one, other, tokens, frames in shares]


@dataclass(frozen=True, slots=True, eq=False)
class StepCache:
    """What the estimator remembers of a run of mel frames, in one Euler step.

    frames:     B = 2 rows per session, the conditional before the unconditional one; newest chunk first
    conv_tails: [L, 2, B, C, 2] floating; last two input frames of each layer's two causal convolutions
    """

    frames: KeysValues
    conv_tails: Tensor

    def split(self, num_sessions: int) -> list[StepCache]:
        """Each session's share; the entries are views, the tails are not."""
        shares = zip(self.frames.split(num_sessions), self.conv_tails.chunk(num_sessions, dim=2), strict=True)
        return [StepCache(frames, tails.clone()) for frames, tails in shares]


@dataclass(frozen=True, slots=True, eq=False)
class FlowCache:
    """What one run of tokens leaves in the flow: its encoder entries and, per Euler step, its estimator entries."""

    encoder: EncoderCache
    steps: tuple[StepCache, ...]

    def split(self, num_sessions: int) -> list[FlowCache]:
        """Each session's share of what a common solve leaves; the entries are views."""
        steps = zip(*(step.split(num_sessions) for step in self.steps), strict=True)
        return [FlowCache(*share) for share in zip(self.encoder.split(num_sessions), steps, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Voice:
    """A conditioned speaker: shared by all sessions that speak with it, never written.

    speaker: [1, M] floating; the speaker embedding as the estimator takes it
    cache:   of the whole prompt
    """

    speaker: Tensor
    cache: FlowCache

    @property
    def num_frames(self) -> int:
        return self.cache.encoder.frames.num_entries

    @property
    def num_tokens(self) -> int:
        return self.cache.encoder.tokens.num_entries

    @property
    def num_bytes(self) -> int:
        """Of what it remembers."""
        encoder = self.cache.encoder
        tensors = [self.speaker, encoder.lookahead_tail, encoder.upsampling_tail]
        tensors += [step.conv_tails for step in self.cache.steps]
        for entries in (encoder.tokens, encoder.frames, *(step.frames for step in self.cache.steps)):
            tensors += [entries.keys, entries.values]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, slots=True, eq=False)
class SpeechState:
    """Private to one session: what is retained of the frames generated in this turn, and how the last chunk ended."""

    cache: FlowCache

    @staticmethod
    def at_turn_start(voice: Voice) -> SpeechState:
        """No generated frames; the convolutions go on from the end of the prompt."""
        encoder, nothing = voice.cache.encoder, range(0)
        return SpeechState(
            FlowCache(
                EncoderCache(
                    encoder.lookahead_tail,
                    encoder.upsampling_tail,
                    encoder.tokens.view(nothing),
                    encoder.frames.view(nothing),
                ),
                tuple(StepCache(step.frames.view(nothing), step.conv_tails) for step in voice.cache.steps),
            )
        )

    def followed_by(self, chunk: FlowCache, voice: Voice, kept_tokens: TokenRetention) -> SpeechState:
        """The state after `chunk`: it joins the generated entries, then what the reference would not keep goes."""
        old, new = self.cache.encoder, chunk.encoder
        tokens = KeysValues.joined((voice.cache.encoder.tokens, old.tokens, new.tokens))
        frames = KeysValues.joined((old.frames, new.frames))
        kept = estimator_speech_frames(voice.num_frames, self.num_frames + chunk.steps[0].frames.num_entries)
        return SpeechState(
            FlowCache(
                EncoderCache(
                    new.lookahead_tail,
                    new.upsampling_tail,
                    tokens.copy(kept_tokens(voice.num_tokens, tokens.num_entries)),
                    frames.copy((encoder_speech_frames(frames.num_entries),)),
                ),
                tuple(
                    StepCache(KeysValues.joined((after.frames, before.frames)).copy(kept), after.conv_tails)
                    for before, after in zip(self.cache.steps, chunk.steps, strict=True)
                ),
            )
        )

    @property
    def num_frames(self) -> int:
        """Generated frames that the estimator retains."""
        return self.cache.steps[0].frames.num_entries

    def past_tokens(self, voice: Voice) -> Past:
        """What the encoder's token-rate layers read before a new chunk, old before new."""
        return voice.cache.encoder.tokens, self.cache.encoder.tokens

    def past_frames(self, voice: Voice) -> Past:
        """What the encoder's frame-rate layers read before a new chunk, old before new."""
        return voice.cache.encoder.frames, self.cache.encoder.frames

    def past_of_step(self, step: int, voice: Voice) -> Past:
        """What the estimator reads in one Euler step after a new chunk, newest first."""
        prompt = voice.cache.steps[step].frames
        ranges = estimator_prompt_frames(voice.num_frames, self.num_frames)
        return self.cache.steps[step].frames, *(prompt.view(entries) for entries in ranges)

    def num_past_frames(self, voice: Voice) -> int:
        """Frames that the estimator reads before the new chunk: where the chunk's noise starts (REFERENCE 9.3)."""
        prompt = estimator_prompt_frames(voice.num_frames, self.num_frames)
        return self.num_frames + sum(len(entries) for entries in prompt)
