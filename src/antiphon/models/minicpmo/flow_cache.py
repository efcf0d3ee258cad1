"""What the flow remembers: a voice, shared and never written, and the speech of one turn, private to its session.

A chunk's entries go into free places of the arena (`speech_arena.py`); the `SpeechState` after it lists what the next
one reads and is another object, so a chunk that fails leaves the old state whole. Sizes are real lengths and real
Euler steps. Not what stays: `flow_membership.py`. Tests: tests/models/test_flow.py, golden code2wav.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from antiphon.kernels.frame_norm.contract import TAIL_FRAMES
from antiphon.kernels.vocoder_attention.contract import Entries, Products, Reading, Sink
from antiphon.kernels.vocoder_attention.op import vocoder_attention
from antiphon.models.minicpmo.flow_config import FlowConfig
from antiphon.models.minicpmo.flow_membership import (
    Listed,
    Retention,
    next_frames,
    next_steps,
    next_tokens,
    of_voice,
    own_of,
)
from antiphon.models.minicpmo.flow_retention import TokenRetention

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")

_GUIDANCE_ROWS = 2
_CONVS = 2


@dataclass(frozen=True, slots=True)
class Parts(Generic[T]):
    """One of each for the three sorts of layers that remember.

    tokens, frames: of the encoder's token-rate and frame-rate layers. steps: of the estimator's, in all Euler steps.
    """

    tokens: T
    frames: T
    steps: T

    def map(self, make: Callable[[T], U]) -> Parts[U]:
        return Parts(make(self.tokens), make(self.frames), make(self.steps))

    def zip(self, other: Parts[U], make: Callable[[T, U], V]) -> Parts[V]:
        return Parts(make(self.tokens, other.tokens), make(self.frames, other.frames), make(self.steps, other.steps))

    @property
    def all(self) -> tuple[T, T, T]:
        return self.tokens, self.frames, self.steps


@dataclass(frozen=True, slots=True)
class EntryShape:
    """num_rows: of guidance, which are remembered apart."""

    num_layers: int
    num_rows: int
    num_heads: int
    head_dim: int

    def new(self, num_entries: int, dtype: torch.dtype, device: torch.device) -> Entries:
        shape = (self.num_layers, num_entries, self.num_rows, self.num_heads, self.head_dim)
        return Entries(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))

    def entry_bytes(self, dtype: torch.dtype) -> int:
        """Of one entry."""
        return 2 * self.num_layers * self.num_rows * self.num_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class FlowShape:
    """What a flow of some size remembers, with some number of Euler steps."""

    config: FlowConfig
    num_steps: int

    @property
    def entries(self) -> Parts[EntryShape]:
        encoder, estimator = self.config.encoder, self.config.estimator
        head_dim = encoder.hidden_size // encoder.num_heads
        return Parts(
            EntryShape(encoder.num_token_layers, 1, encoder.num_heads, head_dim),
            EntryShape(encoder.num_frame_layers, 1, encoder.num_heads, head_dim),
            EntryShape(self.num_steps * estimator.num_layers, _GUIDANCE_ROWS, estimator.num_heads, estimator.head_dim),
        )

    def tails(self, number: int, device: torch.device) -> Tails:
        """Of so many sessions, as at the start of everything."""
        encoder, estimator = self.config.encoder, self.config.estimator

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(number, *shape, device=device)

        return Tails(
            zeros(encoder.hidden_size, TAIL_FRAMES),
            zeros(encoder.hidden_size, TAIL_FRAMES * encoder.frames_per_token),
            zeros(self.num_steps * estimator.num_layers * _CONVS, _GUIDANCE_ROWS, TAIL_FRAMES, estimator.hidden_size),
        )

    @property
    def tails_bytes(self) -> int:
        """Of one session."""
        return self.tails(1, torch.device("meta")).num_bytes

    def voice_bytes(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Of a voice so long. dtype: of its entries."""
        num_frames = self.frames_of(num_tokens)
        numbers = Parts(num_tokens, num_frames, num_frames)
        sizes = self.entries.zip(numbers, lambda entry, number: number * entry.entry_bytes(dtype))
        return sum(sizes.all) + self.tails_bytes + self.config.num_mel_bins * torch.float32.itemsize

    def frames_of(self, num_tokens: int) -> int:
        return num_tokens * self.config.encoder.frames_per_token


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """What the layers of one sort read of B sessions' pasts, and where the entries of their chunks go.

    products: how they attend
    """

    reading: Reading
    sink: Sink
    products: Products

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, by_distance: Tensor | None, scale: float
    ) -> Tensor:
        """q, k, v: [B G, L, H, D] floating, of the chunks; all as in `vocoder_attention` -> as q."""
        return vocoder_attention(
            q, k, v, self.reading, layer, by_distance=by_distance, scale=scale, products=self.products
        )


@dataclass(frozen=True, slots=True, eq=False)
class Tails:
    """Where the convolutions of B sessions go on.

    lookahead:  [B, C, 2] float32; last outputs of the encoder's lookahead convolution
    upsampling: [B, C, 4] float32; last inputs of its convolution after the upsampling
    convs:      [B, S L 2, 2, 2, C] float32; last inputs per convolution of the estimator (two in each layer of each
                Euler step) and guidance row, frame by frame
    """

    lookahead: Tensor
    upsampling: Tensor
    convs: Tensor

    def of(self, index: int) -> Tails:
        """A view of one session's."""
        own = slice(index, index + 1)
        return Tails(self.lookahead[own], self.upsampling[own], self.convs[own])

    @property
    def num_bytes(self) -> int:
        return self.lookahead.nbytes + self.upsampling.nbytes + self.convs.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Voice:
    """A conditioned speaker: shared by all sessions that speak with it, never written.

    speaker: [1, M] floating; the speaker embedding as the estimator takes it
    entries: of the whole prompt
    """

    speaker: Tensor
    entries: Parts[Entries]
    tails: Tails

    @property
    def num_frames(self) -> int:
        return self.entries.frames.keys.shape[1]

    @property
    def num_tokens(self) -> int:
        return self.entries.tokens.keys.shape[1]

    @property
    def num_bytes(self) -> int:
        """Of what it remembers."""
        return self.speaker.nbytes + self.tails.num_bytes + sum(entries.num_bytes for entries in self.entries.all)


@dataclass(frozen=True, slots=True, eq=False)
class Writing:
    """Where a chunk of one session goes. tails: a view of its place for them, which is `tail_place`."""

    places: Parts[Listed]
    tail_place: int
    tails: Tails


@dataclass(frozen=True, slots=True, eq=False)
class SpeechState:
    """Private to one session: what its next chunk reads, and how the last one ended.

    reads: as in `flow_membership.py`
    tails: of the voice at a turn's start, then a view of the arena's
    tail_places: where in the arena they are; none if they are the voice's
    """

    reads: Parts[Listed]
    tails: Tails
    tail_places: tuple[int, ...]

    @staticmethod
    def at_turn_start(voice: Voice) -> SpeechState:
        """No generated entries; the convolutions go on from the end of the prompt."""
        reads = voice.entries.map(lambda entries: of_voice(range(entries.keys.shape[1])))
        return SpeechState(reads, voice.tails, ())

    @property
    def num_past_frames(self) -> int:
        """Frames that the estimator reads before the new chunk: where the chunk's noise starts (REFERENCE 9.3)."""
        return len(self.reads.steps)

    @property
    def held(self) -> Parts[Listed]:
        """The places in the arena that it keeps."""
        return self.reads.map(own_of)

    def followed_by(
        self, chunk: Writing, voice: Voice, retention: Retention, kept_tokens: TokenRetention
    ) -> SpeechState:
        """The state after a chunk: its entries join the others, then what is not retained is not read any more.

        retention, kept_tokens: of the estimator, and of the encoder's token-rate layers as in `flow_rules.py`
        """
        new, reads = chunk.places, self.reads
        return SpeechState(
            Parts(
                next_tokens(kept_tokens, voice.num_tokens, reads.tokens, new.tokens),
                next_frames(voice.num_frames, reads.frames, new.frames),
                next_steps(retention, voice.num_frames, reads.steps, new.steps),
            ),
            chunk.tails,
            (chunk.tail_place,),
        )
