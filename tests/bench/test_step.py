"""Steps of the stages measured at tiny sizes."""

from __future__ import annotations

from antiphon.bench.contexts import filled_context
from antiphon.bench.results import Quantity
from antiphon.bench.step import MIXED_ROW_TOKENS, StepPlan, run_step
from antiphon.bench.target import RANDOM, target
from antiphon.config import Code2WavConfig, Dtype
from antiphon.core.blocks import BlockPool
from antiphon.core.cache_dtype import CacheDtype
from antiphon.models.minicpmo.source import ModelSize


def test_every_stage_is_timed_by_its_number_of_sessions_device_and_host_apart() -> None:
    on = target(RANDOM, ModelSize.TINY, "cpu", Dtype.FLOAT32)
    plan = StepPlan(
        thinker_sessions=(1, 2),
        talker_sessions=(2,),
        code2wav_sessions=(1, 2),
        context_tokens=90,
        talker_tokens=40,
        mixed_tokens=(3 * MIXED_ROW_TOKENS,),
        voice_s=1.0,
        num_steps=2,
        num_repetitions=2,
        has_graphs=True,
        code2wav=Code2WavConfig(),
        kv_dtype=CacheDtype.MODEL,
    )
    result = run_step(on, plan)
    parts = (Quantity.STEP_DEVICE_TIME, Quantity.STEP_HOST_TIME, Quantity.STEP_TIME, Quantity.STEP_IN_A_ROW_TIME)
    by_case: dict[tuple[str, int], list[Quantity]] = {(figure.case, figure.number): [] for figure in result.figures}
    for figure in result.figures:
        by_case[figure.case, figure.number].append(figure.quantity)
        assert figure.summary.num == 4
        assert figure.summary.p50 > 0.05, "nothing was computed"
    frames = 150  # a voice of a second, of which 50 frames stay, and 2 s of speech
    assert by_case == {
        ("thinker, decode, 90 tokens each", 1): [*parts],
        ("thinker, decode, 90 tokens each", 2): [*parts],
        (f"thinker, {MIXED_ROW_TOKENS} new tokens a session, 90 tokens each", 3 * MIXED_ROW_TOKENS): [*parts],
        ("talker, 40 tokens each", 2): [*parts],
        (f"DiT solve, {frames} frames each", 1): [*parts],
        (f"code2wav, {frames} frames each", 1): [*parts],
        (f"DiT solve, {frames} frames each", 2): [*parts],
        (f"code2wav, {frames} frames each", 2): [*parts],
    }


def test_a_full_context_is_one_that_a_session_could_have() -> None:
    pool = BlockPool(20, 16)
    context = filled_context(pool, 200, max_tokens=200)
    context.check()
    assert context.num_tokens == 200
    assert 0 < context.num_anchor_tokens < 200
    context.free()
    assert pool.num_free_blocks == 20
