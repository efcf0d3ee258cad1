"""Runs flow and vocoder for sessions: codec tokens of one unit in, the unit's PCM out.

One session per call. Not the loop with its messages, not batching. Tests: tests/stages/test_code2wav.py, golden
code2wav (`buffering`, `post`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.core.codec_buffer import CodecBuffer, Window
from antiphon.models.minicpmo.flow import SILENCE_TOKEN, MelSynthesizer
from antiphon.models.minicpmo.flow_cache import SpeechState, Voice
from antiphon.models.minicpmo.vocoder import SourceNoise, Vocoder
from antiphon.stages.code2wav.state import Code2WavState
from antiphon.units import OUTPUT_SAMPLES_PER_UNIT

_PCM16_SCALE = 32767
_PCM16_RANGE = 32768


class Code2WavStage:
    """Writes the sessions' states; shares flow and vocoder among them."""

    def __init__(self, synthesizer: MelSynthesizer, vocoder: Vocoder) -> None:
        self._synthesizer = synthesizer
        self._vocoder = vocoder

    def open(self, voice: Voice, noise: SourceNoise) -> Code2WavState:
        """A session's state, before its first turn. The voice is shared, the noise is the session's own."""
        lookahead = self._synthesizer.flow.config.encoder.lookahead_tokens
        return Code2WavState(
            voice=voice,
            noise=noise,
            buffer=CodecBuffer(SILENCE_TOKEN, lookahead),
            speech=SpeechState.at_turn_start(voice),
            vocoder=self._vocoder.at_turn_start(),
        )

    def speak(self, state: Code2WavState, codec_tokens: Sequence[int], *, is_turn_end: bool, is_flush: bool) -> Tensor:
        """Take one unit's codec tokens; returns what can be heard of the turn by now.

        is_turn_end: all that is left is rendered, and the state is ready for the next turn
        is_flush:    render what there is (a turn's first unit) instead of waiting for a second of tokens
        Returns: [n] float32, 24 kHz, in steps of 16-bit PCM. Before the turn's end n is 0 (all tokens are held) or at
        least 24000, filled with silence on the left; at its end any length.
        """
        windows = state.buffer.push(codec_tokens, is_flush=is_flush, is_last=is_turn_end)
        pieces = [self._render(state, window) for window in windows]
        if is_turn_end:
            self.reset_turn(state)
        return unit_pcm(pieces, is_turn_end=is_turn_end) if pieces else state.vocoder.speech_tail.new_zeros(0)

    def reset_turn(self, state: Code2WavState) -> None:
        """Forget the turn: it ended or was interrupted. The voice and the noise go on."""
        state.buffer.reset()
        state.speech = SpeechState.at_turn_start(state.voice)
        state.vocoder = self._vocoder.at_turn_start()

    def _render(self, state: Code2WavState, window: Window) -> Tensor:
        """One window -> [n] float32."""
        vocab_size = self._synthesizer.flow.config.vocab_size
        assert 0 <= min(window.tokens) <= max(window.tokens) < vocab_size, f"not codec tokens: {window.tokens}"
        mel, speech = self._synthesizer.speak(window.tokens, state.voice, state.speech, is_last=window.is_last)
        samples, vocoder = self._vocoder.speak(mel.mT, state.vocoder, state.noise, is_last=window.is_last)
        state.speech, state.vocoder = speech, vocoder
        return samples[0]


def unit_pcm(pieces: Sequence[Tensor], *, is_turn_end: bool) -> Tensor:
    """Join a unit's samples, round them as 16-bit PCM and fill the unit.

    The reference's way: clip, scale by 32767, cut off the fraction, read back by 1/32768; a unit that is short and
    not its turn's last starts with silence (REFERENCE 9.7).
    pieces: [n] float32 each -> [n] float32.
    """
    samples = torch.cat([*pieces])
    pcm = (samples.clamp(-1, 1) * _PCM16_SCALE).trunc() / _PCM16_RANGE
    missing = 0 if is_turn_end else max(0, OUTPUT_SAMPLES_PER_UNIT - len(pcm))
    return F.pad(pcm, (missing, 0))
