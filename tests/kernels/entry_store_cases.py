"""Chunks for `entry_store`, and its kernel as a process with Triton's interpreter runs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels.entry_store.contract import HeadNorms
from antiphon.kernels.vocoder_attention.contract import Entries, Sink
from kernels.formulas import EPS
from kernels.runners import Runner

NUM_LAYERS = 2
LAYER = 1
NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """places: session after session."""

    qkv: Tensor
    vectors: Tensor
    entries: Entries
    places: tuple[int, ...]

    def norms(self, device: torch.device) -> HeadNorms:
        return HeadNorms(NORM_EPS, *self.vectors.to(device))

    def expected(self, *, is_normed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """qkv, keys and values afterwards, in float64, head by head."""
        qkv, keys, values = self.qkv.double(), self.entries.keys.double(), self.entries.values.double()
        vectors = self.vectors.double()
        if is_normed:
            for part in (0, 1):
                own = qkv[:, :, part]
                spread = own.var(-1, keepdim=True, correction=0) + NORM_EPS
                qkv[:, :, part] = (own - own.mean(-1, keepdim=True)) / spread.sqrt() * vectors[2 * part]
                qkv[:, :, part] += vectors[2 * part + 1]
        G, T = keys.shape[2], qkv.shape[1]
        for index, place in enumerate(self.places):
            if place >= 0:
                row, t = divmod(index, T)
                keys[LAYER, place] = qkv[row * G : (row + 1) * G, t, 1]
                values[LAYER, place] = qkv[row * G : (row + 1) * G, t, 2]
        return qkv, keys, values

    def tolerance(self) -> float:
        """Means of D values below 5 in size; in bfloat16 the result is rounded."""
        rounded = {self.qkv.dtype, self.entries.keys.dtype} - {torch.float32}
        return 5 * (EPS * (20 + self.qkv.shape[-1]) + sum(torch.finfo(dtype).eps for dtype in rounded))


def case(
    places: tuple[int, ...],
    num_rows: int,
    heads: tuple[int, int, int],
    *,
    dtype: torch.dtype = torch.float32,
    kept_in: torch.dtype = torch.float32,
) -> Case:
    """heads: G, H, D."""
    rng = torch.Generator().manual_seed(len(places) + sum(heads))
    G, H, D = heads
    qkv = torch.randn(num_rows * G, len(places) // num_rows, 3, H, D, generator=rng).to(dtype)
    shape = (NUM_LAYERS, 2 + max(places), G, H, D)
    keys, values = (torch.randn(shape, generator=rng).to(kept_in) for _ in range(2))
    return Case(qkv, torch.randn(4, D, generator=rng), Entries(keys, values), places)


CASES = {
    "one": case((0,), 1, (1, 1, 4)),
    "two sessions": case((7, 2, 9, 0), 2, (2, 3, 4)),
    "some are not kept": case((-1, 2, -1, -1, 5, 0), 3, (2, 2, 8)),
    "none is kept": case((-1, -1), 2, (1, 2, 4)),
    "released heads": case((4, 1, 3), 1, (2, 8, 64)),
    "bfloat16 entries": case((4, 1, 3), 1, (2, 2, 12), kept_in=torch.bfloat16),
    "bfloat16": case((4, 1, 3), 1, (2, 2, 12), dtype=torch.bfloat16, kept_in=torch.bfloat16),
}


def run_kernel(name: str, is_normed: bool, runner: Runner) -> tuple[Tensor, Tensor, Tensor]:  # noqa: FBT001 - goes through a pipe
    """qkv, keys and values. The interpreter wants TRITON_INTERPRET set before anything imported Triton."""
    from antiphon.kernels.entry_store import kernel

    asked, device = CASES[name], runner.device
    entries = Entries(*(one.to(device, copy=True) for one in (asked.entries.keys, asked.entries.values)))
    qkv, sink = asked.qkv.to(device, copy=True), Sink.of(entries, asked.places)
    if is_normed:
        kernel.norm_and_store(qkv, asked.norms(device), LAYER, sink)
    else:
        kernel.store(qkv, LAYER, sink)
    return qkv.cpu(), entries.keys.cpu(), entries.values.cpu()


def interpreted(name: str, is_normed: bool) -> list[object]:  # noqa: FBT001 - as above
    """The same as arrays, for the way back from a process: tensors would need shared memory."""
    return [one.float().numpy() for one in run_kernel(name, is_normed, Runner.INTERPRETER)]
