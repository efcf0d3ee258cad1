"""The talker's networks under `tts.*`: from spoken tokens and thinker states to codec-token logits. No sampling.

Source: REFERENCE 2.6 and 8.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from antiphon.kernels.kv_cache import KVCache, StepLayout
from antiphon.kernels.transfer import upload
from antiphon.models.minicpmo.config import TalkerConfig
from antiphon.models.minicpmo.decoder import Decoder


class Projector(nn.Module):
    """Thinker state to talker width: linear, ReLU, linear."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        self.linear1 = nn.Linear(config.llm_hidden_size, config.decoder.hidden_size)
        self.linear2 = nn.Linear(config.decoder.hidden_size, config.decoder.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [n, llm_hidden]. Returns [n, hidden]."""
        return self.linear2(F.relu(self.linear1(hidden)))


class TalkerNetwork(nn.Module):
    """`tts.*` of the checkpoint without what duplex never reads (`projector_spk`, `model.embed_tokens`)."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        self.config = config
        size = config.decoder.hidden_size
        self.emb_text = nn.Embedding(config.num_text_tokens, size)
        self.emb_code = nn.ModuleList([nn.Embedding(config.num_codec_tokens, size)])
        self.projector_semantic = Projector(config)
        self.model = Decoder(config.decoder)
        self.head_code = nn.ModuleList([weight_norm(nn.Linear(size, config.num_codec_tokens, bias=False))])

    def prepare(self) -> None:
        """Bring loaded weights into the form that runs; once. Their names are the checkpoint's no more.

        The head's magnitude and direction become their product, matrices with one input become one.
        """
        parametrize.remove_parametrizations(self.head_code[0], "weight")
        self.model.merge_projections()

    def condition(self, token_ids: Tensor, hidden: Tensor, *, ends_text: bool = False) -> Tensor:
        """The chunk's condition: text embedding plus the unit vector of the projected state, then audio_bos.

        token_ids: [n] int64, n = 0 allowed.
        hidden: [n, llm_hidden], each token's own final-norm state.
        ends_text: no text follows in the turn, which only a chat says: text_eos stands before audio_bos.
        Returns [n + 1, hidden], or one more with text_eos.
        """
        spoken = self.emb_text(token_ids) + F.normalize(self.projector_semantic(hidden), dim=-1)
        marks = (self.config.text_eos_id, self.config.audio_bos_id) if ends_text else (self.config.audio_bos_id,)
        return torch.cat([spoken, self.emb_text(upload(torch.tensor(marks), token_ids.device))])

    def embed_codes(self, codec_tokens: Tensor) -> Tensor:
        """codec_tokens: [N] int64. Returns [N, hidden]."""
        return self.emb_code[0](codec_tokens)

    def forward(self, embeds: Tensor, step: StepLayout, cache: KVCache) -> Tensor:
        """embeds: [N, hidden]. Returns final-norm states [N, hidden]; the cache takes the step's keys and values."""
        return self.model(embeds, step, cache)

    def logits(self, states: Tensor) -> Tensor:
        """states: [M, hidden]. Returns [M, num_codec_tokens] float32; the last id ends the segment."""
        return self.head_code[0](states).float()
