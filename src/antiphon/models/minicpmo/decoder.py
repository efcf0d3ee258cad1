"""The causal decoder of thinker and talker: Llama blocks on the paged context. No embedding, no head, no sampling.

Parameter names are those of `llm.model.*` and `tts.model.*` (REFERENCE 2.1, 2.6) until `Decoder.merge_projections`,
without which nothing runs. Shown by tests/models/test_decoder.py and, with golden numbers, by tests/test_golden.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from antiphon.kernels.few_rows.op import linear_add, norm_gated, norm_linear, pays_for
from antiphon.kernels.kv_cache import KVCache, LayerCache, StepLayout
from antiphon.kernels.paged_attention.op import paged_attention
from antiphon.kernels.rms_norm.op import add_rms_norm, rms_norm
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

    def after_adding(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """The sum and its norm."""
        return add_rms_norm(x, added, self.weight, self._eps)


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

    def merge_projections(self) -> None:
        """Replace the three projections by one, `qkv_proj`."""
        self.qkv_proj = merged(self.q_proj, self.k_proj, self.v_proj)
        del self.q_proj, self.k_proj, self.v_proj

    def heads(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """projected: [N, (H + 2 Hkv) D]. Returns q [N, H, D], k and v [N, Hkv, D], views of it."""
        config = self._config
        heads = projected.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        return q, k, v

    def forward(self, projected: Tensor, step: StepLayout, rotations: StepRotations, cache: LayerCache) -> Tensor:
        """What stands between the projections.

        projected: [N, (H + 2 Hkv) D], what `qkv_proj` gives.
        cache: of this layer, written.
        Returns [N, H D], what `o_proj` takes.
        """
        q, k, v = self.heads(projected)
        norm = None
        if self._config.has_qk_norm:
            norm = HeadNorm(self.q_norm.weight, self.k_norm.weight, self._config.rms_norm_eps)
        q_anchor, q_ring = rotary_store(q, k, v, norm, rotations, cache)
        attended = paged_attention(q_anchor, q_ring, cache, step, self._config.head_dim**-0.5)
        return attended.flatten(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def merge_projections(self) -> None:
        """Replace the two projections by one, `gate_up_proj`."""
        self.gate_up_proj = merged(self.gate_proj, self.up_proj)
        del self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, hidden]. Returns the same shape."""
        return self.down_proj(silu_mul(self.gate_up_proj(x)))


class Layer(nn.Module):
    """Pre-norm block: attention, then feed-forward."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self._eps = config.rms_norm_eps

    def forward(
        self,
        x: Tensor,
        normed: Tensor,
        step: StepLayout,
        rotations: StepRotations,
        cache: LayerCache,
    ) -> tuple[Tensor, Tensor]:
        """What comes out is not added yet, so that the norm behind this layer can do it in the same launch.

        x, normed: [N, hidden], the layer's input and its input norm.
        cache: of this layer, written.
        Returns x with the attention, and what the feed-forward adds to it, both [N, hidden].
        """
        attention = self.self_attn
        attended = attention(attention.qkv_proj(normed), step, rotations, cache)
        x, normed = self.post_attention_layernorm.after_adding(x, attention.o_proj(attended))
        return x, self.mlp(normed)

    def run_few(self, x: Tensor, step: StepLayout, rotations: StepRotations, cache: LayerCache) -> Tensor:
        """The same for few tokens, where a launch and a trip through memory cost more than to norm a row often.

        x: [N, hidden], the layer's input, N at most `MAX_ROWS`. Returns its output, [N, hidden].
        """
        attention, mlp = self.self_attn, self.mlp
        first, second = self.input_layernorm, self.post_attention_layernorm
        projected = norm_linear(x, first.weight, self._eps, attention.qkv_proj.weight)
        x = linear_add(attention(projected, step, rotations, cache), attention.o_proj.weight, x)
        return linear_add(norm_gated(x, second.weight, self._eps, mlp.gate_up_proj.weight), mlp.down_proj.weight, x)


class Decoder(nn.Module):
    """All layers and the final norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def merge_projections(self) -> None:
        """Make one matrix of those that read the same input; once, after loading and before the first step.

        Layer by layer: at no time is there a second copy of more than one layer's matrices.
        """
        for layer in self._layers():
            layer.self_attn.merge_projections()
            layer.mlp.merge_projections()

    def forward(self, embeds: Tensor, step: StepLayout, cache: KVCache) -> Tensor:
        """Run a step's tokens and put their keys and values into the cache.

        embeds: [N, hidden], the rows of all sessions one after the other. N = 0 is allowed.
        step: where each token stands and what its row attends to.
        Returns the final-norm states [N, hidden].
        """
        head_dim, theta = self.config.head_dim, self.config.rope_theta
        turns = step_rotations(step.positions, step.ring_positions, step.key_positions, head_dim, theta)
        rotations = StepRotations(*turns, slots=step.slots)
        if pays_for(embeds):
            return self._run_few(embeds, step, rotations, cache)
        layers = self._layers()
        norms = [*(layer.input_layernorm for layer in layers), self.norm]
        x, normed = embeds, norms[0](embeds)
        for layer, norm, own in zip(layers, norms[1:], cache.layers(), strict=True):
            x, added = layer(x, normed, step, rotations, own)
            x, normed = norm.after_adding(x, added)
        return normed

    def _run_few(self, embeds: Tensor, step: StepLayout, rotations: StepRotations, cache: KVCache) -> Tensor:
        x = embeds.contiguous()
        for layer, own in zip(self._layers(), cache.layers(), strict=True):
            x = layer.run_few(x, step, rotations, own)
        return self.norm(x)

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]


def merged(*projections: nn.Linear) -> nn.Linear:
    """One projection whose outputs are theirs, one after the other."""
    weight = torch.cat([projection.weight for projection in projections])
    whole = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    whole.weight = nn.Parameter(weight, requires_grad=False)
    return whole.eval()
