"""Whole solves of the flow as CUDA graphs, encoder and all Euler steps: one for each number of sessions and length.

A chunk is filled up to a length of the grid, and a batch up to a number of sessions. What fits none, or reads more than
there is room for, is solved launch by launch with the same code. Shown on a GPU by tests/test_cuda_vocoder.py,
elsewhere by tests/kernels/test_solves_by_kernels.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from antiphon.kernels.transfer import upload
from antiphon.models.minicpmo.captured import Recorder, smallest, tensor_core_products
from antiphon.models.minicpmo.flow_cache import Parts, Writing
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.flow_inputs import (
    Destination,
    FlowRow,
    SolveInputs,
    SolveNumbers,
    SolveShape,
    filled,
)
from antiphon.models.minicpmo.flow_retention import PINNED_FRAMES, PINNED_TOKENS
from antiphon.models.minicpmo.flow_solve import Solve, SolveWeights
from antiphon.models.minicpmo.speech_arena import SpeechArena

Ends = tuple[Tensor, Tensor]
"""As `Solve.ends`."""


def graph_shape(
    num_rows: int, num_tokens: int, lookahead_tokens: int, frames_per_token: int, voice_frames: int
) -> SolveShape:
    """Of solves with voices up to so long, whose lists are never longer (`flow_membership.py`)."""
    num_frames = max(voice_frames, PINNED_FRAMES) + PINNED_FRAMES
    max_tokens = -(-voice_frames // frames_per_token) + PINNED_TOKENS
    listed = Parts(max_tokens, num_frames, num_frames)
    return SolveShape(num_rows, num_tokens, lookahead_tokens, frames_per_token, listed)


class FlowGraphs:
    """Owns the recorded solves of one flow and arena."""

    def __init__(self, weights: SolveWeights, arena: SpeechArena, compute: Compute) -> None:
        self._weights = weights
        self._arena = arena
        self._compute = compute
        self._captured: dict[tuple[int, ...], _CapturedSolve] = {}

    def capture(self, shapes: Sequence[SolveShape], recorder: Recorder) -> Iterator[int]:
        """One solve per step; yields how many are left."""
        # The largest first: what it needs is then room for the others.
        by_size = sorted(shapes, key=lambda shape: (shape.num_rows, shape.num_tokens), reverse=True)
        for index, shape in enumerate(by_size):
            one = _CapturedSolve(self._weights, self._arena, shape, self._compute, recorder)
            self._captured[shape.num_rows, shape.num_tokens] = one
            yield len(by_size) - index - 1

    def kind_of(self, row: FlowRow) -> tuple[int, bool]:
        """How many tokens are rendered for a row's sake, and whether there is a recording that it may fit.

        Rows of one kind are solved together at no cost; one of another kind would keep all from being replayed.
        """
        num_tokens = row.num_rendered(self._weights.encoder.config.lookahead_tokens)
        fitting = [
            size for (_, size), captured in self._captured.items() if size >= num_tokens and captured.holds([row])
        ]
        return min(fitting, default=num_tokens), bool(fitting)

    def run(self, rows: Sequence[FlowRow], writings: Sequence[Writing | None]) -> tuple[Tensor, Ends] | None:
        """Mel [B, T, M], and the encoder's tails, which the next run overwrites; None if no graph holds the rows."""
        kinds = [self.kind_of(row) for row in rows]
        num_tokens = max(num_tokens for num_tokens, _ in kinds)
        captured = smallest(self._captured, len(rows), num_tokens)
        if captured is None or not all(fits for _, fits in kinds):
            return None
        return captured.run(rows, writings)


class _CapturedSolve:
    """One shape's graph, with the tensors that it reads."""

    def __init__(
        self, weights: SolveWeights, arena: SpeechArena, shape: SolveShape, compute: Compute, recorder: Recorder
    ) -> None:
        device, num_mel_bins = weights.noise.device, weights.noise.shape[1]
        self._shape = shape
        self._arena = arena
        tails = arena.shape.tails(shape.num_rows, device)
        self._inputs = inputs = SolveInputs(
            shape=shape,
            # Of nothing: the launches are the same, and nothing is read or written.
            numbers=SolveNumbers.cut(SolveNumbers.on_host(shape).flat.to(device), shape),
            speakers=torch.zeros(shape.num_rows, num_mel_bins, device=device),
            lookahead=tails.lookahead,
            upsampling=tails.upsampling,
            condition=torch.zeros(1, 1, num_mel_bins, device=device),
            positions=weights.encoder.positions(shape.max_listed.tokens, shape.max_listed.frames, shape.num_tokens),
            destination=Destination(arena.entries, arena.tails),
            voices=(),
            befores=(),
        )

        def run() -> tuple[Tensor, Ends]:
            solve = Solve(weights, arena, inputs)
            return solve.run(tensor_core_products(compute)), solve.ends

        self._replay = recorder.record(run)

    def holds(self, rows: Sequence[FlowRow]) -> bool:
        limits = self._shape.max_listed.all
        return all(
            len(reads) <= limit for row in rows for reads, limit in zip(row.speech.reads.all, limits, strict=True)
        )

    def run(self, rows: Sequence[FlowRow], writings: Sequence[Writing | None]) -> tuple[Tensor, Ends]:
        """rows: as many as there are in the shape, or fewer; the others are of nothing."""
        inputs, own = self._inputs, slice(len(rows))
        host = filled(self._shape, rows, writings, self._arena, inputs.destination)
        inputs.numbers.flat.copy_(upload(host.flat, inputs.numbers.flat.device))
        torch.cat([row.voice.speaker for row in rows], out=inputs.speakers[own])
        torch.cat([row.speech.tails.lookahead for row in rows], out=inputs.lookahead[own])
        torch.cat([row.speech.tails.upsampling for row in rows], out=inputs.upsampling[own])
        mel, ends = self._replay()
        return mel[own].clone(), ends
