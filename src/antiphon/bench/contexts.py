"""Contexts that are full without having been computed: real blocks, real tables, any numbers in the cache.

For measurements of what a full context costs, which does not depend on what is in it.
"""

from __future__ import annotations

import torch

from antiphon.core.blocks import BlockPool
from antiphon.core.context import Context
from antiphon.core.window import SlideMode
from antiphon.kernels.kv_cache import KVCache

PROMPT_TOKENS = 150
"""About what instructions with a short voice take."""
UNIT_TOKENS = 20
"""About what a unit takes that speaks for a half of the time."""


def fill(context: Context, num_tokens: int) -> None:
    """Append a prompt and units to an empty context, so many tokens together."""
    num_prompt_tokens = min(PROMPT_TOKENS, num_tokens // 2)
    context.append_prompt(num_prompt_tokens)
    grow(context, num_tokens - num_prompt_tokens)


def grow(context: Context, num_tokens: int) -> None:
    """Append closed units."""
    for start in range(0, num_tokens, UNIT_TOKENS):
        context.append(min(UNIT_TOKENS, num_tokens - start))
        context.close_unit(start // UNIT_TOKENS, ())


def filled_context(pool: BlockPool, num_tokens: int, max_tokens: int) -> Context:
    context = Context(pool, SlideMode.ROTATE_QUERY, max_tokens)
    fill(context, num_tokens)
    return context


def fill_randomly(cache: KVCache) -> None:
    """Normal numbers into all slots, also of blocks that nobody holds; scales stay 1."""
    for layer in cache.layers():
        for stored in (layer.keys, layer.values):
            # Not all numbers can be drawn in float8.
            stored.copy_(torch.randn(stored.shape, device=stored.device, dtype=torch.bfloat16))
