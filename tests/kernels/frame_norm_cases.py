"""Frames of ragged sessions for `frame_norm`, and its kernel as a process with Triton's interpreter runs it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from antiphon.kernels.frame_norm.contract import ConvTails, Update, tail_source
from kernels.formulas import EPS
from kernels.runners import Runner

NUM_CONVS = 3
INDEX = 1
MODULATED_EPS = 1e-6
AFFINE_EPS = 1e-5


class Form(Enum):
    """The operators of the folder, and whether something is added first."""

    PLAIN = "plain"
    UPDATED = "updated"
    WINDOWS = "windows"
    UPDATED_WINDOWS = "updated windows"
    MISH = "mish"

    @property
    def has_windows(self) -> bool:
        return self not in (Form.PLAIN, Form.UPDATED)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """lengths: of the sessions' chunks. places: where in the arena of tails each one's old and new ones are.

    A session whose old ones are at -1 has them elsewhere, as at a turn's start; new ones at -1 go nowhere.
    """

    x: Tensor
    y: Tensor
    vectors: Tensor
    arena: Tensor
    voices: Tensor
    lengths: tuple[int, ...]
    places: tuple[tuple[int, int], ...]

    def tails(self, arena: Tensor, voices: Tensor) -> ConvTails:
        """arena, voices: on one device."""

        def numbers(values: list[int]) -> Tensor:
            return torch.tensor(values, device=arena.device)

        befores = [arena[old] if old >= 0 else voices[row] for row, (old, _) in enumerate(self.places)]
        return ConvTails(
            arena,
            tuple(before.clone() for before in befores),
            numbers([tail_source(arena, before) for before in befores]),
            numbers([new for _, new in self.places]),
            numbers([*self.lengths]),
        )

    def expected(self, form: Form) -> tuple[Tensor, Tensor, Tensor]:
        """x, the result and the arena afterwards, in float64, frame by frame; NaN where there is padding."""
        x, arena = self.x.double(), self.arena.double()
        gate, shift, scale, weight, bias = self.vectors.double()
        if form in (Form.UPDATED, Form.UPDATED_WINDOWS):
            x = x + gate * self.y.double()
        if form is Form.MISH:
            y = self.y.double()
            normed = (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, correction=0) + AFFINE_EPS).sqrt()
            normed = normed * weight + bias
            h = normed * (1 + normed.exp()).log().tanh()
        else:
            centred = x - x.mean(-1, keepdim=True)
            h = centred / (x.var(-1, keepdim=True, correction=0) + MODULATED_EPS).sqrt() * (1 + scale) + shift
        G = self.arena.shape[2]
        for row, length in enumerate(self.lengths):
            h[row * G : (row + 1) * G, length:] = torch.nan
        if not form.has_windows:
            return x, h, arena
        windows = torch.full((*h.shape[:2], 3, h.shape[2]), torch.nan, dtype=torch.float64)
        for batch in range(len(h)):
            row, guidance = divmod(batch, G)
            old, new = self.places[row]
            before = self.arena[old] if old >= 0 else self.voices[row]
            seen = [*before[INDEX, guidance].double(), *h[batch, : self.lengths[row]]]
            for frame in range(self.lengths[row]):
                windows[batch, frame] = torch.stack(seen[frame : frame + 3])
            if new >= 0:
                arena[new, INDEX, guidance] = torch.stack(seen[-2:])
        return x, windows.flatten(2), arena

    def tolerance(self) -> float:
        """Sums of C values, mean and spread, each below 10 in size; bfloat16 results are rounded once more."""
        rounding = 0.0 if self.y.dtype == torch.float32 else 10 * torch.finfo(self.y.dtype).eps
        return 10 * EPS * (20 + self.x.shape[2]) + rounding


def case(
    lengths: tuple[int, ...],
    places: tuple[tuple[int, int], ...],
    *,
    G: int = 2,
    C: int = 6,
    dtype: torch.dtype = torch.float32,
) -> Case:
    rng = torch.Generator().manual_seed(sum(lengths) + C)
    B, T = len(lengths) * G, max(lengths)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    num_places = 1 + max(max(pair) for pair in places)
    arena, voices = random(num_places, NUM_CONVS, G, 2, C), random(len(lengths), NUM_CONVS, G, 2, C)
    return Case(3 * random(B, T, C), random(B, T, C).to(dtype), random(5, C), arena, voices, lengths, places)


CASES = {
    "one frame": case((1,), ((-1, 0),)),
    "two frames": case((2,), ((0, 1),)),
    "ragged": case((5, 2, 1, 7), ((-1, 3), (0, 4), (1, 5), (2, 6))),
    "some are over": case((3, 4, 2), ((0, -1), (1, 2), (-1, -1))),
    "no guidance, wide": case((9, 9), ((1, 0), (-1, 2)), G=1, C=512),
    "bfloat16": case((6, 4), ((0, 1), (-1, 2)), C=48, dtype=torch.bfloat16),
}


def run_kernel(name: str, form: Form, runner: Runner) -> tuple[Tensor, Tensor, Tensor]:
    """x, the result and the arena. The interpreter wants TRITON_INTERPRET set before anything imported Triton."""
    from antiphon.kernels.frame_norm import kernel

    asked, device = CASES[name], runner.device
    x, y, vectors, arena, voices = (
        one.to(device, copy=True) for one in (asked.x, asked.y, asked.vectors, asked.arena, asked.voices)
    )
    tails = asked.tails(arena, voices)
    gate, shift, scale, weight, bias = vectors
    update = Update(y, gate) if form in (Form.UPDATED, Form.UPDATED_WINDOWS) else None
    if form is Form.MISH:
        out = kernel.mish_windows(y, weight, bias, tails, INDEX, eps=AFFINE_EPS)
    elif form.has_windows:
        out = kernel.modulated_windows(x, update, shift, scale, tails, INDEX, eps=MODULATED_EPS, dtype=y.dtype)
    else:
        out = kernel.modulated(x, update, shift, scale, eps=MODULATED_EPS, dtype=y.dtype)
    return x.cpu(), out.cpu(), arena.cpu()


def interpreted(name: str, form: Form) -> list[object]:
    """The same as arrays, for the way back from a process: tensors would need shared memory."""
    return [one.float().numpy() for one in run_kernel(name, form, Runner.INTERPRETER)]
