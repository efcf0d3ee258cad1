"""Code2wav as the engine drives it: which sessions speak in a step, and with whose voice.

How chunks become sound is `renderer.py`'s. Shown by tests/stages/test_code2wav_stage.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.core.messages import CodecChunk, Spoken
from antiphon.core.sampling import Draws
from antiphon.errors import AntiphonError
from antiphon.models.minicpmo.vocoder import NoNoise, SeededNoise
from antiphon.stages.code2wav.renderer import ChunkRow, Renderer
from antiphon.stages.code2wav.state import Code2WavCounts, Code2WavSession, Code2WavState
from antiphon.stages.code2wav.voices import VoiceStore
from antiphon.stages.loop import Ready


class Code2WavStage:
    """Owns the chunks that wait, and which session speaks when."""

    def __init__(self, renderer: Renderer, voices: VoiceStore, device: torch.device) -> None:
        """device: where the sessions' noise is drawn."""
        self._renderer = renderer
        self._voices = voices
        self._device = device
        self._opened: dict[str, Code2WavState] = {}
        self._due: dict[str, tuple[Code2WavState, CodecChunk]] = {}

    def open(self, session: Code2WavSession) -> Code2WavState:
        """Raises: AudioError if the voice does not fit the model."""
        is_silent = session.draws is Draws.MOST_LIKELY
        noise = NoNoise(self._device) if is_silent else SeededNoise(session.seed, self._device)
        state = self._renderer.open(self._voices.get(session.voice), noise)
        self._opened[session.session_id] = state
        return state

    def start(self, state: Code2WavState, chunk: CodecChunk) -> None:
        self._due[chunk.address.session_id] = (state, chunk)

    @property
    def is_idle(self) -> bool:
        return not self._opened and not self._due

    def step(self) -> dict[str, Ready[None] | Spoken[Tensor] | AntiphonError]:
        """Render the most urgent chunks; the first ones of turns before all others."""
        ended: dict[str, Ready[None] | Spoken[Tensor] | AntiphonError] = dict.fromkeys(self._opened, Ready(None))
        self._opened.clear()
        chosen = [self._due.pop(session_id) for session_id in self._most_urgent()]
        rows = [ChunkRow(state, chunk.codec_tokens, chunk.ends_turn, chunk.is_first_of_turn) for state, chunk in chosen]
        for (_, chunk), samples in zip(chosen, self._renderer.speak(rows), strict=True):
            spoken = samples if isinstance(samples, AntiphonError) else Spoken(chunk, samples.cpu())
            ended[chunk.address.session_id] = spoken
        return ended

    def interrupt(self, state: Code2WavState, epoch: int) -> None:
        """Forget the turn; the voice and the noise go on."""
        self._forget(state)
        self._renderer.reset_turn(state)

    def close(self, state: Code2WavState) -> None:
        """Idempotent; what the session held goes with its state."""
        self._opened = {key: opened for key, opened in self._opened.items() if opened is not state}
        self._forget(state)

    def survey(self) -> Code2WavCounts:
        return Code2WavCounts(len(self._due), self._voices.num_voices, self._voices.num_bytes)

    def _forget(self, state: Code2WavState) -> None:
        self._due = {key: (owner, chunk) for key, (owner, chunk) in self._due.items() if owner is not state}

    def _most_urgent(self) -> list[str]:
        chunks = {session_id: chunk for session_id, (_, chunk) in self._due.items()}
        first = [session_id for session_id, chunk in chunks.items() if chunk.is_first_of_turn]
        return sorted(first or chunks, key=lambda session_id: chunks[session_id].deadline_s)[: self._renderer.max_rows]
