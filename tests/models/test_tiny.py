"""The tiny checkpoint: whole, small, the same every time, and a talker that listens and stops whatever it hears."""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterator
from pathlib import Path

import onnxruntime as ort
import pytest
import torch
from rich.console import Console
from torch import Tensor

from antiphon.call import UnitResult
from antiphon.config import Dtype, EngineConfig, Placement, SessionConfig, everywhere
from antiphon.core.duplex import DuplexConfig
from antiphon.core.window import BasicWindow
from antiphon.engine import Engine
from antiphon.errors import ConfigError
from antiphon.inspection import inspect, render
from antiphon.models.minicpmo.audio_encoder import AudioEncoder
from antiphon.models.minicpmo.audio_features import MelExtractor
from antiphon.models.minicpmo.audio_stream import MelStream
from antiphon.models.minicpmo.checkpoint import VOICE_MODEL_FILES, open_checkpoint
from antiphon.models.minicpmo.tiny import write_tiny
from antiphon.models.minicpmo.tiny.behaviour import Signal
from antiphon.models.minicpmo.tokens import load_tokenizer
from antiphon.models.minicpmo.voice import VoicePreparer
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.thinker.state import UnitInput
from antiphon.units import OUTPUT_RATE_HZ, UNIT_SAMPLES
from build import model

NUM_CODES = 6561
SECONDS_OF_A_CYCLE = 29
"""Then the audio encoder forgets and the clock starts anew."""


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_it_is_the_same_every_time_and_small(tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "again")
    assert digests(tmp_path / "again") == digests(tiny_checkpoint)
    assert sum(path.stat().st_size for path in tiny_checkpoint.rglob("*")) < 10e6


def test_it_is_complete_and_said_to_be_noise(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    inspection = inspect(checkpoint)
    assert inspection.is_complete
    assert checkpoint.is_tiny
    assert not checkpoint.missing_voice_models
    file = io.StringIO()
    render(inspection, Console(file=file, width=200))
    assert "NOISE" in file.getvalue()


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="already there"):
        write_tiny(tmp_path / "mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "thesis.txt"]


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="already there"):
        write_tiny(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_tiny(tmp_path / "file" / "below")


def test_it_appears_with_its_parents_and_leaves_nothing_else_behind(tmp_path: Path) -> None:
    write_tiny(tmp_path / "a" / "b")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    (tmp_path / "empty").mkdir()
    write_tiny(tmp_path / "empty")
    assert digests(tmp_path / "empty") == digests(tmp_path / "a" / "b")


def test_it_may_say_visible_characters_and_spaces_only(tiny_checkpoint: Path) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    allowed = [token for token in range(256) if token not in tokenizer.special.forbidden]
    assert {tokenizer.decode((token,)) for token in allowed} == set(map(chr, range(0x20, 0x7F)))


@pytest.mark.parametrize("num_frames", [1, 4, 5, 403])
def test_the_speech_tokenizer_gives_a_code_for_four_frames(tiny_checkpoint: Path, num_frames: int) -> None:
    session = ort.InferenceSession(open_checkpoint(tiny_checkpoint).vocoder_folder / VOICE_MODEL_FILES[1])
    mel = noise(1, 128, num_frames).numpy()
    (codes,) = session.run(None, {"feats": mel, "feats_length": torch.tensor([num_frames], dtype=torch.int32).numpy()})
    assert codes.shape == (1, -(-num_frames // 4))
    assert str(codes.dtype) == "int32"
    assert 0 <= codes.min() <= codes.max() < NUM_CODES


def test_a_voice_depends_on_the_recording(tiny_checkpoint: Path) -> None:
    speaker, tokens = (open_checkpoint(tiny_checkpoint).vocoder_folder / name for name in VOICE_MODEL_FILES)
    preparer = VoicePreparer(tokens, speaker, 80)
    one, other = (preparer.prepare(0.1 * recording, 16_000) for recording in noise(2, 1, 32_000))
    assert len(one.tokens) == 50
    assert len(set(one.tokens)) > 10
    assert one.tokens != other.tokens
    assert one.speaker.shape == (192,)
    assert not torch.equal(one.speaker, other.speaker)


@pytest.fixture(scope="module")
def ears(tiny_checkpoint: Path) -> AudioEncoder:
    return model(tiny_checkpoint).audio


def urges(ears: AudioEncoder, seconds: Tensor) -> list[float]:
    """The urge to speak after each second of sound. seconds: [n, UNIT_SAMPLES]"""
    stream, state = MelStream(MelExtractor(ears.config.num_mel_bins)), ears.new_state()
    found: list[float] = []
    for samples in seconds:
        stream.push(samples)
        chunk = stream.take()
        assert chunk is not None
        found.append(float(ears.encode_chunks([(chunk, state)])[0, -1, Signal.URGE]))
    return found


SOUNDS = {
    "silence": torch.zeros(UNIT_SAMPLES),
    "noise": 0.05 * noise(UNIT_SAMPLES),
    "full scale": noise(UNIT_SAMPLES).sign(),
    "constant": torch.ones(UNIT_SAMPLES),
}


@pytest.mark.parametrize("sound", SOUNDS.values(), ids=SOUNDS.keys())
def test_whatever_it_hears_it_wants_to_speak_and_to_listen_by_turns(ears: AudioEncoder, sound: Tensor) -> None:
    wanted = [urge > 0 for urge in urges(ears, sound.expand(2 * SECONDS_OF_A_CYCLE, -1))]
    runs = [(wants, len(list(run))) for wants, run in itertools.groupby(wanted)]
    assert sum(wants for wants, _ in runs) >= 8
    assert all(num_seconds <= 7 for _, num_seconds in runs)
    assert 0.3 < sum(wanted) / len(wanted) < 0.7


def test_what_it_hears_matters(ears: AudioEncoder) -> None:
    silent, loud = (urges(ears, sound * noise(5, UNIT_SAMPLES)) for sound in (0.0, 0.3))
    assert max(abs(one - other) for one, other in zip(silent, loud, strict=True)) > 0.05


@pytest.fixture(scope="module")
def call(tiny_checkpoint: Path) -> list[UnitResult]:
    """What 32 seconds of silence come to, with a window that slides."""
    session = SessionConfig(window=BasicWindow(300, 200), duplex=DuplexConfig(num_forced_listens=0))
    engine = Engine.load(
        open_checkpoint(tiny_checkpoint),
        EngineConfig(everywhere("cpu", Placement.HERE), Dtype.FLOAT32),
        session,
    )
    voice = VoicePrompt(tuple(range(20)), noise(40, engine.model.flow.num_mel_bins), noise(192))
    running = engine.open("call", session, torch.empty(0), voice)
    return [running.run_unit(UnitInput(torch.zeros(UNIT_SAMPLES), ())) for _ in range(32)]


def test_it_listens_and_its_turns_last_some_seconds_and_end(call: list[UnitResult]) -> None:
    speaking = [not result.outcome.is_listen for result in call]
    turns = [len(list(run)) for speaks, run in itertools.groupby(speaking) if speaks]
    ends = [handoff for result in call for handoff in result.outcome.handoffs if handoff.ends_turn]
    assert len(turns) >= 4
    assert all(2 <= num_units <= 10 for num_units in turns)
    assert len(ends) >= len(turns) - 1
    assert 8 < sum(speaking) < 24


def test_it_says_readable_words(call: list[UnitResult]) -> None:
    text = "".join(text for result in call for text in result.outcome.texts)
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz .!?")
    assert len(set(text.split())) > 10


def test_it_talks_at_random_and_sometimes_stops_early(call: list[UnitResult]) -> None:
    chunks = [speech.chunk for result in call for speech in result.speech]
    tokens = [token for chunk in chunks for token in chunk.codec_tokens]
    assert len(set(tokens)) > 0.8 * len(tokens)
    lengths = {len(chunk.codec_tokens) for chunk in chunks}
    assert 25 in lengths
    assert len(lengths) > 1


def test_its_noise_can_be_heard_and_does_not_clip(call: list[UnitResult]) -> None:
    samples = torch.cat([speech.samples for result in call for speech in result.speech])
    assert len(samples) > 8 * OUTPUT_RATE_HZ
    assert 0.02 < samples.square().mean().sqrt() < 0.3
    assert (samples.abs() > 0.95).float().mean() < 0.001
