"""The DiT as it runs: the flow's velocity for a chunk of mel frames, given the frames before it.

Its weights are those of `dit.py`, merged so that a block is six products and seven passes in between: queries, keys and
values in one product, each causal convolution as one over windows of frames. No positions and no mask: every frame of
the chunk attends to the chunk and to all remembered frames (REFERENCE 9.4). Chunks of several sessions are one batch;
each attends to its own past. Not the solver: `flow_solve.py`. Test: golden code2wav (`velocity_step0`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from antiphon.kernels.entry_store.contract import HeadNorms
from antiphon.kernels.entry_store.op import norm_and_store
from antiphon.kernels.frame_norm.contract import ConvTails, Update
from antiphon.kernels.frame_norm.op import mish_windows, modulated, modulated_windows
from antiphon.kernels.linear.contract import Activation
from antiphon.kernels.linear.op import linear
from antiphon.models.minicpmo.dit import MODULATED_EPS, Block, CausalConvs, DiT
from antiphon.models.minicpmo.flow_cache import Memory
from antiphon.models.minicpmo.flow_compute import Compute

DTYPES = {Compute.FLOAT32: torch.float32, Compute.TF32: torch.float32, Compute.BFLOAT16: torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class Modulation:
    """How one point of time changes the network: it depends on nothing else, so it is computed once for all chunks.

    blocks: [L, 9, C] float32; shift, scale and gate of attention, then of the MLP, then of the convolution
    final:  [2, C] float32; shift and scale before the last projection
    """

    blocks: Tensor
    final: Tensor


class Estimator(nn.Module):
    """Copies of a DiT's weights, in the numbers that it computes in."""

    def __init__(self, dit: DiT, compute: Compute) -> None:
        super().__init__()
        self.dtype = DTYPES[compute]
        self.in_proj = _linear([dit.in_proj], self.dtype)
        self.blocks = nn.ModuleList(_Block(block, self.dtype) for block in dit.layers)
        self.out_proj = _linear([dit.final_layer.linear], self.dtype)

    def forward(self, x: Tensor, modulation: Modulation, memory: Memory, step: int, tails: ConvTails) -> Tensor:
        """Estimate the velocity of one chunk of each session in one Euler step.

        x:      [B, T, 4 M] floating; noisy mel, mu, speaker, condition; equally many rows per session
        memory: what the sessions read, in any order, and where their new entries go; in all layers of all steps
        tails:  of two convolutions in each layer of each step
        Returns: velocity [B, T, M] float32.
        """
        stream = self.in_proj(x.to(self.dtype)).float()
        update: Update | None = None
        for index, block in enumerate(self.blocks):
            layer = step * len(self.blocks) + index
            update = block(stream, update, modulation.blocks[index], memory, layer, tails)
        shift, scale = modulation.final
        velocity: Tensor = self.out_proj(modulated(stream, update, shift, scale, eps=MODULATED_EPS, dtype=self.dtype))
        return velocity.float()


class _Block(nn.Module):
    """Attention, then convolution, then MLP; the modulation lists the MLP before the convolution."""

    def __init__(self, block: Block, dtype: torch.dtype) -> None:
        super().__init__()
        attention = block.attn
        self.num_heads = attention.num_heads
        self.qkv = _linear([attention.to_q, attention.to_k, attention.to_v], dtype)
        self.head_norms = HeadNorms(
            attention.q_norm.eps,
            *(weight for norm in (attention.q_norm, attention.k_norm) for weight in (norm.weight, norm.bias)),
        )
        self.proj = _linear([attention.proj], dtype)
        self.conv1, self.conv2 = _conv(block.conv, "1", dtype), _conv(block.conv, "6", dtype)
        self.conv_norm: nn.LayerNorm = block.conv.norm
        self.fc1, self.fc2 = _linear([block.mlp.fc1], dtype), _linear([block.mlp.fc2], dtype)

    def forward(
        self,
        stream: Tensor,
        update: Update | None,
        modulation: Tensor,
        memory: Memory,
        layer: int,
        tails: ConvTails,
    ) -> Update:
        """What is to be added to the stream behind the block; `stream` changes in place.

        stream: [B, T, C] float32. update: what the block before left to be added. modulation: [9, C] float32.
        """
        dtype = self.qkv.weight.dtype
        shift, scale, attention_gate, mlp_shift, mlp_scale, mlp_gate, conv_shift, conv_scale, conv_gate = modulation
        norm, norm_eps = self.conv_norm, self.conv_norm.eps
        h = modulated(stream, update, shift, scale, eps=MODULATED_EPS, dtype=dtype)
        attended = Update(_product(self.proj, self._attend(_product(self.qkv, h), memory, layer)), attention_gate)
        h = modulated_windows(
            stream, attended, conv_shift, conv_scale, tails, 2 * layer, eps=MODULATED_EPS, dtype=dtype
        )
        h = mish_windows(_product(self.conv1, h), norm.weight, norm.bias, tails, 2 * layer + 1, eps=norm_eps)
        convolved = Update(_product(self.conv2, h), conv_gate)
        h = modulated(stream, convolved, mlp_shift, mlp_scale, eps=MODULATED_EPS, dtype=dtype)
        return Update(_product(self.fc2, _product(self.fc1, h, Activation.GELU)), mlp_gate)

    def _attend(self, qkv: Tensor, memory: Memory, layer: int) -> Tensor:
        """qkv: [B, T, 3 H D] -> [B, T, H D]."""
        heads = qkv.view(*qkv.shape[:-1], 3, self.num_heads, -1)
        norm_and_store(heads, self.head_norms, layer, memory.sink)
        q, k, v = heads.unbind(2)
        return memory.attend(layer, q, k, v, by_distance=None, scale=q.shape[-1] ** -0.5).flatten(2)


def _product(layer: nn.Linear, x: Tensor, activation: Activation = Activation.NONE) -> Tensor:
    return linear(x, layer.weight, layer.bias, activation)


def _linear(layers: list[nn.Linear], dtype: torch.dtype) -> nn.Linear:
    """One layer with the outputs of all, one after the other."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = torch.cat([layer.bias for layer in layers])
    return _filled(weight, bias, dtype)


def _conv(convs: CausalConvs, number: str, dtype: torch.dtype) -> nn.Linear:
    """A causal convolution as a product with windows of frames, oldest first (`frame_norm`)."""
    conv = convs.block[number]
    assert isinstance(conv, nn.Conv1d), f"{number} is no convolution"
    assert conv.bias is not None, f"convolution {number} has no bias"
    return _filled(conv.weight.transpose(1, 2).flatten(1), conv.bias, dtype)


def _filled(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=dtype)
    linear.requires_grad_(requires_grad=False)
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)
    return linear
