"""The causal decoder of thinker and talker: Llama blocks on the paged context. No embedding, no head, no sampling.

Parameter names are those of `llm.model.*` and `tts.model.*` (REFERENCE 2.1, 2.6).
"""

from __future__ import annotations

from torch import Tensor, nn

from antiphon.kernels.kv_cache import KVCache, StepLayout
from antiphon.kernels.paged_attention.op import paged_attention
from antiphon.kernels.rms_norm.op import rms_norm
from antiphon.kernels.rotary_store.contract import HeadNorm, StepRotations
from antiphon.kernels.rotary_store.op import rotary_store
from antiphon.kernels.silu_mul.op import silu_mul
from antiphon.kernels.step_rotations.op import step_rotations
from antiphon.models.minicpmo.config import DecoderConfig


class Norm(nn.RMSNorm):
    """RMS norm through our operator; the base class gives the parameter its name."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps=eps)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self._eps)


class Attention(nn.Module):
    """Grouped-query attention of one layer to the paged context."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        query_size = config.num_heads * config.head_dim
        key_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        if config.has_qk_norm:
            self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
            self.k_norm = Norm(config.head_dim, config.rms_norm_eps)
        self._config = config

    def forward(self, x: Tensor, step: StepLayout, rotations: StepRotations, cache: tuple[Tensor, Tensor]) -> Tensor:
        """x: [N, hidden]. cache: (keys, values) of this layer, written. Returns [N, hidden]."""
        head_dim = self._config.head_dim
        q, k, v = (p(x).view(x.shape[0], -1, head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        norm = None
        if self._config.has_qk_norm:
            norm = HeadNorm(self.q_norm.weight, self.k_norm.weight, self._config.rms_norm_eps)
        q_anchor, q_ring = rotary_store(q, k, v, norm, rotations, cache)
        attended = paged_attention(q_anchor, q_ring, *cache, step, head_dim**-0.5)
        return self.o_proj(attended.flatten(1, 2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, hidden]. Returns the same shape."""
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    """Pre-norm block: attention, then feed-forward."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, step: StepLayout, rotations: StepRotations, cache: tuple[Tensor, Tensor]) -> Tensor:
        """x: [N, hidden]. cache: (keys, values) of this layer, written. Returns [N, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), step, rotations, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """All layers and the final norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embeds: Tensor, step: StepLayout, cache: KVCache) -> Tensor:
        """Run a step's tokens and put their keys and values into the cache.

        embeds: [N, hidden], the rows of all sessions one after the other. N = 0 is allowed.
        step: where each token stands and what its row attends to.
        Returns the final-norm states [N, hidden].
        """
        head_dim, theta = self.config.head_dim, self.config.rope_theta
        turns = step_rotations(step.positions, step.ring_positions, step.key_positions, head_dim, theta)
        rotations = StepRotations(*turns, slots=step.slots)
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            embeds = layer(embeds, step, rotations, (keys, values))
        return self.norm(embeds)
