"""Whole turns of the flow with its kernels, launch by launch and replayed: against the same turns with the references.

Interpreted, replaying is calling again: what a recording reads is what it was told at first, in the same places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

import build_voice
from antiphon.kernels.entry_store import reference as entry_store
from antiphon.kernels.frame_norm import reference as frame_norm
from antiphon.kernels.vocoder_attention import reference as attention
from antiphon.kernels.vocoder_attention.contract import Products
from antiphon.models.minicpmo.captured import NumRuns
from antiphon.models.minicpmo.flow import MelSynthesizer
from antiphon.models.minicpmo.flow_cache import SpeechState, Voice
from antiphon.models.minicpmo.flow_inputs import FlowRow
from fakes.rerun import Rerun
from kernels.places import run_by_name

EXACT = Products.FLOAT32

TOLERANCE = 1e-5
"""Times the largest value: as where a solve is shared, tests/models/test_flow.py."""

VOICES = (3, 52)
"""Tokens."""

CHUNKS = (((6, False), (5, False)), ((4, False), (3, True)))
"""Moment by moment, per session: tokens of its chunk, and whether its turn ends with it. Few: interpreting is slow."""

NUMS_ROWS, NUMS_TOKENS = (1, 3), (3,)
"""Of what is recorded; the turns are two."""


def turns(synthesizer: MelSynthesizer, voices: Sequence[Voice]) -> list[Tensor]:
    """Chunks of sessions in common solves; then one of one session alone."""
    states = [SpeechState.at_turn_start(voice) for voice in voices]
    mels = []
    for moment, chunks in enumerate(CHUNKS):
        rows = [
            FlowRow(range(900 * who + moment, 900 * who + moment + num), voices[who], states[who], is_last)
            for who, (num, is_last) in enumerate(chunks)
        ]
        for who, (mel, speech) in enumerate(synthesizer.speak(rows)):
            synthesizer.arena.keep_only(speech, [states[who]])
            states[who] = speech
            mels.append(mel)
    ((mel, _),) = synthesizer.speak([FlowRow(range(6), voices[0], states[0], is_last=False)])
    return [*mels, mel]


@contextmanager
def kernels() -> Iterator[None]:
    """In place of the references, in a process where Triton is interpreted."""
    from antiphon.kernels.entry_store import kernel as entry_kernel
    from antiphon.kernels.frame_norm import kernel as norm_kernel
    from antiphon.kernels.vocoder_attention import kernel as attention_kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "vocoder_attention", partial(attention_kernel.vocoder_attention, products=EXACT))
        for name in ("modulated", "modulated_windows", "mish_windows"):
            patch.setattr(frame_norm, name, vars(norm_kernel)[name])
        for name in ("norm_and_store", "store"):
            patch.setattr(entry_store, name, vars(entry_kernel)[name])
        yield


def check_turns() -> None:
    with torch.inference_mode():
        exact, cramped, roomy = (build_voice.synthesizer(num_steps=1) for _ in range(3))
        voices = [exact.build_voice(build_voice.prompt(num, seed=num)) for num in VOICES]
        want = turns(exact, voices)
        with kernels():
            # A voice of 52 tokens has no room in lists that are made for one.
            assert [*cramped.capture(NUMS_ROWS, NUMS_TOKENS, 2, Rerun())] == [1, 0]
            assert_same(turns(cramped, voices), want)
            assert [*roomy.capture(NUMS_ROWS, NUMS_TOKENS, 104, Rerun())][-1] == 0
            assert_same(turns(roomy, voices), want)
    assert exact.num_runs == NumRuns(num_launched=len(CHUNKS) + 1)
    assert cramped.num_runs == NumRuns(num_replayed=1, num_launched=len(CHUNKS))
    assert roomy.num_runs == NumRuns(num_replayed=len(CHUNKS) + 1)


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE * float(other.abs().max()))


def test_turns_sound_the_same_by_the_kernels_and_replayed(interpreter: Executor) -> None:
    interpreter.submit(run_by_name, __file__, "check_turns").result()
