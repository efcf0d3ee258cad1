"""Conditioned voices, each built once for all sessions that speak with it. Keys are digests of what defines a voice.

A voice in use lives as long as its users do, whatever is kept here. Shown by tests/stages/test_voices.py.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from antiphon.models.minicpmo.flow import MelSynthesizer
from antiphon.models.minicpmo.flow_cache import Voice
from antiphon.models.minicpmo.voice_prompt import VoicePrompt


class VoiceStore:
    """Owns one reference to each of the last used voices. max_bytes: of their caches; the newest is kept anyway."""

    def __init__(self, synthesizer: MelSynthesizer, max_bytes: int) -> None:
        self._synthesizer = synthesizer
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Voice] = OrderedDict()  # least recently used first

    def get(self, prompt: VoicePrompt) -> Voice:
        """Raises: AudioError if the prompt does not fit the model."""
        key = _digest(prompt)
        voice = self._stored.pop(key, None) or self._synthesizer.build_voice(prompt)
        self._stored[key] = voice
        while len(self._stored) > 1 and self.num_bytes > self._max_bytes:
            self._stored.popitem(last=False)
        return voice

    @property
    def num_voices(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        return sum(voice.num_bytes for voice in self._stored.values())


def _digest(prompt: VoicePrompt) -> str:
    content = hashlib.sha256()
    for part in (repr(prompt.tokens).encode(), prompt.mel.numpy().tobytes(), prompt.speaker.numpy().tobytes()):
        content.update(hashlib.sha256(part).digest())
    return content.hexdigest()
