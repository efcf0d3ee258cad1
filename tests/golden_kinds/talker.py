"""Golden kind talker: a dialogue from token ids and hidden states to codec tokens and the cache, and the sampler."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from pydantic import BaseModel
from safetensors.torch import load_file
from torch import Tensor

import build
from antiphon.core.codec_buffer import CodecBuffer
from antiphon.core.messages import Address, Handoff
from antiphon.core.sampling import CodecSampling, Draws
from antiphon.kernels.sampling.contract import CodecRules
from antiphon.kernels.sampling.op import codec_scores
from antiphon.models.minicpmo.config import talker_config
from antiphon.models.minicpmo.talker import TalkerNetwork
from antiphon.stages.paged import CacheConfig
from antiphon.stages.stepping import StepLoop
from antiphon.stages.talker.choosing import CodecDraw
from antiphon.stages.talker.speaker import CodecStep
from antiphon.stages.talker.stage import TalkerStage
from antiphon.stages.talker.state import TalkerSession
from golden_kinds.report import Comparison, Outcome, scaled
from golden_kinds.weights import filled

KIND = "talker"
TOLERANCE = 1e-4
PROBABILITY_TOLERANCE = 1e-5
LOG_PROBABILITY_TOLERANCE = 1e-4
SILENCE_TOKEN = 4218
LOOKAHEAD_TOKENS = 3


class Code2WavCall(BaseModel):
    tokens: list[int]
    last_chunk: bool


class Unit(BaseModel):
    ids: list[int]
    end_of_turn: bool
    condition_len: int
    text_start_pos: int
    min_new_tokens: int
    max_new_token: int
    kv_len_before: int
    kv_len_after: int
    sampled: list[int]
    new_tokens: list[int]
    stopped_on_eos: bool
    next_text_start_pos: int
    force_flush: bool
    code2wav_calls: list[Code2WavCall]
    code2wav_buffer_after: list[int]


class SamplerRow(BaseModel):
    step: int
    min_new_tokens: int
    eos_masked: bool
    nonzero_probs: int
    top3_ids: list[int]
    top3_probs: list[float]


class Cases(BaseModel):
    turns: list[list[Unit]]
    sampler: list[SamplerRow]


class Sampling(BaseModel):
    temperature: float
    repetition_penalty: float
    repetition_past_window: int

    def settings(self) -> CodecSampling:
        return CodecSampling(self.temperature, self.repetition_penalty, self.repetition_past_window)


def run(folder: Path) -> Iterator[Outcome]:
    """Compare every case of the folder."""
    raw = json.loads((folder / "config.json").read_text())
    config, sampling = talker_config(raw), Sampling.model_validate(raw).settings()
    weights = load_file(folder / "weights.safetensors")
    used = {name: tensor for name, tensor in weights.items() if not name.startswith("tts.projector_spk.")}
    network = filled(lambda: TalkerNetwork(config), used, "tts.")
    network.prepare()
    cases = Cases.model_validate_json((folder / "cases.json").read_text())
    expected = load_file(folder / "cases.safetensors")
    dialogue = Dialogue(network, sampling)
    for t, turn in enumerate(cases.turns):
        for u, unit in enumerate(turn):
            name = f"turn{t}.unit{u}"
            want = {key.removeprefix(f"{name}."): x for key, x in expected.items() if key.startswith(f"{name}.")}
            yield dialogue.compare(name, unit, want)
    empty = Comparison(KIND, "empty")
    condition = network.condition(torch.empty(0, dtype=torch.int64), torch.empty(0, config.llm_hidden_size))
    empty.close(condition, expected["empty.condition"], scaled(TOLERANCE, expected["empty.condition"]))
    yield empty.outcome()
    for number, row in enumerate(cases.sampler):
        want = {key: expected[f"sampler.{number}.{key}"] for key in ("raw_logits", "history", "probs")}
        yield _sampler(f"sampler.{number}", sampling, row, want)


class Dialogue:
    """Two sessions hear the same dialogue: one through `speak`, one through its steps, for what `speak` hides."""

    def __init__(self, network: TalkerNetwork, sampling: CodecSampling) -> None:
        self._network = network
        cache = CacheConfig.for_tokens(2 * network.config.max_position_tokens, num_segments=2)
        self._stage = TalkerStage(network, cache)
        self._spoken, self._stepped = (
            self._stage.open(TalkerSession(name, sampling, Draws.MOST_LIKELY, seed=0)) for name in ("spoken", "stepped")
        )
        self._speaker = self._stage.speaker
        # Its own loop on the speaker's decoder, for what the speaker's loop does not return.
        self._codes: StepLoop[CodecDraw, tuple[CodecStep, ...]]
        self._codes = StepLoop(self._speaker.decoder, self._speaker.chooser)
        self._buffer = CodecBuffer(SILENCE_TOKEN, LOOKAHEAD_TOKENS)

    def compare(self, name: str, unit: Unit, want: Mapping[str, Tensor]) -> Outcome:
        compared = Comparison(KIND, name)
        size = self._network.config.llm_hidden_size
        ids = want["ids"] if unit.ids else torch.empty(0, dtype=torch.int64)
        hidden = want["hidden"] if unit.ids else torch.empty(0, size)
        compared.equal(ids, unit.ids)
        self._compare_steps(compared, self._network.condition(ids, hidden), unit, want)
        before = self._spoken.context.num_tokens
        compared.equal(before, unit.text_start_pos)
        handoff = Handoff(Address(KIND, 0, 0, 0), 0.0, 0, tuple(unit.ids), hidden, unit.end_of_turn)
        chunk = build.run_alone(self._speaker.loop, self._speaker.speak(self._spoken, handoff))
        self._spoken.context.check()
        compared.equal(chunk.codec_tokens, unit.new_tokens)
        compared.equal(chunk.is_first_of_turn, unit.force_flush)
        compared.equal(self._spoken.context.num_tokens, unit.next_text_start_pos)
        windows = self._buffer.push(chunk.codec_tokens, is_flush=chunk.is_first_of_turn, is_last=chunk.ends_turn)
        compared.equal([window.tokens for window in windows], [call.tokens for call in unit.code2wav_calls])
        compared.equal([window.is_last for window in windows], [call.last_chunk for call in unit.code2wav_calls])
        if chunk.ends_turn:
            self._buffer.reset()
        compared.equal(self._buffer.tokens, unit.code2wav_buffer_after)
        return compared.outcome()

    def _compare_steps(self, compared: Comparison, condition: Tensor, unit: Unit, want: Mapping[str, Tensor]) -> None:
        state = self._stepped
        compared.equal(condition.shape[0], unit.condition_len)
        compared.close(condition, want["condition"], scaled(TOLERANCE, want["condition"]))
        compared.equal(state.context.num_tokens, unit.kv_len_before)
        steps = build.run_alone(self._codes, self._speaker.codes(state, condition, min_tokens=unit.min_new_tokens))
        states = torch.stack([step.hidden for step in steps])
        logits = self._network.logits(states)
        compared.equal([step.token for step in steps], unit.sampled)
        compared.equal(steps[-1].is_eos, unit.stopped_on_eos)
        compared.equal(len(steps) <= unit.max_new_token, True)
        compared.equal(state.context.num_tokens, unit.kv_len_after)
        compared.close(states, want["states"], scaled(TOLERANCE, want["states"]))
        compared.equal(logits.argmax(-1), want["raw_argmax"])
        compared.close(logits.amax(-1), want["raw_max"], scaled(TOLERANCE, want["raw_max"]))
        if "raw_logits_step0" in want:
            compared.close(logits[0], want["raw_logits_step0"], scaled(TOLERANCE, want["raw_logits_step0"]))
        if "keys" in want:
            (ring,) = state.context.segments()
            size = self._speaker.decoder.pool.block_size
            slots = [block * size + offset for block in ring.blocks for offset in range(size)]
            cache = self._speaker.decoder.cache
            for got, part in ((cache.keys, "keys"), (cache.values, "values")):
                rows = got.flatten(1, 2)[:, slots[: ring.num_tokens]].transpose(1, 2)
                compared.close(rows, want[part], scaled(TOLERANCE, want[part]))
        if unit.end_of_turn:
            state.context.free()


def _sampler(name: str, sampling: CodecSampling, row: SamplerRow, want: Mapping[str, Tensor]) -> Outcome:
    compared = Comparison(KIND, name)
    rules = CodecRules(
        history=want["history"][-sampling.repetition_window_tokens :][None],
        repetition_penalty=torch.tensor([sampling.repetition_penalty]),
        temperature=torch.tensor([sampling.temperature]),
        is_eos_masked=torch.tensor([row.step < row.min_new_tokens]),
        is_greedy=torch.tensor([True]),
        seeds=torch.tensor([0]),
        counters=torch.tensor([0]),
    )
    scores = codec_scores(want["raw_logits"][None], rules)[0]
    compared.equal(bool(scores[-1].isneginf()), row.eos_masked)
    compared.close(scores.softmax(-1), want["probs"], PROBABILITY_TOLERANCE)
    is_possible = want["probs"] > 0
    compared.equal(int(is_possible.sum()), row.nonzero_probs)
    log_probs = scores.log_softmax(-1)[is_possible]
    compared.close(log_probs, want["probs"][is_possible].log(), LOG_PROBABILITY_TOLERANCE)
    top = scores.softmax(-1).topk(len(row.top3_ids))
    compared.equal(top.indices, row.top3_ids)
    compared.close(top.values, torch.tensor(row.top3_probs), PROBABILITY_TOLERANCE)
    return compared.outcome()
