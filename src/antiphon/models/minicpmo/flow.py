"""Codec tokens to mel frames by flow matching: the network with its official names, and the Euler solver around it.

A voice is computed once, step by step, and shared; a session's chunks then read it beside their own past. Equally long
chunks of several sessions are solved together. Formulas of REFERENCE 9.1 to 9.3. Not the waveform: `hift.py`. Tests:
golden code2wav, tests/models/test_flow.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from antiphon.errors import AudioError
from antiphon.kernels.vocoder_attention.contract import Reading, Sink
from antiphon.models.minicpmo.dit import DiT
from antiphon.models.minicpmo.flow_cache import Memory, Parts, SpeechState, Tails, Voice, Writing
from antiphon.models.minicpmo.flow_config import FlowConfig
from antiphon.models.minicpmo.flow_encoder import FlowEncoder
from antiphon.models.minicpmo.flow_retention import PINNED_FRAMES
from antiphon.models.minicpmo.flow_rules import flow_rules
from antiphon.models.minicpmo.hift_config import Generation
from antiphon.models.minicpmo.speech_arena import SpeechArena
from antiphon.models.minicpmo.voice_prompt import VoicePrompt

SILENCE_TOKEN = 4218
"""Stands for what is not said yet after a voice's prompt, and before a turn (REFERENCE 9.1, 9.7)."""

NUM_FLOW_STEPS = 10
"""Euler steps, as the reference's duplex default (REFERENCE 4.7)."""

NOISE_FRAMES = 30_000
"""Length of the noise that all chunks start from (REFERENCE 9.3)."""

LONGEST_CHUNK_FRAMES = 56
"""What a chunk may need of the noise beside the prompt and the retained frames: two frames for each of 28 tokens."""


def draw_noise(num_mel_bins: int, seed: int, device: torch.device) -> Tensor:
    """The engine's flow noise, [M, 30000] float32: the same for a seed on every device, drawn once."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_mel_bins, NOISE_FRAMES, generator=generator).to(device)


class Flow(nn.Module):
    """The weights of `flow.pt`."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.config = config
        self.input_embedding = nn.Embedding(config.vocab_size, config.encoder.hidden_size)
        self.spk_embed_affine_layer = nn.Linear(config.speaker_size, config.num_mel_bins)
        self.encoder = FlowEncoder(config.encoder)
        self.encoder_proj = nn.Linear(config.encoder.hidden_size, config.num_mel_bins)
        self.decoder = _Decoder(config)

    def speaker(self, embedding: Tensor) -> Tensor:
        """embedding: [B, S] floating, of any length -> [B, M]."""
        out: Tensor = self.spk_embed_affine_layer(F.normalize(embedding, dim=-1))
        return out


class _Decoder(nn.Module):
    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.estimator = DiT(config.estimator, config.num_mel_bins)


@dataclass(frozen=True, slots=True, eq=False)
class FlowRow:
    """One session's chunk in a common solve: its codec tokens, and what they are read beside.

    tokens: unless the chunk is a turn's last, the final ones are only looked at and must come again
    """

    tokens: Sequence[int]
    voice: Voice
    speech: SpeechState


class MelSynthesizer:
    """Runs the flow, its weights loaded, with a fixed number of Euler steps and a fixed noise.

    The noise is read from the length of the past on, which stops growing: later chunks of a turn all start from the
    same slice, as in the reference.
    """

    def __init__(self, flow: Flow, noise: Tensor, arena: SpeechArena, generation: Generation) -> None:
        """noise: [M, N] float32, on the flow's device; N frames for prompt, retained frames and chunk together.

        arena: of this flow's sizes, on its device; what sessions say goes there.
        generation: by whose rules the flow is run.
        """
        self.flow = flow
        self.noise = noise
        self.arena = arena
        self.rules = flow_rules(generation, arena.retention)
        self.num_steps = num_steps = arena.shape.num_steps
        times = [1 - math.cos(math.pi / 2 * step / num_steps) for step in range(num_steps + 1)]
        self.widths = [after - before for before, after in zip(times, times[1:], strict=False)]
        self.modulations = flow.decoder.estimator.modulations(torch.tensor(times[:-1], device=noise.device))

    def build_voice(self, prompt: VoicePrompt) -> Voice:
        """Condition the flow on a prompt at once. Raises: as `check_prompt`."""
        self.check_prompt(prompt)
        build = VoiceBuild(self, prompt)
        while not build.is_done:
            build.advance()
        return build.voice

    def speak(self, rows: Sequence[FlowRow], *, is_last: bool) -> list[tuple[Tensor, SpeechState]]:
        """The next mel frames of a turn, for each of several sessions.

        rows: with equally many tokens
        Returns: per row mel [1, T, M] floating, two frames per rendered token, and the state after them, which holds
        places of the arena; after a turn's last chunk it is the state before, for nothing of that is remembered.
        """
        no_condition = self.flow.encoder_proj.weight.new_zeros(1, 1, self.flow.config.num_mel_bins)
        num_tokens = len(rows[0].tokens) - self.flow.config.encoder.lookahead_tokens
        writings = [] if is_last else [self.arena.take(num_tokens) for _ in rows]
        try:
            solve = Solve(self, rows, no_condition, self._sinks(writings), is_last=is_last)
            mel = solve.run()
            for index, writing in enumerate(writings):
                writing.tails.copy_(solve.tails.of(index))
        except BaseException:
            for writing in writings:
                self.arena.give_back(writing)
            raise
        states = [row.speech for row in rows]
        for index, (row, writing) in enumerate(zip(rows, writings, strict=False)):
            states[index] = row.speech.followed_by(writing, row.voice, self.arena.retention, self.rules.kept_tokens)
            self.arena.forget_unread(writing, states[index])
        return [*zip(mel.chunk(len(rows)), states, strict=True)]

    def _sinks(self, writings: Sequence[Writing]) -> Parts[Sink]:
        """The places of all rows, one row after the other."""
        places: Parts[list[int]] = Parts([], [], [])
        for writing in writings:
            places.zip(writing.places, lambda all_rows, own: all_rows.extend(own))
        return self.arena.entries.zip(places, Sink.of)

    def nobody(self, speaker: Tensor) -> Voice:
        """A voice of no frames, to start from. speaker: [1, S] floating, the raw embedding."""
        device, dtype = self.noise.device, self.arena.dtype
        entries = self.arena.shape.entries.map(lambda entry: entry.new(0, dtype, device))
        return Voice(self.flow.speaker(speaker), entries, self.arena.shape.tails(1, device))

    def ahead_of(self, prompt: VoicePrompt) -> Sequence[int]:
        """What stands for the tokens after a prompt while a voice is conditioned; fewer if the prompt is too short."""
        return self.rules.after_prompt(prompt.tokens, [SILENCE_TOKEN] * self.flow.config.encoder.lookahead_tokens)

    def check_prompt(self, prompt: VoicePrompt) -> None:
        """Raises: AudioError if the prompt does not fit this model, or the arena could not hold a turn with it."""
        config = self.flow.config
        max_frames = self.noise.shape[1] - PINNED_FRAMES - LONGEST_CHUNK_FRAMES
        if prompt.mel.shape[0] > max_frames:
            raise AudioError(
                f"the voice has {prompt.mel.shape[0]} mel frames; the flow's noise leaves room for {max_frames}; use a "
                "shorter recording"
            )
        num_ahead, num_wanted = len(self.ahead_of(prompt)), config.encoder.lookahead_tokens
        if num_ahead < num_wanted:
            raise AudioError(f"the voice has {num_ahead} codec tokens, {num_wanted} are needed; use a longer recording")
        num_needed = self.arena.seat_frames(len(prompt.mel))
        if num_needed > self.arena.size.max_frames:
            raise AudioError(
                f"with a voice of {len(prompt.mel)} mel frames a turn remembers {num_needed} of its own; the engine "
                f"has room for {self.arena.size.max_frames}; use a shorter recording or configure longer voices"
            )
        sizes = (prompt.mel.shape[1], prompt.speaker.shape[0])
        if sizes != (config.num_mel_bins, config.speaker_size):
            raise AudioError(
                f"the voice has {sizes[0]} mel bins and a speaker embedding of {sizes[1]}; this model takes "
                f"{config.num_mel_bins} and {config.speaker_size}; prepare it with this model's files"
            )
        if not 0 <= min(prompt.tokens) <= max(prompt.tokens) < config.vocab_size:
            raise AudioError(
                f"the voice has codec tokens from {min(prompt.tokens)} to {max(prompt.tokens)}; this model's go from 0 "
                f"to {config.vocab_size - 1}; prepare it with this model's files"
            )


class Solve:
    """One chunk of each of B sessions on its way through the flow, piece by piece: the encoder, then each Euler step.

    mel:   [B, T, M] floating, once it is done
    tails: of the sessions, in order, once it is done
    """

    def __init__(
        self,
        synthesizer: MelSynthesizer,
        rows: Sequence[FlowRow],
        condition: Tensor,
        sinks: Parts[Sink],
        *,
        is_last: bool,
    ) -> None:
        """condition: [B, T, M] floating, the known mel of these frames; [1, 1, M] zeros where nothing is known."""
        lookahead = synthesizer.flow.config.encoder.lookahead_tokens
        nums_tokens = {len(row.tokens) for row in rows}
        assert len(nums_tokens) == 1, f"chunks of {sorted(nums_tokens)} tokens cannot share a solve"
        assert min(nums_tokens) > (0 if is_last else lookahead), f"{nums_tokens} tokens give no frame; hold them"
        self._synthesizer = synthesizer
        self._rows = rows
        self._condition = condition
        self._is_last = is_last
        self._memories = sinks.zip(self._readings(), lambda sink, reading: Memory(reading, sink))
        self._num_done = 0
        self._features = torch.empty(0)
        before = Tails.joined([row.speech.tails for row in rows])
        self._conv_tails = before.convs.permute(1, 2, 3, 0, 4, 5, 6).flatten(3, 4)  # [S, L, 2, 2 B, C, 2]
        self._new_conv_tails: list[Tensor] = []
        self._encoder_tails = before.lookahead, before.upsampling
        self.mel = torch.empty(0)

    @property
    def is_done(self) -> bool:
        return self._num_done > self._synthesizer.num_steps

    def run(self) -> Tensor:
        """All of it."""
        while not self.is_done:
            self.advance()
        return self.mel

    def advance(self) -> None:
        """The next piece."""
        if self._num_done:
            self._step(self._num_done - 1)
        else:
            self._encode()
        self._num_done += 1

    @property
    def tails(self) -> Tails:
        per_session = torch.stack([torch.stack(step.chunk(len(self._rows), dim=2)) for step in self._new_conv_tails])
        return Tails(*self._encoder_tails, per_session.transpose(0, 1))

    def _readings(self) -> Parts[Reading]:
        rows, entries = self._rows, self._synthesizer.arena.entries
        voices = [row.voice.entries for row in rows]
        reads = [row.speech.reads for row in rows]
        return Parts(
            Reading.of(entries.tokens, [one.tokens for one in voices], [one.tokens for one in reads]),
            Reading.of(entries.frames, [one.frames for one in voices], [one.frames for one in reads]),
            Reading.of(entries.steps, [one.steps for one in voices], [one.steps for one in reads]),
        )

    def _encode(self) -> None:
        """Mel conditions of the tokens, and the noise to start from."""
        flow, noise, memories = self._synthesizer.flow, self._synthesizer.noise, self._memories
        ids = torch.tensor([row.tokens for row in self._rows], device=noise.device)
        hidden, self._encoder_tails = flow.encoder(
            flow.input_embedding(ids), self._encoder_tails, memories.tokens, memories.frames, is_last=self._is_last
        )
        mu = flow.encoder_proj(hidden)
        speaker = torch.cat([row.voice.speaker for row in self._rows])[:, None]
        features = torch.cat([part.expand_as(mu) for part in (mu, speaker, self._condition)], dim=-1)
        # Per session the conditional row, then the unconditional one, which knows nothing.
        self._features = torch.stack((features, torch.zeros_like(features)), dim=1).flatten(0, 1)
        self.mel = torch.stack([self._start(row, num_frames=mu.shape[1]) for row in self._rows])

    def _start(self, row: FlowRow, *, num_frames: int) -> Tensor:
        """[T, M] float32, the noise that a row's chunk starts from."""
        noise, start = self._synthesizer.noise, row.speech.num_past_frames
        end = start + num_frames
        assert end <= noise.shape[1], f"noise of {noise.shape[1]} frames, wanted {start} to {end}"
        return noise.T[start:end]

    def _step(self, step: int) -> None:
        """One Euler step, guided by the difference of the two rows of each session."""
        synthesizer, x = self._synthesizer, self.mel
        stacked = torch.cat((x.to(self._features.dtype).repeat_interleave(2, dim=0), self._features), dim=-1)
        velocity, tails = synthesizer.flow.decoder.estimator(
            stacked, synthesizer.modulations[step], self._memories.steps, step, self._conv_tails[step]
        )
        self._new_conv_tails.append(tails)
        conditional, unconditional = velocity.to(x.dtype)[0::2], velocity.to(x.dtype)[1::2]
        rate = synthesizer.flow.config.cfg_rate
        self.mel = x + synthesizer.widths[step] * ((1 + rate) * conditional - rate * unconditional)


class VoiceBuild:
    """A voice on its way, piece by piece, so that nobody has to wait for all of it. Its mel is of no use."""

    def __init__(self, synthesizer: MelSynthesizer, prompt: VoicePrompt) -> None:
        """prompt: as `MelSynthesizer.check_prompt` found it right."""
        flow, arena = synthesizer.flow, synthesizer.arena
        weight = flow.encoder_proj.weight
        nobody = synthesizer.nobody(prompt.speaker.to(weight)[None])
        num_tokens, num_frames = len(prompt.tokens), len(prompt.mel)
        numbers = Parts(num_tokens, num_frames, num_frames)
        entries = arena.shape.entries.zip(numbers, lambda one, number: one.new(number, arena.dtype, weight.device))
        sinks = entries.zip(numbers, lambda own, number: Sink.of(own, range(number)))
        row = FlowRow((*prompt.tokens, *synthesizer.ahead_of(prompt)), nobody, SpeechState.at_turn_start(nobody))
        self._solve = Solve(synthesizer, [row], prompt.mel.to(weight)[None], sinks, is_last=False)
        self._voice = Voice(nobody.speaker, entries, nobody.tails)

    @property
    def is_done(self) -> bool:
        return self._solve.is_done

    @property
    def voice(self) -> Voice:
        """Once it is done."""
        return self._voice

    @property
    def mel(self) -> Tensor:
        """[1, T, M] floating; what the flow makes of the prompt itself."""
        return self._solve.mel

    def advance(self) -> None:
        self._solve.advance()
        if self.is_done:
            self._voice.tails.copy_(self._solve.tails)
