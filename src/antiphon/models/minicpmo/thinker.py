"""The thinker's networks under `llm.*`: token table, decoder, output head. Encoders live in their own files."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from antiphon.kernels.kv_cache import KVCache, StepLayout
from antiphon.kernels.transfer import upload
from antiphon.models.minicpmo.config import ThinkerConfig
from antiphon.models.minicpmo.decoder import Decoder


class TokenDecoder(Decoder):
    """A decoder with the token table beside its layers, as the checkpoint names it."""

    def __init__(self, config: ThinkerConfig) -> None:
        super().__init__(config.decoder)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.decoder.hidden_size)


class ThinkerNetwork(nn.Module):
    """`llm.*` of the checkpoint."""

    def __init__(self, config: ThinkerConfig) -> None:
        super().__init__()
        self.config = config
        self.model = TokenDecoder(config)
        self.lm_head = nn.Linear(config.decoder.hidden_size, config.vocab_size, bias=False)

    def prepare(self) -> None:
        """Bring loaded weights into the form that runs; once. Their names are the checkpoint's no more."""
        self.model.merge_projections()

    def embed_ids(self, ids: tuple[int, ...]) -> Tensor:
        """ids: n token ids, n = 0 allowed. Returns [n, hidden]."""
        return self.embed(upload(torch.tensor(ids, dtype=torch.int64), self.lm_head.weight.device))

    def embed(self, ids: Tensor) -> Tensor:
        """ids: [n] int64. Returns [n, hidden]."""
        return self.model.embed_tokens(ids)

    def forward(self, embeds: Tensor, step: StepLayout, cache: KVCache) -> Tensor:
        """embeds: [N, hidden]. Returns final-norm states [N, hidden]; the cache takes the step's keys and values."""
        return self.model(embeds, step, cache)

    def logits(self, states: Tensor) -> Tensor:
        """states: [M, hidden], only the rows that decide something. Returns [M, vocab] in the model's dtype."""
        return self.lm_head(states)
