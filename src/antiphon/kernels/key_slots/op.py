"""From block tables to a slot for every key, once per step for all layers.

    out[r, i] = block(r, i) · block_size + offset(r, i)   for i < the row's number of keys

| tensor   | shape         | dtype |                                                                    |
|----------|---------------|-------|--------------------------------------------------------------------|
| blocks   | [B]           | int32 |                                                                    |
| segments | [R, S, 3]     | int32 | start in `blocks`, offset of the first token, number of tokens     |
| spans    | [R, 4]        | int32 | `RowSpan`                                                          |
| out      | [R, max_keys] | int32 | new; behind a row's keys anything that is a slot or was never read |

Dispatch: `kernel.py` on CUDA, the reference elsewhere.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.kernels.key_slots import reference


def key_slots(blocks: Tensor, segments: Tensor, spans: Tensor, block_size: int, max_keys: int) -> Tensor:
    """Tensors in the module's docstring."""
    if blocks.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.key_slots import kernel

        return kernel.key_slots(blocks, segments, spans, block_size, max_keys)
    return reference.key_slots(blocks, segments, spans, block_size, max_keys)
