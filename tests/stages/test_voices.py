"""Voices: shared while they are used, kept or forgotten afterwards, built piece by piece."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import build_voice
from antiphon.errors import AntiphonError, AudioError, InternalError
from antiphon.models.minicpmo.flow import MelSynthesizer
from antiphon.models.minicpmo.flow_cache import Voice
from antiphon.models.minicpmo.hift_config import Generation
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.code2wav.voices import VoiceStore

NUM_TOKENS = 5
PROMPTS = [build_voice.prompt(NUM_TOKENS, seed=number) for number in range(4)]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=Generation)
def synthesizer(request: pytest.FixtureRequest) -> MelSynthesizer:
    with torch.inference_mode():
        return build_voice.synthesizer(generation=request.param)


@pytest.fixture(scope="module")
def voice_bytes(synthesizer: MelSynthesizer) -> int:
    with torch.inference_mode():
        return synthesizer.build_voice(PROMPTS[0]).num_bytes


def settle(store: VoiceStore) -> dict[str, Voice | AntiphonError]:
    """Build all that is ordered."""
    told: dict[str, Voice | AntiphonError] = {}
    while not store.is_idle:
        store.advance()
        told |= store.answers()
    return told


def test_equal_prompts_share_one_voice_and_one_build(synthesizer: MelSynthesizer, voice_bytes: int) -> None:
    store = VoiceStore(synthesizer, max_bytes=0)
    store.ask(PROMPTS[0], "a")
    store.advance()
    again = build_voice.prompt(NUM_TOKENS, seed=0)
    store.ask(again, "b")
    told = settle(store)
    store.ask(again, "c")
    told |= store.answers()
    assert told["a"] is told["b"] is told["c"]
    counts = store.counts
    assert (counts.num_hits, counts.num_misses, counts.num_voices, counts.num_users) == (2, 1, 1, (3,))
    assert counts.num_bytes == voice_bytes


@pytest.mark.parametrize("part", ["tokens", "mel", "speaker"])
def test_whatever_part_of_a_prompt_differs_it_is_another_voice(synthesizer: MelSynthesizer, part: str) -> None:
    one, other = PROMPTS[0], PROMPTS[1]
    mixed = VoicePrompt(
        other.tokens if part == "tokens" else one.tokens,
        other.mel if part == "mel" else one.mel,
        other.speaker if part == "speaker" else one.speaker,
    )
    store = VoiceStore(synthesizer, max_bytes=0)
    store.ask(one, "a")
    store.ask(mixed, "b")
    told = settle(store)
    assert told["a"] is not told["b"]
    assert store.counts.num_misses == 2


def test_a_voice_is_built_in_a_piece_for_the_encoder_and_one_for_each_step(synthesizer: MelSynthesizer) -> None:
    store = VoiceStore(synthesizer, max_bytes=0)
    store.ask(PROMPTS[0], "a")
    store.ask(PROMPTS[1], "b")
    told_at: dict[str, int] = {}
    for piece in itertools.count(1):
        store.advance()
        told_at |= dict.fromkeys(store.answers(), piece)
        if store.is_idle:
            break
    pieces = synthesizer.num_steps + 1
    assert told_at == {"a": pieces, "b": 2 * pieces}


def test_a_voice_built_in_pieces_is_the_same_voice(synthesizer: MelSynthesizer) -> None:
    store = VoiceStore(synthesizer, max_bytes=0)
    for number, prompt in enumerate(PROMPTS):
        store.ask(prompt, str(number))
    for user, voice in settle(store).items():
        assert isinstance(voice, Voice)
        want = synthesizer.build_voice(PROMPTS[int(user)])
        assert all(map(torch.equal, build_voice.tensors(voice), build_voice.tensors(want)))


def test_voices_without_a_user_go_least_recently_asked_for_first(synthesizer: MelSynthesizer, voice_bytes: int) -> None:
    store = VoiceStore(synthesizer, max_bytes=2 * voice_bytes)
    for which in (0, 1, 0):
        store.ask(PROMPTS[which], "a")
        settle(store)
        store.leave("a")
    assert (store.counts.num_voices, store.counts.num_evictions) == (2, 0)
    store.ask(PROMPTS[2], "b")
    settle(store)
    assert (store.counts.num_voices, store.counts.num_evictions) == (2, 1)
    store.ask(PROMPTS[0], "c")
    assert store.answers().keys() == {"c"}, "it was asked for after the one that went"


def test_voices_that_are_used_stay_however_many(synthesizer: MelSynthesizer, voice_bytes: int) -> None:
    store = VoiceStore(synthesizer, max_bytes=voice_bytes)
    for user, prompt in zip("abc", PROMPTS, strict=False):
        store.ask(prompt, user)
    settle(store)
    assert (store.counts.num_voices, store.counts.num_evictions) == (3, 0)
    store.leave("b")
    assert store.counts.num_voices == 2
    store.leave("a")
    store.leave("c")
    assert store.counts.num_voices == 1


def test_a_pinned_voice_stays(synthesizer: MelSynthesizer) -> None:
    store = VoiceStore(synthesizer, max_bytes=0)
    store.pin(PROMPTS[0])
    settle(store)
    store.ask(PROMPTS[1], "a")
    settle(store)
    store.leave("a")
    assert (store.counts.num_voices, store.counts.num_users) == (1, (0,))
    store.ask(PROMPTS[0], "b")
    assert store.answers().keys() == {"b"}
    assert (store.counts.num_hits, store.counts.num_misses) == (1, 1)


def test_a_voice_that_is_used_can_be_pinned_too(synthesizer: MelSynthesizer) -> None:
    store = VoiceStore(synthesizer, max_bytes=0)
    store.ask(PROMPTS[0], "a")
    store.pin(PROMPTS[0])
    settle(store)
    store.leave("a")
    assert store.counts.num_voices == 1


def test_what_nobody_waits_for_is_not_built(synthesizer: MelSynthesizer) -> None:
    store = VoiceStore(synthesizer, max_bytes=2**30)
    store.ask(PROMPTS[0], "a")
    store.advance()
    store.leave("a")
    store.leave("a")
    assert store.is_idle
    assert (store.counts.num_voices, store.counts.num_building) == (0, 0)


def test_a_build_that_fails_fails_those_who_wait_for_it_only(synthesizer: MelSynthesizer) -> None:
    """Its mel loses frames after it was looked at."""
    broken = VoicePrompt(PROMPTS[0].tokens, PROMPTS[0].mel.clone(), PROMPTS[0].speaker)
    store = VoiceStore(synthesizer, max_bytes=2**30)
    for user, prompt in (("a", broken), ("b", broken), ("c", PROMPTS[1])):
        store.ask(prompt, user)
    broken.mel.resize_(3, build_voice.BINS)
    told = settle(store)
    assert all(isinstance(told[user], InternalError) for user in "ab")
    assert isinstance(told["c"], Voice)
    assert (store.counts.num_failures, store.counts.num_voices) == (1, 1)


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_held(synthesizer: MelSynthesizer) -> None:
    store = VoiceStore(synthesizer, max_bytes=2**30)
    with pytest.raises(AudioError, match="takes 4 and 6"):
        store.ask(VoicePrompt(PROMPTS[0].tokens, PROMPTS[0].mel, torch.zeros(5)), "a")
    assert store.is_idle
    assert store.counts.num_misses == 0


acts = st.lists(
    st.tuples(st.sampled_from(["ask", "leave", "advance"]), st.integers(0, 5), st.integers(0, 3)), max_size=30
)


@settings(max_examples=30, deadline=None)
@given(acts, st.integers(0, 3))
def test_the_store_holds_what_is_used_and_no_more_than_it_may(
    synthesizer: MelSynthesizer, voice_bytes: int, script: list[tuple[str, int, int]], max_voices: int
) -> None:
    store = VoiceStore(synthesizer, max_voices * voice_bytes)
    wanted: dict[str, int] = {}
    for act, number, which in script:
        user = str(number)
        if act == "advance":
            store.advance()
        elif act == "leave":
            store.leave(user)
            wanted.pop(user, None)
        elif user not in wanted:
            store.ask(PROMPTS[which], user)
            wanted[user] = which
        store.answers()
        counts = store.counts
        assert sum(counts.num_users) <= len(wanted)
        assert counts.num_voices + counts.num_building >= len({*wanted.values()})
        num_used = sum(num > 0 for num in counts.num_users)
        assert counts.num_voices <= max(num_used, max_voices)
    settle(store)
    assert sum(store.counts.num_users) == len(wanted)
