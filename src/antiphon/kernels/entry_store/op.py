"""Writes the keys and values of chunks where they are remembered, their queries and keys normalised before.

    `norm_and_store`: q ← norm(q) · wq + bq,  k ← norm(k) · wk + bk per head, in place; then as `store`
    `store`: keys[layer, places] ← k,  values[layer, places] ← v

| tensor       | shape              | dtype    |                                                              |
|--------------|--------------------|----------|--------------------------------------------------------------|
| qkv          | [R G, T, 3, H, D]  | floating | contiguous; a session's guidance rows adjacent               |
| norms        | [D]                | float32  | `HeadNorms`                                                  |
| sink.entries | [A, N, G, H, D]    | floating | contiguous; rounded to its dtype; must not alias qkv         |
| sink.places  | [R T]              | int64    | -1: not stored; no place twice is the caller's care          |

Sums are float32. T = 0 is allowed. Grid of the kernel: one program for each token or frame of each guidance row, which
reads it once. Not measured on a GPU yet. Raises ShapeError. Dispatch: `kernel.py` on CUDA, the reference elsewhere.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.entry_store import reference
from antiphon.kernels.entry_store.contract import HeadNorms
from antiphon.kernels.vocoder_attention.contract import Sink


def norm_and_store(qkv: Tensor, norms: HeadNorms, layer: int, sink: Sink) -> None:
    """In place; tensors and errors in the module's docstring."""
    check(qkv, layer, sink)
    if qkv.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.entry_store import kernel

        kernel.norm_and_store(qkv, norms, layer, sink)
    else:
        reference.norm_and_store(qkv, norms, layer, sink)


def store(qkv: Tensor, layer: int, sink: Sink) -> None:
    """Changes the sink only; tensors and errors in the module's docstring."""
    check(qkv, layer, sink)
    if qkv.is_cuda:
        from antiphon.kernels.entry_store import kernel

        kernel.store(qkv, layer, sink)
    else:
        reference.store(qkv, layer, sink)


def check(qkv: Tensor, layer: int, sink: Sink) -> None:
    """Raises: ShapeError."""
    stored = sink.entries.keys.shape
    if qkv.dim() != 5 or qkv.shape[2:] != (3, *stored[3:]) or len(qkv) % stored[2] or not qkv.is_contiguous():
        raise ShapeError(
            f"entries {tuple(stored)} want [rows of {stored[2]}, T, 3, {stored[3]}, {stored[4]}], contiguous; got "
            f"{tuple(qkv.shape)}"
        )
    num_new = len(qkv) // stored[2] * qkv.shape[1]
    if sink.places.shape != (num_new,) or not 0 <= layer < stored[0]:
        raise ShapeError(
            f"{num_new} new entries in layer {layer} of {stored[0]}, but places for {tuple(sink.places.shape)}"
        )
