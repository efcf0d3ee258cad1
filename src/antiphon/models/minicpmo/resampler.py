"""Turns the tower's patches into the fixed number of embeddings that the thinker reads per item.

One cross-attention from learned queries to all patches of an item, whose keys carry a 2-D sine-cosine position. Not
the tower (`vision.py`). Parameter names are the checkpoint's under `resampler.` (REFERENCE 2.3, 7.3). The positions are
in no checkpoint and in no buffer: one short table along an axis serves the rows and the columns of every grid, so it
is computed for each batch and nothing is kept. Tests: `tests/golden_kinds/vision.py`, `tests/models/test_vision.py`.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from antiphon.kernels.attention.op import attention
from antiphon.models.minicpmo.config import VisionConfig
from antiphon.models.minicpmo.each_row import each_row

_HEAD_DIM = 128
_LAYER_NORM_EPS = 1e-6
_MAX_PERIOD = 10_000.0


class Resampler(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.output_size
        self.query = nn.Parameter(torch.empty(config.query_num, width))
        self.kv_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.attn = _CrossAttention(width)
        self.ln_q = nn.LayerNorm(width, eps=_LAYER_NORM_EPS)
        self.ln_kv = nn.LayerNorm(width, eps=_LAYER_NORM_EPS)
        self.ln_post = nn.LayerNorm(width, eps=_LAYER_NORM_EPS)
        self.proj = nn.Parameter(torch.empty(width, width))

    def forward(self, patches: Tensor, positions: Tensor, hidden: Tensor | None) -> Tensor:
        """Condense every item to `query_num` embeddings.

        patches: [B, L, H] model dtype, the tower's output; positions: [B, L, E] model dtype (`grid_positions`)
        hidden: as in `PatchBatch`
        returns: [B, Q, E] model dtype; E = width of the thinker
        """
        values = self.ln_kv(each_row(self.kv_proj, patches))
        seen: Tensor = self.attn(self.ln_q(self.query), values + positions, values, hidden)
        condensed: Tensor = self.ln_post(seen)
        return each_row(lambda row: row @ self.proj, condensed)


class _CrossAttention(nn.Module):
    """Multi-head attention of the same queries over every item; the three input projections are one matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
        """queries: [Q, E]; keys, values: [B, L, E]; returns: [B, Q, E]; all model dtype."""
        weights, offsets = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k, v = (
            each_row(partial(F.linear, weight=weight, bias=offset), x).view(*x.shape[:2], -1, _HEAD_DIM).transpose(1, 2)
            for x, weight, offset in zip((queries[None], keys, values), weights, offsets, strict=True)
        )
        q = q.expand(len(k), -1, -1, -1)
        seen = attention(q, k, v, bias=hidden, scale=_HEAD_DIM**-0.5)
        return each_row(self.out_proj, seen.transpose(1, 2).flatten(2))


def grid_positions(rows: Tensor, columns: Tensor, *, num_steps: int, width: int, dtype: torch.dtype) -> Tensor:
    """Encode where each patch lies: the first half of the width says its column, the last half its row (REFERENCE 7.3).

    rows, columns: [B, L] int64, below num_steps; num_steps: the longest side of any grid, in patches
    returns: [B, L, width] dtype, on the device of `rows`
    """
    axis = _sine_cosine(num_steps, width // 2, rows.device).to(dtype)
    return torch.cat((axis[columns], axis[rows]), dim=-1)


def _sine_cosine(num_steps: int, width: int, device: torch.device) -> Tensor:
    """returns: [num_steps, width] float32; sines of the step at falling frequencies, then their cosines."""
    exponents = torch.arange(width // 2, dtype=torch.float32, device=device) / (width // 2)
    steps = torch.arange(num_steps, dtype=torch.float32, device=device)
    angles = torch.outer(steps, _MAX_PERIOD**-exponents)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)
