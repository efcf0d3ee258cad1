"""Steps of ragged sessions for `vocoder_attention`, and its kernel as a process with Triton's interpreter runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.kernels.vocoder_attention.contract import Entries, Products, Reading
from kernels.formulas import EPS
from kernels.runners import Runner

NUM_LAYERS = 3
NUM_PLACES = 90
RNG = torch.Generator()


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """What the operator is given. lists: per session what it reads. lengths: of the sessions' chunks."""

    q: Tensor
    k: Tensor
    v: Tensor
    arena: Entries
    voices: tuple[Entries, ...]
    lists: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    by_distance: Tensor | None
    scale: float

    def reading(self, device: torch.device) -> Reading:
        voices = [on(voice, device) for voice in self.voices]
        return Reading.of(on(self.arena, device), voices, self.lists, self.lengths)

    def expected(self, layer: int) -> Tensor:
        """In float64, by the formula, one entry after the other; NaN for queries that are padding."""
        out = torch.full(self.q.shape, torch.nan, dtype=torch.float64)
        G = self.arena.keys.shape[2]
        for batch in range(len(self.q)):
            row, guidance = divmod(batch, G)
            length, listed = self.lengths[row], self.lists[row]
            seen = [(self.arena, entry) if entry >= 0 else (self.voices[row], -1 - entry) for entry in listed]
            keys = [owner.keys[layer, entry, guidance] for owner, entry in seen] + [*self.k[batch, :length]]
            values = [owner.values[layer, entry, guidance] for owner, entry in seen] + [*self.v[batch, :length]]
            for query in range(length):
                scores = torch.einsum("hd,khd->hk", self.q[batch, query].double(), torch.stack(keys).double())
                if self.by_distance is not None:
                    distances = len(listed) + query - torch.arange(len(keys))
                    num_queries, num_columns = self.by_distance.shape[2:]
                    scores += self.by_distance[:, row, query, num_columns - num_queries - distances].double()
                weights = (scores * self.scale).softmax(dim=-1)
                out[batch, query] = torch.einsum("hk,khd->hd", weights, torch.stack(values).double())
        return out

    def tolerance(self) -> float:
        """Scores are sums of D products, results of K weighted values, all of them below 5 in size.

        In bfloat16 the weights and the result are rounded, each to half a step of values below 5.
        """
        longest = max(map(len, self.lists)) + self.k.shape[1]
        rounding = 0.0 if self.q.dtype == torch.float32 else 5 * torch.finfo(self.q.dtype).eps
        return EPS * 5 * (self.q.shape[3] + longest) + rounding


def on(entries: Entries, device: torch.device) -> Entries:
    return Entries(entries.keys.to(device), entries.values.to(device))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RNG)


def entries(num: int, heads: tuple[int, int, int], dtype: torch.dtype) -> Entries:
    keys, values = (random(NUM_LAYERS, num, *heads).to(dtype) for _ in range(2))
    return Entries(keys, values)


def case(
    nums: Sequence[tuple[int, int]],
    lengths: Sequence[int],
    *,
    heads: tuple[int, int, int] = (2, 2, 4),
    has_distance: bool = False,
    kept_in: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """nums: per session how many entries it reads of its voice and of its own, mixed up. heads: G, H, D."""
    RNG.manual_seed(sum(voice + 7 * own for voice, own in nums) + sum(lengths))
    G, H, D = heads
    arena = entries(NUM_PLACES, heads, kept_in)
    voices = tuple(entries(voice + 3, heads, kept_in) for voice, _ in nums)
    lists = []
    for voice, own in nums:
        listed = torch.cat((torch.randperm(NUM_PLACES, generator=RNG)[:own], -1 - torch.arange(voice)))
        lists.append(tuple(listed[torch.randperm(len(listed), generator=RNG)].tolist()))
    num_new = max(lengths)
    qkv = random(len(nums) * G, num_new, 3, H, D).to(dtype)
    for row, length in enumerate(lengths):
        # What is padding must not be heard.
        qkv[row * G : (row + 1) * G, length:] = torch.nan
    num_distances = max(map(len, lists)) + 2 * num_new - 1
    by_distance = random(H, len(nums), num_new, num_distances).to(dtype) if has_distance else None
    q, k, v = qkv.unbind(2)
    return Case(q, k, v, arena, voices, tuple(lists), tuple(lengths), by_distance, 1 / math.sqrt(D))


CASES = {
    "nothing but the chunk": case([(0, 0)], [1]),
    "a voice alone": case([(5, 0)], [3]),
    "one entry": case([(0, 1)], [1]),
    "ragged pasts": case([(33, 40), (0, 0), (1, 64), (70, 31)], [50] * 4),
    "ragged chunks": case([(33, 40), (5, 0), (1, 64)], [50, 3, 17]),
    "more queries than a block": case([(3, 4)], [70]),
    "distances": case([(9, 20), (40, 1), (0, 0)], [17, 4, 17], heads=(1, 3, 8), has_distance=True),
    "released heads": case([(64, 33), (2, 90)], [9, 9], heads=(2, 2, 64)),
    "wide heads": case([(20, 13)], [5], heads=(2, 1, 128)),
    "bfloat16 entries": case([(33, 40), (12, 3)], [20, 20], kept_in=torch.bfloat16),
    "bfloat16": case([(33, 40), (12, 3)], [20, 18], kept_in=torch.bfloat16, dtype=torch.bfloat16),
}


def run_kernel(name: str, layer: int, runner: Runner, products: Products) -> Tensor:
    """For the interpreter, to be called where TRITON_INTERPRET was set before anything imported Triton."""
    from antiphon.kernels.vocoder_attention import kernel

    asked, device = CASES[name], runner.device
    q, k, v = (one.to(device) for one in (asked.q, asked.k, asked.v))
    by_distance = None if asked.by_distance is None else asked.by_distance.to(device)
    reading = asked.reading(device)
    return kernel.vocoder_attention(q, k, v, reading, layer, by_distance, asked.scale, products).cpu()


def interpreted(name: str, layer: int) -> object:
    """The same as an array, for the way back from a process: tensors would need shared memory."""
    return run_kernel(name, layer, Runner.INTERPRETER, Products.FLOAT32).float().numpy()
