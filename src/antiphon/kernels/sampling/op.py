"""From logits to the next id: `sample_text` for calls, `sample_chat` for chats, `sample_codec` for speech.

`sample_text` (REFERENCE 4.4), in this order:
  1. chunk_eos, if one draw from softmax(logits) (greedy: the argmax) is it; nothing else of that draw is used;
  2. forbidden ids to -inf;
  3. repeated ids divided by the penalty, whatever their sign;
  4. the length penalty on turn_eos;
  5. the listen scale; listen at once if fewer than listen_top_k ids are above it;
  6. greedy: the argmax; else temperature, top-k, top-p, and a draw.
  A row that must speak, which the reference does not know, skips 1 and 5; at last listen and turn_eos are forbidden.
`sample_chat` (REFERENCE 14.4): the row's forbidden ids to -inf; repeated ids by the penalty, sign-aware; then as 6.
`sample_codec` (REFERENCE 8.2), in this order:
  1. temperature;
  2. penalty ** count over the history, sign-aware;
  3. EOS to -inf while the chunk may not end;
  4. where the row is cut, top-p, then top-k, at least 3 of each (REFERENCE 14.5);
  5. a draw.

| tensor       | shape        | dtype                                                                  |
|--------------|--------------|------------------------------------------------------------------------|
| text logits  | [R, V]       | floating; the rules are evaluated in float32                           |
| codec logits | [R, C]       | float32; id C - 1 ends the segment                                     |
| rules        | see contract | one entry per row                                                      |

Draws are Gumbel noise from (seed, counter, id): a row's choice does not depend on its neighbours. R = 0 is allowed.
Logits that are no numbers give some id of the vocabulary. Dispatch: `kernel.py` on CUDA, two launches for text and one
for speech; the reference elsewhere, and for `codec_scores` everywhere. Not measured on a GPU yet. Raises ShapeError.
Kernel and reference see the same scores, the same edge of top k and the same bits of noise, but
  - sums of exp in another order, good to about 2^-20: another choice if the mass before an id is so close to top p, or
    the share of chunk_eos to its draw;
  - logarithms that differ by a unit or two: another choice if two noisy scores are so close.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.errors import ShapeError
from antiphon.kernels.sampling import reference
from antiphon.kernels.sampling.contract import ChatRules, CodecRules, TextChoice, TextRules


def sample_text(logits: Tensor, rules: TextRules) -> TextChoice:
    """Choose one text id per row; order and tensors in the module's docstring."""
    if logits.shape != (rules.history.shape[0], rules.forbidden.shape[0]):
        raise ShapeError(
            f"sample_text wants logits [{rules.history.shape[0]}, {rules.forbidden.shape[0]}] by its rules, "
            f"got {tuple(logits.shape)}"
        )
    if logits.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.sampling import kernel

        return kernel.sample_text(logits, rules)
    return reference.sample_text(logits, rules)


def sample_chat(logits: Tensor, rules: ChatRules) -> Tensor:
    """Choose one text id per row of a chat, [R] int64; order and tensors in the module's docstring."""
    if logits.shape != rules.forbidden.shape or logits.shape[0] != rules.history.shape[0]:
        raise ShapeError(
            f"sample_chat wants logits {tuple(rules.forbidden.shape)} by its rules, got {tuple(logits.shape)}"
        )
    if logits.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.sampling import kernel

        return kernel.sample_chat(logits, rules)
    return reference.sample_chat(logits, rules)


def codec_scores(logits: Tensor, rules: CodecRules) -> Tensor:
    """The scores that `sample_codec` draws from, [R, C] float32: softmax of them is the distribution."""
    if logits.dim() != 2 or logits.shape[0] != rules.history.shape[0]:
        raise ShapeError(
            f"codec logits must be [{rules.history.shape[0]}, C] by their rules, got {tuple(logits.shape)}"
        )
    return reference.codec_scores(logits, rules)


def sample_codec(logits: Tensor, rules: CodecRules) -> Tensor:
    """Choose one codec token per row, [R] int64; order and tensors in the module's docstring."""
    if logits.dim() != 2 or logits.shape[0] != rules.history.shape[0]:
        raise ShapeError(
            f"codec logits must be [{rules.history.shape[0]}, C] by their rules, got {tuple(logits.shape)}"
        )
    if logits.is_cuda:
        # Where there is no GPU, there may be no Triton.
        from antiphon.kernels.sampling import kernel

        return kernel.sample_codec(logits, rules)
    return reference.sample_codec(logits, rules)
