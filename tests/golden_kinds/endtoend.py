"""Golden kind endtoend: a whole checkpoint in the official layout, recording and pictures in, tokens and PCM out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from pydantic import BaseModel, RootModel
from safetensors.torch import load_file
from torch import Tensor

from antiphon.call import UnitResult
from antiphon.config import Dtype, EngineConfig, Placement, SessionConfig, everywhere
from antiphon.core.duplex import DuplexConfig
from antiphon.core.sampling import Draws
from antiphon.core.window import SlideMode
from antiphon.engine import Call, Engine
from antiphon.errors import AntiphonError
from antiphon.models.minicpmo.checkpoint import Checkpoint, open_checkpoint
from antiphon.models.minicpmo.image import decode_picture
from antiphon.models.minicpmo.prompt import PromptText
from antiphon.models.minicpmo.tokens import TextTokenizer, load_tokenizer
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.thinker.state import UnitInput
from antiphon.units import OUTPUT_SAMPLES_PER_UNIT, UNIT_SAMPLES
from golden_kinds.report import Comparison, Outcome
from golden_kinds.thinker import Mode, WindowLimits, exact_slides

KIND = "endtoend"
NEAR_STEPS, NEAR_SHARE = 33, 0.999
"""So many steps of 16-bit PCM (1e-3 of full scale) on this share of the samples."""
FAR_STEPS = 5e-3 * 32768
CPU = torch.device("cpu")


class Unit(BaseModel):
    pictures: list[str]
    tokens: list[int]
    is_listen: bool
    end_of_turn: bool
    text: str
    codec_tokens: list[int] | None
    samples: int
    context_after: int
    retained_units: list[int]
    previous_token_ids: list[int]


class Case(BaseModel):
    mode: Mode
    window: WindowLimits
    prefix: str
    suffix: str
    force_listen_count: int
    wave_start: int
    ref_audio: tuple[int, int] | None
    prompt_length: int
    units: list[Unit]


class Cases(RootModel[dict[str, Case]]):
    pass


@dataclass(frozen=True, slots=True)
class Golden:
    """A folder's checkpoint and inputs. waveform: [n] float32, 16 kHz."""

    folder: Path
    checkpoint: Checkpoint
    tokenizer: TextTokenizer
    waveform: Tensor
    flow_noise: Tensor


def run(folder: Path) -> Iterator[Outcome]:
    """Compare every case alone, with every slide that means what the reference means, then all cases in one batch."""
    checkpoint = open_checkpoint(folder / "checkpoint")
    tokenizer = load_tokenizer(checkpoint.folder)
    expected = load_file(folder / "cases.safetensors")
    waveform = expected["waveform_i16"].float() / 32768
    golden = Golden(folder, checkpoint, tokenizer, waveform, expected["rand_noise"])
    cases = Cases.model_validate_json((folder / "cases.json").read_text()).root
    wants = {
        name: {key.removeprefix(f"{name}."): x for key, x in expected.items() if key.startswith(f"{name}.")}
        for name in cases
    }
    for name, case in cases.items():
        is_sliding = len(case.units[-1].retained_units) < len(case.units)
        for slide in exact_slides(is_sliding=is_sliding):
            yield from _play(golden, [Part(f"{name}.{slide.value}", case, slide, wants[name])])
    slides = cycle(exact_slides(is_sliding=True))
    yield from _play(
        golden, [Part(f"{name}.in_a_crowd", case, next(slides), wants[name]) for name, case in cases.items()]
    )


@dataclass(frozen=True, slots=True)
class Part:
    """A case as one call of an engine."""

    name: str
    case: Case
    slide: SlideMode
    want: Mapping[str, Tensor]

    def session(self, tokenizer: TextTokenizer) -> SessionConfig:
        case = self.case
        return SessionConfig(
            prompt=PromptText(case.prefix, case.suffix),
            window=case.window.policy(case.mode, tokenizer),
            slide=self.slide,
            duplex=DuplexConfig(num_forced_listens=case.force_listen_count),
            draws=Draws.MOST_LIKELY,
            max_pictures=max(len(unit.pictures) for unit in case.units),
        )

    def heard(self, golden: Golden, number: int) -> UnitInput:
        start = self.case.wave_start + number * UNIT_SAMPLES
        names = self.case.units[number].pictures
        pictures = tuple(decode_picture(golden.folder / "images" / name) for name in names)
        return UnitInput(golden.waveform[start : start + UNIT_SAMPLES], pictures)


def _play(golden: Golden, parts: Sequence[Part]) -> Iterator[Outcome]:
    """Run the parts as calls that advance together, each as long as it has units."""
    sessions = [part.session(golden.tokenizer) for part in parts]
    # Their windows differ, so one place more than calls makes up for those that need more than the one it is made for.
    config = EngineConfig(everywhere("cpu", Placement.HERE), Dtype.FLOAT32, max_calls=len(parts) + 1)
    largest = max(sessions, key=lambda session: session.window.peak_tokens(num_prompt_tokens=0, max_unit_tokens=100))
    engine = Engine.from_noise(golden.checkpoint, config, largest, golden.flow_noise)
    compared = [Comparison(KIND, part.name) for part in parts]
    calls = [_open(engine, golden, part, session) for part, session in zip(parts, sessions, strict=True)]
    for call, part, comparison in zip(calls, parts, compared, strict=True):
        comparison.equal(call.opened.num_prompt_tokens, part.case.prompt_length)
    pcm: list[list[Tensor]] = [[] for _ in parts]
    for number in range(max(len(part.case.units) for part in parts)):
        running = [index for index, part in enumerate(parts) if number < len(part.case.units)]
        results = engine.run_units([(calls[index], parts[index].heard(golden, number)) for index in running])
        for index, result in zip(running, results, strict=True):
            if isinstance(result, AntiphonError):
                raise result
            unit = parts[index].case.units[number]
            _compare_unit(compared[index], golden.tokenizer, result, unit)
            said = [speech.samples for speech in result.speech] or [torch.zeros(OUTPUT_SAMPLES_PER_UNIT)]
            pcm[index].append(torch.cat(said))
            compared[index].equal(pcm[index][-1].numel(), unit.samples)
    for call, part, comparison, samples in zip(calls, parts, compared, pcm, strict=True):
        call.close()
        _compare_pcm(comparison, torch.cat(samples) * 32768, part.want["pcm"])
        yield comparison.outcome()


def _open(engine: Engine, golden: Golden, part: Part, session: SessionConfig) -> Call:
    want = part.want
    prompt = VoicePrompt(tuple(want["voice.tokens"].tolist()), want["voice.mel"], want["voice.speaker"])
    span = part.case.ref_audio
    reference = golden.waveform[slice(*span)] if span else torch.empty(0)
    return engine.open(part.name, session, reference, prompt)


def _compare_unit(compared: Comparison, tokenizer: TextTokenizer, got: UnitResult, want: Unit) -> None:
    outcome = got.outcome
    compared.equal(outcome.token_ids, want.tokens)
    compared.equal(outcome.is_listen, want.is_listen)
    compared.equal(outcome.num_context_tokens, want.context_after)
    compared.equal(outcome.retained_units, want.retained_units)
    compared.equal(outcome.previous_ids, want.previous_token_ids)
    said = tuple(token for handoff in outcome.handoffs for token in handoff.token_ids)
    compared.equal(tokenizer.decode(said), want.text)
    codec = [token for speech in got.speech for token in speech.chunk.codec_tokens]
    compared.equal(codec if got.speech else None, want.codec_tokens)
    compared.equal(any(handoff.ends_turn for handoff in outcome.handoffs), want.end_of_turn)


def _compare_pcm(compared: Comparison, got: Tensor, want: Tensor) -> None:
    if got.shape != want.shape:
        compared.equal(got.shape, want.shape)
        return
    errors = (got - want.float()).abs()
    num_near = math.ceil(NEAR_SHARE * errors.numel())
    compared.close(errors.sort().values[num_near - 1], torch.tensor(0.0), NEAR_STEPS)
    compared.close(errors.max(), torch.tensor(0.0), FAR_STEPS)
