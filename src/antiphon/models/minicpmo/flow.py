"""Codec tokens to mel frames by flow matching: the network with its official names, and what runs it.

A voice is computed once, step by step, and shared; a session's chunks then read it beside their own past. Chunks of
several sessions are solved together. Formulas of REFERENCE 9.1 and 9.3. Not how a solve goes: `flow_solve.py`, nor the
waveform: `hift.py`. Tests: golden code2wav, tests/models/test_flow.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from antiphon.errors import AudioError
from antiphon.kernels.transfer import upload
from antiphon.models.minicpmo.captured import NumRuns, Recorder
from antiphon.models.minicpmo.dit import DiT
from antiphon.models.minicpmo.estimator import Estimator
from antiphon.models.minicpmo.flow_cache import Parts, SpeechState, Tails, Voice, Writing
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.flow_config import FlowConfig
from antiphon.models.minicpmo.flow_encoder import FlowEncoder
from antiphon.models.minicpmo.flow_graphs import Ends, FlowGraphs, graph_shape
from antiphon.models.minicpmo.flow_inputs import Destination, FlowRow, SolveInputs, SolveNumbers, SolveShape, filled
from antiphon.models.minicpmo.flow_retention import PINNED_FRAMES
from antiphon.models.minicpmo.flow_rules import flow_rules
from antiphon.models.minicpmo.flow_solve import Solve, SolveWeights, euler_times, products_of
from antiphon.models.minicpmo.hift_config import Generation
from antiphon.models.minicpmo.speech_arena import SpeechArena
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.units import MEL_FRAMES_PER_CODEC_TOKEN

SILENCE_TOKEN = 4218
"""Stands for what is not said yet after a voice's prompt, and before a turn (REFERENCE 9.1, 9.7)."""

NUM_FLOW_STEPS = 10
"""Euler steps, as the reference's duplex default (REFERENCE 4.7)."""

NOISE_FRAMES = 30_000
"""Length of the noise that all chunks start from (REFERENCE 9.3)."""

LONGEST_CHUNK_TOKENS = 28
"""What a chunk renders at most: all that a turn's last one is given."""

LONGEST_CHUNK_FRAMES = LONGEST_CHUNK_TOKENS * MEL_FRAMES_PER_CODEC_TOKEN
"""What a chunk may need of the noise beside the prompt and the retained frames."""


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


class MelSynthesizer:
    """Runs the flow, its weights loaded, with a fixed number of Euler steps and a fixed noise.

    The noise is read from the length of the past on, which stops growing: later chunks of a turn all start from the
    same slice, as in the reference.
    """

    def __init__(self, flow: Flow, noise: Tensor, arena: SpeechArena, generation: Generation, compute: Compute) -> None:
        """noise: [M, N] float32, on the flow's device; N frames for prompt, retained frames and chunk together.

        arena: of this flow's sizes, on its device; what sessions say goes there.
        generation: by whose rules the flow is run.
        """
        self.flow = flow
        self.noise = noise
        self.arena = arena
        self.rules = flow_rules(generation, arena.retention)
        self.num_steps = arena.shape.num_steps
        self.num_runs = NumRuns()
        times = euler_times(self.num_steps)
        self.weights = SolveWeights(
            embedding=flow.input_embedding,
            encoder=flow.encoder,
            encoder_proj=flow.encoder_proj,
            estimator=Estimator(flow.decoder.estimator, compute),
            modulations=SolveWeights.modulations_of(flow.decoder.estimator, self.num_steps, noise.device),
            widths=[after - before for before, after in zip(times, times[1:], strict=False)],
            guidance=flow.config.cfg_rate,
            products=products_of(compute),
            noise=noise.T.contiguous(),
        )
        self._graphs = FlowGraphs(self.weights, arena, compute)

    def capture(
        self, nums_rows: Sequence[int], nums_tokens: Sequence[int], voice_frames: int, recorder: Recorder
    ) -> Iterator[int]:
        """Record solves of so many sessions and so many rendered tokens, with voices up to so long.

        Yields after each how many are left.
        """
        frames_per_token = self.flow.config.encoder.frames_per_token
        shapes = [
            graph_shape(num_rows, num_tokens, self.lookahead_tokens, frames_per_token, voice_frames)
            for num_rows in nums_rows
            for num_tokens in nums_tokens
        ]
        yield from self._graphs.capture(shapes, recorder)

    def kind_of(self, row: FlowRow) -> tuple[int, bool]:
        """Rows of one kind are best solved together, as `FlowGraphs.kind_of`."""
        return self._graphs.kind_of(row)

    @property
    def lookahead_tokens(self) -> int:
        return self.flow.config.encoder.lookahead_tokens

    def build_voice(self, prompt: VoicePrompt) -> Voice:
        """Condition the flow on a prompt at once. Raises: as `check_prompt`."""
        self.check_prompt(prompt)
        build = VoiceBuild(self, prompt)
        while not build.is_done:
            build.advance()
        return build.voice

    def speak(self, rows: Sequence[FlowRow]) -> list[tuple[Tensor, SpeechState]]:
        """The next mel frames of a turn, for each of several sessions.

        rows: with chunks of any lengths; the shorter ones cost as much as the longest
        Returns: per row mel [1, T, M] float32, two frames per rendered token, and the state after them, which holds
        places of the arena; after a turn's last chunk it is the state before, for nothing of that is remembered.
        """
        writings: list[Writing | None] = []
        try:
            for row in rows:
                num_rendered = row.num_rendered(self.lookahead_tokens)
                writings.append(None if row.is_last else self.arena.take(num_rendered))
            mel, ends = self._solved(rows, writings)
            self.keep_ends(ends, writings, self.arena.tails)
        except BaseException:
            for writing in writings:
                if writing is not None:
                    self.arena.give_back(writing)
            raise
        return [
            (mel[index : index + 1, : self.arena.shape.frames_of(row.num_rendered(self.lookahead_tokens))], state)
            for index, (row, state) in enumerate(zip(rows, map(self._after, rows, writings), strict=True))
        ]

    def inputs(
        self,
        rows: Sequence[FlowRow],
        writings: Sequence[Writing | None],
        destination: Destination,
        condition: Tensor,
    ) -> SolveInputs:
        """Of a solve of these rows. condition: as in `SolveInputs`."""
        longest = max(row.num_rendered(self.lookahead_tokens) for row in rows)
        assert min(row.num_rendered(self.lookahead_tokens) for row in rows) > 0, "no frame comes of a chunk; hold it"
        lists = [row.speech.reads.map(len) for row in rows]
        shape = SolveShape(
            num_rows=len(rows),
            num_tokens=longest,
            lookahead_tokens=self.lookahead_tokens,
            frames_per_token=self.flow.config.encoder.frames_per_token,
            max_listed=Parts(*(max(numbers) for numbers in zip(*(own.all for own in lists), strict=True))),
        )
        host = filled(shape, rows, writings, self.arena, destination)
        tails = [row.speech.tails for row in rows]
        return SolveInputs(
            shape=shape,
            numbers=SolveNumbers.cut(upload(host.flat, self.noise.device), shape),
            speakers=torch.cat([row.voice.speaker for row in rows]),
            lookahead=torch.cat([own.lookahead for own in tails]),
            upsampling=torch.cat([own.upsampling for own in tails]),
            condition=condition,
            positions=self.flow.encoder.positions(shape.max_listed.tokens, shape.max_listed.frames, shape.num_tokens),
            destination=destination,
            voices=tuple(row.voice for row in rows),
            befores=tuple(own.convs[0] for own in tails),
        )

    def keep_ends(self, ends: Ends, writings: Sequence[Writing | None], tails: Tails) -> None:
        """Store the encoder's tails of what is remembered. ends: as of a `Solve`. tails: where the writings go."""
        kept = [(row, one.tail_place) for row, one in enumerate(writings) if one is not None]
        if kept:
            rows, places = upload(torch.tensor(kept).T.contiguous(), self.noise.device)
            for end, stored in zip(ends, (tails.lookahead, tails.upsampling), strict=True):
                stored.index_copy_(0, places, end[rows])

    def _after(self, row: FlowRow, writing: Writing | None) -> SpeechState:
        """A row's state after its chunk was written, or its state before if nothing was."""
        if writing is None:
            return row.speech
        after = row.speech.followed_by(writing, row.voice, self.arena.retention, self.rules.kept_tokens)
        self.arena.forget_unread(writing, after)
        return after

    def _solved(self, rows: Sequence[FlowRow], writings: Sequence[Writing | None]) -> tuple[Tensor, Ends]:
        """Mel [B, T, M] and the encoder's tails."""
        for row in rows:
            end = row.speech.num_past_frames + self.arena.shape.frames_of(row.num_rendered(self.lookahead_tokens))
            assert end <= self.noise.shape[1], f"noise of {self.noise.shape[1]} frames, wanted up to {end}"
        replayed = self._graphs.run(rows, writings)
        if replayed is not None:
            self.num_runs = self.num_runs.one_more(is_replayed=True)
            return replayed
        unknown = self.noise.new_zeros(1, 1, self.flow.config.num_mel_bins)
        inputs = self.inputs(rows, writings, Destination(self.arena.entries, self.arena.tails), unknown)
        solve = Solve(self.weights, self.arena, inputs)
        mel = solve.run(nullcontext())
        self.num_runs = self.num_runs.one_more(is_replayed=False)
        return mel, solve.ends

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
        start = SpeechState.at_turn_start(nobody)
        row = FlowRow((*prompt.tokens, *synthesizer.ahead_of(prompt)), nobody, start, is_last=False)
        tails = arena.shape.tails(1, weight.device)
        everything = Writing(numbers.map(lambda number: tuple(range(number))), 0, tails)
        inputs = synthesizer.inputs([row], [everything], Destination(entries, tails), prompt.mel.to(weight)[None])
        self._synthesizer = synthesizer
        self._everything = everything
        self._solve = Solve(synthesizer.weights, arena, inputs)
        self._voice = Voice(nobody.speaker, entries, tails)

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
            self._synthesizer.keep_ends(self._solve.ends, [self._everything], self._voice.tails)
