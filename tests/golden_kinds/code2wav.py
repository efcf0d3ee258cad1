"""Golden `code2wav`: voices, streams of chunks with all caches, the vocoder alone, buffering and PCM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from antiphon.core.codec_buffer import CodecBuffer, Window
from antiphon.kernels.vocoder_attention.contract import Entries
from antiphon.models.minicpmo.flow import SILENCE_TOKEN, VoiceBuild
from antiphon.models.minicpmo.flow_cache import Parts, SpeechState, Voice, Writing
from antiphon.models.minicpmo.flow_inputs import Destination, FlowRow
from antiphon.models.minicpmo.flow_membership import Listed
from antiphon.models.minicpmo.flow_solve import Solve
from antiphon.models.minicpmo.hift import DILATIONS, HOP_SAMPLES, N_FFT
from antiphon.models.minicpmo.hift_config import UPSAMPLING_RATES
from antiphon.models.minicpmo.vocoder import (
    OVERLAP_FRAMES,
    OVERLAP_SAMPLES,
    VocoderRow,
    VocoderState,
    spliced,
)
from antiphon.stages.code2wav.renderer import unit_pcm
from antiphon.units import OUTPUT_RATE_HZ, SAMPLES_PER_MEL_FRAME
from golden_kinds.code2wav_data import BufferingFacts, ChunkFacts, Golden, StreamFacts
from golden_kinds.company import Company, Turn, remembered
from golden_kinds.report import Comparison, Outcome, scaled

KIND = "code2wav"
TOLERANCE = 1e-4
"""Times the largest value."""

STREAM_TOLERANCES = {"wav": 1e-3, "wav_every_16": 1e-3, "hift_speech_cache": 1e-3, "hift_source_cache": 5e-4}
"""Absolute: here the sine phase has summed up the rounding of f0."""

STREAM_PCM_STEPS = 33
POST_PCM_STEPS = 1

CHUNK_TERMINATORS = (151718, 151721)
"""Text tokens that the reference looks for among codec tokens. No codec token can be one, so only this module does."""


def run(folder: Path, company: Company = Company.ALONE) -> Iterator[Outcome]:
    """One outcome per voice, per chunk, per buffering case; one for each of the parts run alone.

    company: in which the streams speak
    """
    with torch.inference_mode():
        golden = Golden(folder)
        yield _sizes(golden)
        for stream, described in golden.cases.streams.items():
            voice, outcome = _setup(golden, stream, described)
            yield outcome
            yield from _chunks(golden, voice, stream, described, company)
        yield _whole_utterance(golden)
        yield _hift(golden)
        yield _post(golden)
        for case in golden.cases.buffering:
            yield _buffering(golden, case)
    golden.check_all_read()


@contextmanager
def _outputs(*modules: nn.Module) -> Iterator[list[list[Tensor]]]:
    """What each module returns while the context is open (of a tuple: its first element), call by call."""
    seen: list[list[Tensor]] = [[] for _ in modules]

    def keep(outputs: list[Tensor]) -> Callable[[nn.Module, object, Tensor | tuple[Tensor, ...]], None]:
        return lambda _module, _args, out: outputs.append(out[0] if isinstance(out, tuple) else out)

    handles = [module.register_forward_hook(keep(outs)) for module, outs in zip(modules, seen, strict=True)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _sizes(golden: Golden) -> Outcome:
    """What config.json says about the vocoder, which has no configuration file in a checkpoint."""
    found = Comparison(KIND, "sizes")
    said, config = golden.config["hift"], golden.hift.config
    found.equal(config.num_mel_bins, said["in_channels"])
    found.equal(config.base_channels, said["base_channels"])
    found.equal(config.num_harmonics, said["nb_harmonics"] + 1)
    found.equal(config.pitch_channels, said["f0_predictor"]["cond_channels"])
    found.equal(config.upsampling_kernels, said["upsample_kernel_sizes"])
    found.equal(config.resblock_kernels, said["resblock_kernel_sizes"])
    found.equal(config.source_resblock_kernels, said["source_resblock_kernel_sizes"])
    found.equal(UPSAMPLING_RATES, said["upsample_rates"])
    for dilations in (*said["resblock_dilation_sizes"], *said["source_resblock_dilation_sizes"]):
        found.equal(DILATIONS, dilations)
    found.equal((N_FFT, HOP_SAMPLES), list(said["istft_params"].values()))
    found.equal(OUTPUT_RATE_HZ, said["sampling_rate"])
    found.equal(OVERLAP_FRAMES, golden.config["mel_cache_len"])
    found.equal(OVERLAP_SAMPLES, golden.config["source_cache_len"])
    found.equal(SILENCE_TOKEN, golden.config["silence_token"])
    return found.outcome()


def _setup(golden: Golden, stream: str, described: StreamFacts) -> tuple[Voice, Outcome]:
    found = Comparison(KIND, f"{stream}.setup")
    prompt = golden.prompt(stream)
    with _outputs(golden.flow.encoder_proj) as [mus]:
        build = VoiceBuild(golden.synthesizer, prompt)
        while not build.is_done:
            build.advance()
    voice = build.voice
    found.equal([voice.num_tokens, voice.num_frames], [described.prompt_tokens, described.prompt_frames])
    results = {"mu": mus[0][0].mT, "feat": build.mel[0].mT}
    caches = _flow_caches(golden, voice, SpeechState.at_turn_start(voice))
    _compare(golden, found, f"{stream}.setup.", results | caches)
    return voice, found.outcome()


def _chunks(golden: Golden, voice: Voice, stream: str, described: StreamFacts, company: Company) -> list[Outcome]:
    """All chunks of all turns.

    The convolution caches of a chunk were recorded as views of a buffer that the reference reuses: they hold what the
    stream's very last chunk left there. So such a tensor may equal either, and is compared when both are known.
    """
    comparisons: list[Comparison] = []
    tails: list[tuple[Comparison, Tensor]] = []
    tails_name = f"estimator_cnn_cache_step{golden.synthesizer.num_steps - 1}"
    stranger = golden.synthesizer.build_voice(golden.stranger())
    for turn, chunks in enumerate(described.turns):
        state = _TurnState(
            company,
            Turn(company, golden.synthesizer, golden.vocoder, (voice, stranger), golden.no_noise),
            SpeechState.at_turn_start(voice),
            golden.vocoder.at_turn_start(golden.no_noise),
            SpeechState.at_turn_start(voice),
        )
        for index, facts in enumerate(chunks):
            found = Comparison(KIND, f"{stream}.turn{turn}.chunk{index}")
            results = _chunk(golden, voice, state, found, facts)
            comparisons.append(found)
            tails.append((found, results.pop(tails_name)))
            _compare(golden, found, f"{found.case}.", results)
    for found, own in tails:
        if tails_name in golden.under(f"{found.case}."):
            want = golden.read(f"{found.case}.{tails_name}")
            nearest = min((own, tails[-1][1]), key=lambda got: float((got - want).abs().max()))
            found.close(nearest, want, scaled(TOLERANCE, want))
    return [found.outcome() for found in comparisons]


@dataclass(slots=True)
class _TurnState:
    """labels: the same history as `speech`, with the number of its token or frame in the turn as place of each."""

    company: Company
    turn: Turn
    speech: SpeechState
    vocoder: VocoderState
    labels: SpeechState
    num_frames: int = 0


def _chunk(golden: Golden, voice: Voice, state: _TurnState, found: Comparison, facts: ChunkFacts) -> dict[str, Tensor]:
    """Run one chunk, compare what cases.json says of it, and return what may be recorded as tensors."""
    before, vocoder_before = state.speech, state.vocoder
    tokens = golden.read(f"{found.case}.tokens").tolist()
    watched = (golden.flow.encoder_proj, golden.synthesizer.weights.estimator, golden.hift.f0_predictor)
    with _outputs(*watched) as [mus, velocities, pitches]:
        row = FlowRow(tokens, voice, before, facts.last_chunk)
        mel, state.speech = state.turn.sing(row)
        wav, vocoder = state.turn.vocode(VocoderRow(mel.mT, vocoder_before, is_last=facts.last_chunk))
        assert isinstance(vocoder, VocoderState), vocoder
        state.vocoder = vocoder
    if facts.last_chunk:
        again, state.speech = remembered(golden.synthesizer, row)
        found.close(again, mel, scaled(TOLERANCE, mel))
    own = state.company.place
    mu, velocity, pitch_hz = mus[0][own], velocities[0][2 * own : 2 * own + 2], pitches[0][own]
    num_frames = mel.shape[1]
    frames = range(state.num_frames, state.num_frames + num_frames)
    said = Parts(tuple(range(frames.start // 2, frames.stop // 2)), tuple(frames), tuple(frames))
    rules, retention = golden.synthesizer.rules, golden.synthesizer.arena.retention
    state.labels = state.labels.followed_by(Writing(said, 0, voice.tails), voice, retention, rules.kept_tokens)
    state.num_frames += num_frames

    found.equal([len(tokens), num_frames, wav.shape[1]], [facts.tokens, facts.mel_frames, facts.wav_samples])
    found.equal(len(pitch_hz), facts.hift_input_frames)
    found.equal(before.num_past_frames, facts.noise_offset)
    lengths = len(before.reads.steps), len(state.speech.reads.steps)
    found.equal((lengths[0], lengths[0] + num_frames, lengths[1]), facts.estimator_att_len)
    lengths = len(before.reads.frames), len(state.speech.reads.frames)
    found.equal((lengths[0], lengths[0] + num_frames, lengths[1]), facts.conformer_att_len)
    distance = (pitch_hz - 10.0).abs().min()
    found.close(distance, torch.tensor(facts.min_distance_of_f0_to_10_hz), scaled(TOLERANCE, pitch_hz))

    return _flow_caches(golden, voice, state.speech) | {
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "mel": mel[0].mT,
        "mu": mu.mT,
        "velocity_step0": velocity.mT,
        "f0": pitch_hz,
        "wav": wav[0],
        "wav_every_16": wav[0, ::16],
        "pcm": unit_pcm([*wav], is_turn_end=True) * 32768,
        "hift_mel_cache": state.vocoder.mel_tail[0],
        "hift_source_cache": state.vocoder.source_tail[0],
        "hift_speech_cache": state.vocoder.speech_tail[0],
        "ids_estimator": _ids(state.labels.reads.steps, voice.num_frames),
        "ids_conformer_stage1": _ids(state.labels.reads.tokens, voice.num_tokens),
        "ids_conformer_stage2": _ids(state.labels.reads.frames, voice.num_frames),
    }


def _compare(golden: Golden, found: Comparison, prefix: str, results: Mapping[str, Tensor]) -> None:
    """Everything in `results` that is recorded under `prefix`, each with its tolerance."""
    for name in golden.under(prefix):
        if name not in results:
            continue
        want, got = golden.read(prefix + name), results[name]
        if name == "pcm":
            found.close(got, want, STREAM_PCM_STEPS)
        elif not want.is_floating_point():
            found.equal(got, want)
        elif name == "conformer_att_cache":
            _compare_encoder_entries(found, got, want)
        else:
            found.close(got, want, STREAM_TOLERANCES.get(name, scaled(TOLERANCE, want)))


def _compare_encoder_entries(found: Comparison, got: Tensor, want: Tensor) -> None:
    """The second half of the token-rate layers is what nothing reads: only `_flow_caches`' NaN stand for it."""
    is_read = ~got.isnan()
    found.equal(sorted({*is_read.sum(dim=3).flatten().tolist()}), [want.shape[3] // 2, want.shape[3]])
    found.close(torch.where(is_read, got, 0.0), torch.where(is_read, want, 0.0), scaled(TOLERANCE, want))


def _flow_caches(golden: Golden, voice: Voice, speech: SpeechState) -> dict[str, Tensor]:
    """The flow's caches after a chunk in the reference's layout and order."""
    ours, shared, reads = golden.synthesizer.arena.entries, voice.entries, speech.reads
    tokens, frames = _read(ours.tokens, shared.tokens, reads.tokens), _read(ours.frames, shared.frames, reads.frames)
    tokens = F.pad(tokens, (0, 0, 0, frames.shape[-2] - tokens.shape[-2]), value=torch.nan)
    num_steps = golden.synthesizer.num_steps
    last = num_steps - 1
    of_last_step = _read(ours.steps, shared.steps, reads.steps).chunk(num_steps)[last]
    tails = speech.tails
    return {
        "conformer_cnn_cache": torch.cat((tails.lookahead, tails.upsampling), dim=-1),
        "conformer_att_cache": torch.cat((tokens, frames)),
        f"estimator_cnn_cache_step{last}": _conv_cache(tails.convs[0], num_steps)[last],
        f"estimator_att_cache_step{last}_row0": of_last_step[:, 0],
    }


def _conv_cache(convs: Tensor, num_steps: int) -> Tensor:
    """convs: [S L 2, G, 2, C] -> [S, L, G, 2 C, 2]: the tails of both convolutions one after the other."""
    return convs.view(num_steps, -1, 2, *convs.shape[1:]).permute(0, 1, 3, 2, 5, 4).flatten(3, 4)


def _read(ours: Entries, shared: Entries, listed: Listed) -> Tensor:
    """[A, G, H, n, 2 D]: the listed keys and values side by side."""
    packed = [torch.cat((entries.keys, entries.values), dim=-1) for entries in (ours, shared)]
    one_by_one = [packed[0][:, entry] if entry >= 0 else packed[1][:, -1 - entry] for entry in listed]
    return torch.stack(one_by_one, dim=3)


def _ids(listed: Listed, num_prompt: int) -> Tensor:
    ids = [num_prompt + entry if entry >= 0 else -1 - entry for entry in listed]
    return torch.tensor(ids, dtype=torch.int32)


def _whole_utterance(golden: Golden) -> Outcome:
    """The prompt of the first stream and the tokens in one piece, with full attention."""
    found = Comparison(KIND, "full")
    prompt = golden.prompt(next(iter(golden.cases.streams)))
    tokens, want = golden.read("full.tokens"), golden.read("full.mel")
    nobody = golden.synthesizer.nobody(prompt.speaker[None])
    condition = F.pad(prompt.mel, (0, 0, 0, want.shape[1]))
    row = FlowRow((*prompt.tokens, *tokens.tolist()), nobody, SpeechState.at_turn_start(nobody), is_last=True)
    arena = golden.synthesizer.arena
    inputs = golden.synthesizer.inputs([row], [None], Destination(arena.entries, arena.tails), condition[None])
    mel = Solve(golden.synthesizer.weights, arena, inputs).run(nullcontext())
    found.close(mel[0, prompt.mel.shape[0] :].mT, want, scaled(TOLERANCE, want))
    return found.outcome()


def _hift(golden: Golden) -> Outcome:
    found = Comparison(KIND, "hift")
    hift = golden.hift
    mel, short_mel = golden.read("hift.mel")[None], golden.read("hift.short_mel")[None]
    pitch_hz = hift.pitch_hz(mel)
    num_samples = mel.shape[2] * SAMPLES_PER_MEL_FRAME
    no_noise, _ = golden.no_noise.draw(num_samples, hift.config.num_harmonics)
    source = hift.source(pitch_hz, no_noise)
    cached = golden.read("hift.cache_source")[None]
    continued = torch.cat((cached, source[:, cached.shape[1] :]), dim=1)
    noisy_source = hift.source(hift.pitch_hz(short_mel), golden.read("hift.noise")[None])
    results = {
        "f0": pitch_hz,
        "source": source,
        "wav": hift.filter(mel, source),
        "cached_wav": hift.filter(mel, continued),
        "noisy_source": noisy_source,
        "noisy_wav": hift.filter(short_mel, noisy_source),
    }
    for name, got in results.items():
        want = golden.read(f"hift.{name}")
        found.close(got[0], want, scaled(TOLERANCE, want))
    return found.outcome()


def _post(golden: Golden) -> Outcome:
    found = Comparison(KIND, "post")
    tail = golden.vocoder.at_turn_start(golden.no_noise).speech_tail
    for index, facts in enumerate(golden.cases.post):
        speech = golden.read(f"post.chunk{index}.speech")[None]
        overlap = tail.shape[1] // SAMPLES_PER_MEL_FRAME
        found.equal((facts.mel_frames + overlap) * SAMPLES_PER_MEL_FRAME, facts.samples_in)
        found.equal(speech.shape[1], facts.samples_in)
        samples, tail = spliced(speech, tail, is_last=facts.last_chunk)
        found.equal(samples.shape[1], facts.samples_out)
        pcm = unit_pcm([*samples], is_turn_end=True) * 32768
        found.close(pcm, golden.read(f"post.chunk{index}.pcm"), POST_PCM_STEPS)
    return found.outcome()


def _buffering(golden: Golden, case: BufferingFacts) -> Outcome:
    """The windows, and the length of the waveform made of a constant for each, as the recording did."""
    found = Comparison(KIND, f"buffering.{case.name}")
    lookahead = golden.flow.config.encoder.lookahead_tokens
    buffer = CodecBuffer(SILENCE_TOKEN, lookahead)
    tail = golden.vocoder.at_turn_start(golden.no_noise).speech_tail
    for step in case.steps:
        is_flush = step.force_flush or any(token in CHUNK_TERMINATORS for token in step.new_tokens)
        windows: list[Window] = []
        if case.initialized:  # a session without a voice has no buffer here
            windows = buffer.push(step.new_tokens, is_flush=is_flush, is_last=step.is_last)
        found.equal([w.tokens for w in windows], [c.tokens for c in step.calls])
        found.equal([w.is_last for w in windows], [c.last_chunk for c in step.calls])
        found.equal(buffer.tokens if case.initialized else (), step.buffer_after)
        pieces: list[Tensor] = []
        for window, call in zip(windows, step.calls, strict=False):
            rendered_tokens = len(window.tokens) - (0 if window.is_last else lookahead)
            num_frames = 2 * rendered_tokens + tail.shape[1] // SAMPLES_PER_MEL_FRAME
            samples, tail = spliced(torch.zeros(1, num_frames * SAMPLES_PER_MEL_FRAME), tail, is_last=window.is_last)
            found.equal(samples.shape[1], call.pcm_samples)
            pieces.append(torch.full_like(samples[0], (call.pcm_value + 0.5) / 32767))
        found.equal(bool(pieces), step.waveform_samples is not None)
        if pieces:
            pcm = (unit_pcm(pieces, is_turn_end=step.is_last) * 32768).int()
            values = [value for call in step.calls for value in [call.pcm_value] * call.pcm_samples]
            found.equal(len(pcm), step.waveform_samples)
            found.equal(pcm, [0] * step.left_padding + values)
        if step.is_last:
            buffer.reset()
            tail = golden.vocoder.at_turn_start(golden.no_noise).speech_tail
    return found.outcome()
