"""Where the generations of minicpmo-utils differ in what surrounds the flow. Its network is the same in both.

Sources: REFERENCE 9.1, 9.6, 9.8. Test: tests/models/test_flow.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from antiphon.models.minicpmo.flow_membership import Retention
from antiphon.models.minicpmo.flow_retention import TokenRetention, frozen_speech_tokens, newest_speech_tokens
from antiphon.models.minicpmo.hift_config import Generation


@dataclass(frozen=True, slots=True)
class FlowRules:
    """kept_tokens: what of a turn the encoder's token-rate layers remember.

    after_prompt: what stands for the tokens that are not said yet while a voice is conditioned, given its prompt's
        tokens and as much silence as is looked ahead
    """

    kept_tokens: TokenRetention
    after_prompt: Callable[[Sequence[int], Sequence[int]], Sequence[int]]


def flow_rules(generation: Generation, retention: Retention) -> FlowRules:
    match retention:
        case Retention.REFERENCE:
            return _RULES[generation]
        case Retention.VOICE_FIRST:
            return replace(_RULES[generation], kept_tokens=newest_speech_tokens)
        case never:
            assert_never(never)


def _silence(_: Sequence[int], silence: Sequence[int]) -> Sequence[int]:
    return silence


def _prompt_again(prompt: Sequence[int], silence: Sequence[int]) -> Sequence[int]:
    return prompt[: len(silence)]


_RULES = {
    Generation.V1_0_5: FlowRules(frozen_speech_tokens, _silence),
    Generation.V1_0_7: FlowRules(newest_speech_tokens, _prompt_again),
}
