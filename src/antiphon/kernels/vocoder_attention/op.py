"""Attention of speech chunks to the voice's entries, to the session's own, and to the chunk: none of them is moved.

    out = softmax(q [k_past ‖ k]ᵀ · scale + bias) [v_past ‖ v],  per session;  past = the entries that `Reading` lists
    bias of query i and key j = by_distance[d] · scale,  d = n + i - j;  n entries are past, the chunk's keys follow

| tensor         | shape               | dtype    |                                                                |
|----------------|---------------------|----------|----------------------------------------------------------------|
| q, k, v        | [R G, T, H, D]      | floating | of the chunks, guidance rows adjacent; [H, D] contiguous       |
| reading.arena  | [A, N, G, H, D]     | floating | contiguous; computed with in q's dtype                         |
| reading.voices | [A, P, G, H, D]     | as arena | one per session, P its own                                     |
| reading.listed | [R, M]              | int64    | entries in order; behind a session's count is padding          |
| by_distance    | [H, R, T, M + 2T - 1]| as q    | G = 1 only; column c is distance M + T - 1 - c; or None        |
| out            | [R G, T, H, D]      | as q     | new, contiguous                                                |

M = 0 and P = 0 are allowed; pasts are ragged, and so are chunks (`Reading.lengths`): padded keys are not seen, padded
queries give anything. Nothing aliases. Softmax and sums are float32; products of float32 tensors are as `Products`
says on a GPU, and float32 elsewhere. Dispatch: `kernel.py` on CUDA, the reference elsewhere. Grid of the kernel: one
program per session, guidance row, head and tile of queries, which reads the listed keys and values once. Not measured
on a GPU yet. Raises ShapeError.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.vocoder_attention import reference
from antiphon.kernels.vocoder_attention.contract import Products, Reading


def vocoder_attention(  # noqa: PLR0913 - what attends, to what, and how
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reading: Reading,
    layer: int,
    *,
    by_distance: Tensor | None,
    scale: float,
    products: Products,
) -> Tensor:
    """Attend; tensors and errors in the module's docstring. layer: of the entries, 0 to A - 1."""
    check(q, k, v, reading, layer, by_distance)
    if q.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.vocoder_attention import kernel

        return kernel.vocoder_attention(q, k, v, reading, layer, by_distance, scale, products)
    return reference.vocoder_attention(q, k, v, reading, layer, by_distance, scale)


def check(q: Tensor, k: Tensor, v: Tensor, reading: Reading, layer: int, by_distance: Tensor | None) -> None:
    """Raises: ShapeError."""
    stored, num_rows = reading.arena.keys.shape, len(reading.nums)
    num_queries = q.shape[1] if q.dim() == 4 else 0
    wanted = (num_rows * stored[2], num_queries, stored[3], stored[4])
    if not q.shape == k.shape == v.shape == wanted or not 0 <= layer < stored[0]:
        raise ShapeError(
            f"vocoder attention of {num_rows} sessions over entries {tuple(stored)} wants q, k, v {wanted}, a layer; "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} and {layer}"
        )
    for one in (q, k, v):
        if one.stride()[2:] != (stored[4], 1):
            raise ShapeError(f"vocoder attention wants heads of {stored[4]} side by side; got strides {one.stride()}")
    if by_distance is not None:
        num_distances = reading.listed.shape[1] + 2 * num_queries - 1
        wanted_bias = (stored[3], num_rows, num_queries, num_distances)
        if by_distance.shape != wanted_bias or stored[2] != 1 or not by_distance.is_contiguous():
            raise ShapeError(
                f"vocoder attention wants scores by distance {wanted_bias}, contiguous, and G = 1; got "
                f"{tuple(by_distance.shape)}"
            )
