"""Golden `code2wav`: voices, streams of chunks with all caches, the vocoder alone, buffering and PCM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from antiphon.core.codec_buffer import CodecBuffer, Window
from antiphon.models.minicpmo.flow import SILENCE_TOKEN, FlowRow
from antiphon.models.minicpmo.flow_cache import (
    EncoderCache,
    FlowCache,
    KeysValues,
    SpeechState,
    StepCache,
    Voice,
)
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
from golden_kinds.code2wav_data import RULES, BufferingFacts, ChunkFacts, Golden, StreamFacts
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


def run(folder: Path) -> Iterator[Outcome]:
    """One outcome per voice, per chunk, per buffering case; one for each of the parts run alone."""
    with torch.inference_mode():
        golden = Golden(folder)
        yield _sizes(golden)
        for stream, described in golden.cases.streams.items():
            voice, outcome = _setup(golden, stream, described)
            yield outcome
            yield from _chunks(golden, voice, stream, described)
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
    synthesizer = golden.synthesizer
    prompt = golden.prompt(stream)
    with _outputs(golden.flow.encoder_proj) as [mus]:
        voice = synthesizer.build_voice(prompt)
    found.equal([voice.num_tokens, voice.num_frames], [described.prompt_tokens, described.prompt_frames])
    lookahead = (SILENCE_TOKEN,) * golden.flow.config.encoder.lookahead_tokens
    nobody = synthesizer.nobody(prompt.speaker[None])
    row = FlowRow((*prompt.tokens, *lookahead), nobody, SpeechState.at_turn_start(nobody))
    feat, _ = synthesizer.render([row], prompt.mel[None], is_last=False)
    results = {"mu": mus[0][0].mT, "feat": feat[0].mT}
    _compare(golden, found, f"{stream}.setup.", results | _flow_caches(voice, SpeechState.at_turn_start(voice)))
    return voice, found.outcome()


def _chunks(golden: Golden, voice: Voice, stream: str, described: StreamFacts) -> list[Outcome]:
    """All chunks of all turns.

    The convolution caches of a chunk were recorded as views of a buffer that the reference reuses: they hold what the
    stream's very last chunk left there. So such a tensor may equal either, and is compared when both are known.
    """
    comparisons: list[Comparison] = []
    tails: list[tuple[Comparison, Tensor]] = []
    tails_name = f"estimator_cnn_cache_step{golden.synthesizer.num_steps - 1}"
    for turn, chunks in enumerate(described.turns):
        state = _TurnState(
            SpeechState.at_turn_start(voice),
            golden.vocoder.at_turn_start(golden.no_noise),
            SpeechState.at_turn_start(_labelled_voice(voice)),
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
    """labels: the same history as `speech`, with the id of its token or frame in place of each key."""

    speech: SpeechState
    vocoder: VocoderState
    labels: SpeechState
    num_frames: int = 0


def _chunk(golden: Golden, voice: Voice, state: _TurnState, found: Comparison, facts: ChunkFacts) -> dict[str, Tensor]:
    """Run one chunk, compare what cases.json says of it, and return what may be recorded as tensors."""
    before, vocoder_before = state.speech, state.vocoder
    tokens = golden.read(f"{found.case}.tokens").tolist()
    watched = (golden.flow.encoder_proj, golden.flow.decoder.estimator, golden.hift.f0_predictor)
    with _outputs(*watched) as [mus, velocities, pitches]:
        row = FlowRow(tokens, voice, before)
        ((mel, state.speech),) = golden.synthesizer.speak([row], is_last=facts.last_chunk)
        piece = VocoderRow(mel.mT, vocoder_before, is_last=facts.last_chunk)
        ((wav, state.vocoder),) = golden.vocoder.speak([piece])
    num_frames = mel.shape[1]
    labelled_voice = _labelled_voice(voice)
    first = voice.num_frames + state.num_frames
    state.labels = state.labels.followed_by(_labels(first, first + num_frames), labelled_voice, RULES.kept_tokens)
    state.num_frames += num_frames

    found.equal([len(tokens), num_frames, wav.shape[1]], [facts.tokens, facts.mel_frames, facts.wav_samples])
    found.equal(pitches[0].shape[1], facts.hift_input_frames)
    found.equal(before.num_past_frames(voice), facts.noise_offset)
    lengths = _estimator_past(voice, before).num_entries, _estimator_past(voice, state.speech).num_entries
    found.equal((lengths[0], lengths[0] + num_frames, lengths[1]), facts.estimator_att_len)
    lengths = _joined(before.past_frames(voice)), _joined(state.speech.past_frames(voice))
    found.equal((lengths[0], lengths[0] + num_frames, lengths[1]), facts.conformer_att_len)
    distance = (pitches[0] - 10.0).abs().min()
    found.close(distance, torch.tensor(facts.min_distance_of_f0_to_10_hz), scaled(TOLERANCE, pitches[0]))

    return _flow_caches(voice, state.speech) | {
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "mel": mel[0].mT,
        "mu": mus[0][0].mT,
        "velocity_step0": velocities[0].mT,
        "f0": pitches[0][0],
        "wav": wav[0],
        "wav_every_16": wav[0, ::16],
        "pcm": unit_pcm([*wav], is_turn_end=True) * 32768,
        "hift_mel_cache": state.vocoder.mel_tail[0],
        "hift_source_cache": state.vocoder.source_tail[0],
        "hift_speech_cache": state.vocoder.speech_tail[0],
        "ids_estimator": _ids(_estimator_past(labelled_voice, state.labels)),
        "ids_conformer_stage1": _ids(KeysValues.joined(state.labels.past_tokens(labelled_voice))),
        "ids_conformer_stage2": _ids(KeysValues.joined(state.labels.past_frames(labelled_voice))),
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


def _flow_caches(voice: Voice, speech: SpeechState) -> dict[str, Tensor]:
    """The flow's caches after a chunk in the reference's layout and order."""
    tokens = _packed(KeysValues.joined(speech.past_tokens(voice)))
    frames = _packed(KeysValues.joined(speech.past_frames(voice)))
    tokens = F.pad(tokens, (0, 0, 0, frames.shape[-2] - tokens.shape[-2]), value=torch.nan)
    last = len(speech.cache.steps) - 1
    tails = speech.cache.steps[last].conv_tails
    return {
        "conformer_cnn_cache": torch.cat(
            (speech.cache.encoder.lookahead_tail, speech.cache.encoder.upsampling_tail), dim=-1
        ),
        "conformer_att_cache": torch.cat((tokens, frames)),
        f"estimator_cnn_cache_step{last}": tails.transpose(1, 2).flatten(2, 3),
        f"estimator_att_cache_step{last}_row0": _packed(_estimator_past(voice, speech, last))[:, 0],
    }


def _packed(entries: KeysValues) -> Tensor:
    return torch.cat((entries.keys, entries.values), dim=-1)


def _estimator_past(voice: Voice, speech: SpeechState, step: int = 0) -> KeysValues:
    return KeysValues.joined(speech.past_of_step(step, voice))


def _joined(parts: Sequence[KeysValues]) -> int:
    return sum(part.num_entries for part in parts)


def _labels(start: int, end: int) -> FlowCache:
    """A cache of the frames start:end that holds their ids instead of keys and values."""
    nothing = torch.zeros(1, 1, 0)
    frames = _labelled(range(start, end))
    return FlowCache(
        EncoderCache(nothing, nothing, _labelled(range(start // 2, end // 2)), frames),
        (StepCache(frames, nothing),),
    )


def _labelled(ids: range) -> KeysValues:
    keys = torch.tensor(ids, dtype=torch.int32).reshape(1, 1, 1, -1, 1)
    return KeysValues(keys, keys)


def _labelled_voice(voice: Voice) -> Voice:
    return Voice(voice.speaker, _labels(0, voice.num_frames))


def _ids(entries: KeysValues) -> Tensor:
    return entries.keys.flatten()


def _whole_utterance(golden: Golden) -> Outcome:
    """The prompt of the first stream and the tokens in one piece, with full attention."""
    found = Comparison(KIND, "full")
    prompt = golden.prompt(next(iter(golden.cases.streams)))
    tokens, want = golden.read("full.tokens"), golden.read("full.mel")
    nobody = golden.synthesizer.nobody(prompt.speaker[None])
    condition = F.pad(prompt.mel, (0, 0, 0, want.shape[1]))
    row = FlowRow((*prompt.tokens, *tokens.tolist()), nobody, SpeechState.at_turn_start(nobody))
    mel, _ = golden.synthesizer.render([row], condition[None], is_last=True)
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
