"""Attention of speech chunks to the voice's entries, to the session's own, and to the chunk: none of them is moved.

    out = softmax(q [k_past ‖ k]ᵀ · scale + bias) [v_past ‖ v],  per session;  past = the entries that `Reading` lists

| tensor         | shape              | dtype    |                                                       |
|----------------|--------------------|----------|-------------------------------------------------------|
| q, k, v        | [R G, H, T, D]     | floating | of the chunks, guidance rows adjacent; any strides    |
| reading.arena  | [A, N, G, H, D]    | floating | contiguous; computed with in q's dtype                |
| reading.voices | [A, P, G, H, D]    | as arena | one per session, P its own                            |
| reading.listed | [R, M]             | int32    | entries in order; behind a session's count is padding |
| bias           | [R, H, T, M + T]   | as q     | G = 1 only; the chunk's begin at the count; or None   |
| out            | [R G, H, T, D]     | as q     | new                                                   |

M = 0 and P = 0 are allowed; pasts are ragged. Nothing aliases. Softmax and sums are float32.
Dispatch: `kernel.py` on CUDA, the reference elsewhere. Grid of the kernel: one program per session, guidance row, head
and 64 queries, which reads the listed keys and values once. Not measured on a GPU yet. Raises ShapeError.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.vocoder_attention import reference
from antiphon.kernels.vocoder_attention.contract import Reading


def vocoder_attention(
    q: Tensor, k: Tensor, v: Tensor, reading: Reading, layer: int, *, bias: Tensor | None, scale: float
) -> Tensor:
    """Attend; tensors and errors in the module's docstring. layer: of the entries, 0 to A - 1."""
    check(q, k, v, reading, layer, bias)
    if q.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.vocoder_attention import kernel

        return kernel.vocoder_attention(q, k, v, reading, layer, bias, scale)
    return reference.vocoder_attention(q, k, v, reading, layer, bias, scale)


def check(q: Tensor, k: Tensor, v: Tensor, reading: Reading, layer: int, bias: Tensor | None) -> None:
    """Raises: ShapeError."""
    stored, num_rows = reading.arena.keys.shape, len(reading.counts)
    wanted = (num_rows * stored[2], stored[3], q.shape[2] if q.dim() == 4 else 0, stored[4])
    if not q.shape == k.shape == v.shape == wanted or not 0 <= layer < stored[0]:
        raise ShapeError(
            f"vocoder attention of {num_rows} sessions over entries {tuple(stored)} wants q, k, v {wanted}, a layer; "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} and {layer}"
        )
    for voice in reading.voices:
        like = (stored[0], *stored[2:])
        if (voice.keys.shape[0], *voice.keys.shape[2:]) != like or voice.keys.dtype != reading.arena.keys.dtype:
            raise ShapeError(
                f"a voice's entries {voice.keys.dtype} {tuple(voice.keys.shape)} do not fit the sessions' "
                f"{reading.arena.keys.dtype} {tuple(stored)}"
            )
    if bias is not None:
        wanted_bias = (num_rows, stored[3], q.shape[2], reading.listed.shape[1] + q.shape[2])
        if bias.shape != wanted_bias or stored[2] != 1:
            raise ShapeError(f"vocoder attention wants a bias {wanted_bias} and G = 1; got {tuple(bias.shape)}")
