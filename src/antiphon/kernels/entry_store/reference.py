"""The definition of `entry_store`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.entry_store.contract import HeadNorms
from antiphon.kernels.vocoder_attention.contract import Sink


def norm_and_store(qkv: Tensor, norms: HeadNorms, layer: int, sink: Sink) -> None:
    """Tensors as in `op.py`."""
    pairs = ((norms.q_weight, norms.q_bias), (norms.k_weight, norms.k_bias))
    for part, (weight, bias) in zip((qkv[:, :, 0], qkv[:, :, 1]), pairs, strict=True):
        part.copy_(F.layer_norm(part.float(), part.shape[-1:], weight, bias, norms.eps))
    store(qkv, layer, sink)


def store(qkv: Tensor, layer: int, sink: Sink) -> None:
    """Tensors as in `op.py`."""
    is_kept = sink.places >= 0
    for index, stored in ((1, sink.entries.keys[layer]), (2, sink.entries.values[layer])):
        rows = qkv[:, :, index].reshape(len(qkv) // stored.shape[1], stored.shape[1], qkv.shape[1], *stored.shape[2:])
        by_entry = rows.transpose(1, 2).flatten(0, 1)
        stored[sink.places[is_kept]] = by_entry[is_kept].to(stored.dtype)
