"""Steps of ragged sessions for `vocoder_attention`, and its kernel as a process with Triton's interpreter runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from antiphon.kernels.vocoder_attention.contract import Entries, Reading
from kernels.formulas import EPS

NUM_LAYERS = 3
NUM_PLACES = 90
RNG = torch.Generator()


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """voices: lengths. lists: per session what it reads."""

    q: Tensor
    k: Tensor
    v: Tensor
    reading: Reading
    bias: Tensor | None
    scale: float

    def expected(self, layer: int) -> Tensor:
        """In float64, by the formula, one entry after the other."""
        outs = []
        G = self.reading.arena.keys.shape[2]
        for batch in range(len(self.q)):
            row, guidance = divmod(batch, G)
            arena, voice = self.reading.arena, self.reading.voices[row]
            listed = self.reading.listed[row, : self.reading.counts[row]].tolist()
            seen = [(arena, entry) if entry >= 0 else (voice, -1 - entry) for entry in listed]
            keys = [owner.keys[layer, entry, guidance] for owner, entry in seen] + [*self.k[batch].transpose(0, 1)]
            values = [owner.values[layer, entry, guidance] for owner, entry in seen] + [*self.v[batch].transpose(0, 1)]
            scores = torch.einsum("htd,khd->htk", self.q[batch].double(), torch.stack(keys).double()) * self.scale
            if self.bias is not None:
                scores += self.bias[row, :, :, : scores.shape[2]].double()
            outs.append(torch.einsum("htk,khd->htd", scores.softmax(dim=-1), torch.stack(values).double()))
        return torch.stack(outs)

    def tolerance(self) -> float:
        """Scores are sums of D products, results of K weighted values, all of them below 5 in size."""
        longest = max(self.reading.counts) + self.k.shape[2]
        return EPS * 5 * (self.q.shape[3] + longest)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RNG)


def entries(num: int, heads: tuple[int, int, int], dtype: torch.dtype) -> Entries:
    keys, values = (random(NUM_LAYERS, num, *heads).to(dtype) for _ in range(2))
    return Entries(keys, values)


def case(
    nums: Sequence[tuple[int, int]],
    num_new: int,
    *,
    heads: tuple[int, int, int] = (2, 2, 4),
    has_bias: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """nums: per session how many entries it reads of its voice and of its own, mixed up. heads: G, H, D."""
    RNG.manual_seed(sum(voice + 7 * own for voice, own in nums) + num_new)
    G, H, D = heads
    arena = entries(NUM_PLACES, heads, dtype)
    voices = [entries(voice + 3, heads, dtype) for voice, _ in nums]
    lists = []
    for voice, own in nums:
        listed = torch.cat((torch.randperm(NUM_PLACES, generator=RNG)[:own], -1 - torch.arange(voice)))
        lists.append(listed[torch.randperm(len(listed), generator=RNG)].tolist())
    reading = Reading.of(arena, voices, lists)
    q, k, v = (random(len(nums) * G, num_new, H, D).transpose(1, 2) for _ in range(3))
    bias = random(len(nums), H, num_new, reading.listed.shape[1] + num_new) if has_bias else None
    return Case(q, k, v, reading, bias, 1 / math.sqrt(D))


CASES = {
    "nothing but the chunk": case([(0, 0)], 1),
    "a voice alone": case([(5, 0)], 3),
    "one entry": case([(0, 1)], 1),
    "ragged": case([(33, 40), (0, 0), (1, 64), (70, 31)], 50),
    "more queries than a block": case([(3, 4)], 70),
    "bias": case([(9, 20), (40, 1), (0, 0)], 17, heads=(1, 3, 8), has_bias=True),
    "released heads": case([(64, 33), (2, 90)], 9, heads=(2, 2, 64)),
    "wide heads": case([(20, 13)], 5, heads=(2, 1, 128)),
    "bfloat16 entries": case([(33, 40), (12, 3)], 20, dtype=torch.bfloat16),
}


def run_kernel(name: str, layer: int) -> np.ndarray:
    """To be called where TRITON_INTERPRET was set before anything imported Triton."""
    from antiphon.kernels.vocoder_attention import kernel

    asked = CASES[name]
    out = kernel.vocoder_attention(asked.q, asked.k, asked.v, asked.reading, layer, asked.bias, asked.scale)
    result: np.ndarray = out.numpy()
    return result
