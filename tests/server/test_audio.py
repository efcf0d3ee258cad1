"""Clients' audio: every spelling, every split of the bytes, G.711 against its definition, and what is refused."""

from __future__ import annotations

import base64
import struct
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.server.audio import (
    FORMATS,
    MAX_AUDIO_BYTES,
    MAX_RATE_HZ,
    MIN_RATE_HZ,
    AudioFault,
    Decoder,
    Encoder,
    Encoding,
    Samples,
    WireAudioError,
    WireFormat,
    decode_base64,
    named_format,
)
from antiphon.server.g711 import Companding, alaw, ulaw
from antiphon.units import INPUT_RATE_HZ, OUTPUT_RATE_HZ

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import audioop

RATES_HZ = (4_000, 8_000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000, 192_000)
TEN_MINUTES_S = 600
formats = st.builds(WireFormat, st.sampled_from(Encoding), st.sampled_from(RATES_HZ))


def sine(rate_hz: int, duration_s: float = 2.0, frequency_hz: float = 440.0, amplitude: float = 0.5) -> Samples:
    times = np.arange(int(rate_hz * duration_s)) / rate_hz
    return (amplitude * np.sin(2 * np.pi * frequency_hz * times)).astype(np.float32)


def loudness(samples: Samples) -> float:
    """The amplitude of the sine in the middle, away from both ends."""
    middle = samples[len(samples) // 4 : -len(samples) // 4].astype(np.float64)
    return float(np.sqrt(2 * np.mean(middle**2)))


def in_format(samples: Samples, form: WireFormat) -> bytes:
    """At the samples' own rate: Encoder's last step alone."""
    encoder = Encoder(WireFormat(form.encoding, OUTPUT_RATE_HZ))
    return encoder.encode(samples) + encoder.flush()


def decoded(payload: bytes, form: WireFormat) -> Samples:
    decoder = Decoder(form)
    return np.concatenate([decoder.decode(payload), decoder.flush()])


def fault_of(refused: pytest.ExceptionInfo[WireAudioError]) -> AudioFault:
    return AudioFault(refused.value.code)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("audio/pcm", WireFormat(Encoding.PCM16, 24_000)),
        ("pcm16", WireFormat(Encoding.PCM16, 24_000)),
        ("PCM16", WireFormat(Encoding.PCM16, 24_000)),
        ("pcm_s16le", WireFormat(Encoding.PCM16, 16_000)),
        ("s16le", WireFormat(Encoding.PCM16, 16_000)),
        ("pcm_f32le", WireFormat(Encoding.FLOAT32, 16_000)),
        ("audio/pcmu", WireFormat(Encoding.ULAW, 8_000)),
        ("g711_ulaw", WireFormat(Encoding.ULAW, 8_000)),
        ("audio/pcma", WireFormat(Encoding.ALAW, 8_000)),
        ("g711_alaw", WireFormat(Encoding.ALAW, 8_000)),
    ],
)
def test_a_spelling_stands_for_a_format(name: str, form: WireFormat) -> None:
    assert named_format(name) == form
    assert named_format(name).at(48_000) == WireFormat(form.encoding, 48_000)


def test_an_unknown_spelling_is_refused_and_not_repeated_at_length() -> None:
    with pytest.raises(WireAudioError) as refused:
        named_format("audio/" + "x" * 10_000)
    assert fault_of(refused) is AudioFault.UNKNOWN_FORMAT
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("rate_hz", [MIN_RATE_HZ - 1, MAX_RATE_HZ + 1, 0, -8_000])
def test_a_rate_out_of_bounds_is_refused(rate_hz: int) -> None:
    with pytest.raises(WireAudioError) as refused:
        FORMATS["pcm16"].at(rate_hz)
    assert fault_of(refused) is AudioFault.RATE


@pytest.mark.parametrize("text", ["AAA", "AA==AA==", "AA A", "AAAA\n", "AA-_", "AAAA=", "é", "=", "A"])
def test_what_is_not_strictly_base64_is_refused(text: str) -> None:
    with pytest.raises(WireAudioError) as refused:
        decode_base64(text)
    assert fault_of(refused) is AudioFault.BASE64


def test_audio_up_to_the_limit_is_taken_and_more_is_not() -> None:
    most = bytes(MAX_AUDIO_BYTES)
    assert decode_base64(base64.b64encode(most).decode()) == most
    decoder = Decoder(WireFormat(Encoding.ULAW, INPUT_RATE_HZ))
    assert len(decoder.decode(most)) == MAX_AUDIO_BYTES
    with pytest.raises(WireAudioError) as refused:
        decode_base64("A" * (MAX_AUDIO_BYTES // 3 * 4 + 4))
    assert fault_of(refused) is AudioFault.TOO_LARGE
    with pytest.raises(WireAudioError) as refused:
        decoder.decode(most + b"\0")
    assert fault_of(refused) is AudioFault.TOO_LARGE


def test_a_stream_that_ends_inside_a_sample_is_refused_and_keeps_the_rest() -> None:
    payload = in_format(sine(48_000), WireFormat(Encoding.PCM16, 48_000))
    whole, decoder = decoded(payload, WireFormat(Encoding.PCM16, 48_000)), Decoder(WireFormat(Encoding.PCM16, 48_000))
    samples = decoder.decode(payload + b"\x01")
    with pytest.raises(WireAudioError) as refused:
        decoder.flush()
    assert fault_of(refused) is AudioFault.CUT_SAMPLE
    np.testing.assert_array_equal(np.concatenate([samples, decoder.flush()]), whole)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_piece_that_is_not_finite_counts_as_never_sent(value: float) -> None:
    form = WireFormat(Encoding.FLOAT32, 48_000)
    payload = sine(48_000).tobytes()
    decoder = Decoder(form)
    before = decoder.decode(payload[:40_002])
    with pytest.raises(WireAudioError) as refused:
        decoder.decode(bytes(2) + struct.pack("<f", value) + bytes(2))
    assert fault_of(refused) is AudioFault.NOT_FINITE
    after = [decoder.decode(payload[40_002:]), decoder.flush()]
    np.testing.assert_array_equal(np.concatenate([before, *after]), decoded(payload, form))


def test_float_samples_beyond_full_scale_are_clipped() -> None:
    payload = np.array([3e38, -2.0, 0.25], "<f4").tobytes()
    assert decoded(payload, WireFormat(Encoding.FLOAT32, INPUT_RATE_HZ)).tolist() == [1, -1, 0.25]


@settings(max_examples=60)
@given(
    form=formats,
    num_samples=st.integers(0, 4000),
    cuts=st.lists(st.integers(0, 4000), max_size=12),
    seed=st.integers(0),
)
def test_any_split_of_the_bytes_gives_the_same_samples(
    form: WireFormat, num_samples: int, cuts: list[int], seed: int
) -> None:
    samples = np.random.default_rng(seed).uniform(-1, 1, num_samples).astype(np.float32)
    sent = in_format(samples, form)
    decoder = Decoder(form)
    edges = sorted({0, len(sent), *(min(cut, len(sent)) for cut in cuts)})
    pieces = [decoder.decode(sent[start:end]) for start, end in zip(edges, edges[1:], strict=False)]
    np.testing.assert_array_equal(np.concatenate([*pieces, decoder.flush()]), decoded(sent, form))


@settings(max_examples=40)
@given(form=formats, cuts=st.lists(st.integers(0, 6000), max_size=12))
def test_any_split_of_the_speech_gives_the_same_bytes(form: WireFormat, cuts: list[int]) -> None:
    speech = sine(OUTPUT_RATE_HZ, 0.25)
    whole, pieces = Encoder(form), Encoder(form)
    edges = sorted({0, len(speech), *cuts})
    sent = [pieces.encode(speech[start:end]) for start, end in zip(edges, edges[1:], strict=False)]
    assert b"".join([*sent, pieces.flush()]) == whole.encode(speech) + whole.flush()


def test_what_follows_a_flush_is_a_stream_of_its_own() -> None:
    form = WireFormat(Encoding.PCM16, 8_000)
    speech, encoder, decoder = sine(OUTPUT_RATE_HZ), Encoder(form), Decoder(form)
    sent = [encoder.encode(speech) + encoder.flush() for _ in range(2)]
    assert sent[0] == sent[1]
    heard = [np.concatenate([decoder.decode(sent[0]), decoder.flush()]) for _ in range(2)]
    np.testing.assert_array_equal(heard[0], heard[1])


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("rate_hz", RATES_HZ)
def test_a_sine_keeps_its_loudness_in_both_directions(encoding: Encoding, rate_hz: int) -> None:
    form = WireFormat(encoding, rate_hz)
    heard = decoded(in_format(sine(rate_hz), form), form)
    assert loudness(heard) == pytest.approx(0.5, rel=0.01)
    encoder = Encoder(form)
    sent = encoder.encode(sine(OUTPUT_RATE_HZ)) + encoder.flush()
    assert loudness(decoded(sent, WireFormat(encoding, INPUT_RATE_HZ))) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("rate_hz", RATES_HZ)
def test_ten_minutes_lose_or_gain_no_sample(rate_hz: int) -> None:
    form = WireFormat(Encoding.ULAW, rate_hz)
    decoder, encoder = Decoder(form), Encoder(form)
    second, speech = bytes(rate_hz), np.zeros(OUTPUT_RATE_HZ, np.float32)
    num_heard = sum(len(decoder.decode(second)) for _ in range(TEN_MINUTES_S)) + len(decoder.flush())
    num_sent = sum(len(encoder.encode(speech)) for _ in range(TEN_MINUTES_S)) + len(encoder.flush())
    assert (num_heard, num_sent) == (TEN_MINUTES_S * INPUT_RATE_HZ, TEN_MINUTES_S * rate_hz)


def test_16_bit_samples_at_the_models_rates_pass_through_unchanged_and_at_once() -> None:
    pcm = np.arange(-32768, 32768, dtype="<i2")
    samples = Decoder(WireFormat(Encoding.PCM16, INPUT_RATE_HZ)).decode(pcm.tobytes())
    assert Encoder(WireFormat(Encoding.PCM16, OUTPUT_RATE_HZ)).encode(samples) == pcm.tobytes()


def test_speech_beyond_full_scale_is_clipped() -> None:
    sent = Encoder(WireFormat(Encoding.PCM16, OUTPUT_RATE_HZ)).encode(np.array([2, -2, 1], np.float32))
    assert np.frombuffer(sent, "<i2").tolist() == [32767, -32768, 32767]


def test_ulaw_codes_are_those_of_table_2() -> None:
    for code in range(256):
        segment, place = ~code >> 4 & 7, ~code & 15
        # The middle of a step, of a 14-bit magnitude; segment s starts at 2^(s+5) - 33, its steps are 2^(s+1) wide.
        magnitude = 2 ** (segment + 5) - 33 + place * 2 ** (segment + 1) + 2**segment
        assert ulaw().samples[code] == 4 * (magnitude if code & 0x80 else -magnitude)


def test_alaw_codes_are_those_of_table_1() -> None:
    for code in range(256):
        segment, place = (code ^ 0x55) >> 4 & 7, (code ^ 0x55) & 15
        # The middle of a step, of a 13-bit magnitude; the two lowest segments are linear.
        magnitude = 2 * place + 1 if segment == 0 else 2 ** (segment + 4) + (2 * place + 1) * 2 ** (segment - 1)
        assert alaw().samples[code] == 8 * (magnitude if code & 0x80 else -magnitude)


@pytest.mark.parametrize(("law", "second_zeros"), [(ulaw(), [0x7F]), (alaw(), [])], ids=["ulaw", "alaw"])
def test_every_code_comes_back_as_itself(law: Companding, second_zeros: list[int]) -> None:
    codes = np.delete(np.arange(256, dtype=np.uint8), second_zeros)
    np.testing.assert_array_equal(law.compress(law.expand(codes)), codes)


def test_every_sample_gets_the_code_that_telephones_give_it() -> None:
    samples = np.arange(-32768, 32768, dtype="<i2")
    assert ulaw().compress(samples).tobytes() == audioop.lin2ulaw(samples.tobytes(), 2)
    assert alaw().compress(samples).tobytes() == audioop.lin2alaw(samples.tobytes(), 2)
