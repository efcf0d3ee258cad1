"""The command line as a newcomer uses it: what it writes, what it says, what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from antiphon.__main__ import EXIT_CONTEXT_FULL, app
from antiphon.config import Code2WavConfig
from antiphon.console import EXIT_BAD_INPUT
from antiphon.units import INPUT_RATE_HZ, OUTPUT_RATE_HZ

CALLER = Path(__file__).parents[1] / "examples" / "caller.flac"
"""The recording that ships; tests use its first seconds."""


@dataclass(frozen=True, slots=True)
class Desk:
    """A folder to work in, a checkpoint and a short recording."""

    folder: Path
    checkpoint: Path
    recording: Path

    @property
    def output(self) -> Path:
        return self.folder / "out.wav"

    def run(self, *flags: str) -> Result:
        return antiphon("run", str(self.recording), "-o", str(self.output), "--model", str(self.checkpoint), *flags)

    def events(self, *flags: str) -> list[dict[str, object]]:
        """Events of a run that must succeed."""
        log = self.folder / "events.jsonl"
        done = self.run("--events", str(log), *flags)
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture
def desk(tmp_path: Path, tiny_checkpoint: Path) -> Desk:
    samples, rate_hz = sf.read(CALLER, frames=round(6.4 * INPUT_RATE_HZ), dtype="float32")
    recording = tmp_path / "caller.wav"
    sf.write(recording, samples, rate_hz)
    return Desk(tmp_path, tiny_checkpoint, recording)


def antiphon(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def whole(value: object) -> int:
    """A whole number out of an event's JSON."""
    assert isinstance(value, int)
    return value


def one_line_of_error(done: Result) -> str:
    assert done.exit_code == EXIT_BAD_INPUT, done.output
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("antiphon: ")
    return lines[0]


def test_a_run_writes_caller_and_model_on_one_clock(desk: Desk) -> None:
    done = desk.run()
    assert done.exit_code == 0, done.output
    written, rate_hz = sf.read(desk.output, always_2d=True)
    assert rate_hz == OUTPUT_RATE_HZ
    assert written.shape[1] == 2
    assert len(written) >= 7 * OUTPUT_RATE_HZ
    caller, caller_rate_hz = sf.read(desk.recording)
    at_input_rate = np.interp(np.arange(len(caller)) / caller_rate_hz, np.arange(len(written)) / rate_hz, written[:, 0])
    assert np.corrcoef(at_input_rate, caller)[0, 1] > 0.95
    model = written[:, 1]
    assert not model[: 4 * OUTPUT_RATE_HZ].any(), "three units are forced to listen, so nothing is said before 4 s"
    assert 0.001 < np.abs(model).max() < 0.99
    assert "NOISE" in done.stdout
    assert "listen" in done.stdout
    assert "speak" in done.stdout


def test_a_voice_may_be_longer_than_the_engine_is_made_for_otherwise(desk: Desk) -> None:
    voice = desk.folder / "voice.wav"
    seconds = int(Code2WavConfig().voice_s) + 1
    sf.write(voice, np.tile(sf.read(CALLER, frames=INPUT_RATE_HZ)[0], seconds), INPUT_RATE_HZ)
    assert desk.events("--voice", str(voice))[-1]["code"] == "completed"


def test_mono_holds_the_models_voice_only(desk: Desk) -> None:
    assert desk.run().exit_code == 0
    both, _ = sf.read(desk.output, always_2d=True)
    assert desk.run("--mono").exit_code == 0
    mono, _ = sf.read(desk.output, always_2d=True)
    np.testing.assert_array_equal(mono[:, 0], both[:, 1])


def test_a_seed_repeats_a_run_and_another_one_changes_it(desk: Desk) -> None:
    first, again, other = desk.events("--seed", "5"), desk.events("--seed", "5"), desk.events("--seed", "6")
    assert [event.get("token_ids") for event in first] == [event.get("token_ids") for event in again]
    assert [event.get("token_ids") for event in first] != [event.get("token_ids") for event in other]


def test_greedy_runs_do_not_depend_on_the_seed(desk: Desk) -> None:
    assert desk.run("--greedy", "--seed", "1").exit_code == 0
    one = desk.output.read_bytes()
    assert desk.run("--greedy", "--seed", "2").exit_code == 0
    assert desk.output.read_bytes() == one


def test_events_tell_the_whole_call_in_order(desk: Desk) -> None:
    events = desk.events()
    kinds = [event["type"] for event in events]
    assert kinds[0] == "session_opened"
    assert kinds[-1] == "session_ended"
    assert events[-1]["code"] == "completed"
    units = [event for event in events if event["type"] == "unit_decided"]
    assert [unit["unit"] for unit in units] == list(range(7))
    assert [unit["at_s"] for unit in units] == [second + 1.0 for second in range(7)]
    starts = [float(str(event["start_s"])) for event in events if event["type"] == "speech_queued"]
    assert starts == sorted(starts)


@pytest.mark.parametrize("slide", ["rotate_query", "rotate_keys", "reprefill"])
@pytest.mark.parametrize(
    "window", [("basic", "--high", "150", "--low", "100"), ("context", "--max-units", "2", "--previous-tokens", "9")]
)
def test_every_window_slides_in_every_way(desk: Desk, slide: str, window: tuple[str, ...]) -> None:
    events = desk.events("--window", *window, "--slide", slide)
    slides = [event for event in events if event["type"] == "window_slid"]
    assert slides
    if window[0] == "basic":
        assert all(whole(event["num_context_tokens"]) <= 100 for event in slides)
    else:
        assert [event["dropped_units"] for event in slides] == [[unit] for unit in range(len(slides))]


def test_both_exact_slides_give_the_same_call(desk: Desk) -> None:
    window = ("--high", "150", "--low", "100", "--greedy")
    one, other = desk.events(*window, "--slide", "rotate_query"), desk.events(*window, "--slide", "rotate_keys")
    assert [event.get("token_ids") for event in one] == [event.get("token_ids") for event in other]


def test_a_voice_and_instructions_lengthen_the_prompt(desk: Desk) -> None:
    plain = desk.events()[0]["num_prompt_tokens"]
    told = desk.events("--instructions", "Streaming Omni Conversation. Be brief.")[0]["num_prompt_tokens"]
    voice = desk.folder / "voice.wav"
    sf.write(voice, sf.read(CALLER, frames=3 * INPUT_RATE_HZ)[0], INPUT_RATE_HZ)
    spoken = desk.events("--voice", str(voice))[0]["num_prompt_tokens"]
    assert isinstance(plain, int)
    assert told == plain + len(" Be brief.")
    assert spoken == plain + 30


def test_pictures_ride_along_one_per_second(desk: Desk) -> None:
    camera = desk.folder / "camera"
    camera.mkdir()
    for second in range(2):
        Image.new("RGB", (640, 480), (200, 60 * second, 20)).save(camera / f"{second}.jpg")
    tokens = {}
    for name, flags in {"blind": (), "seeing": ("--video", str(camera))}.items():
        events = desk.events("--greedy", *flags)
        units = [event for event in events if event["type"] == "unit_decided"]
        tokens[name] = [whole(unit["num_context_tokens"]) for unit in units]
    per_picture = 64 + 2
    seen = [seeing - blind for seeing, blind in zip(tokens["seeing"], tokens["blind"], strict=True)]
    assert seen[:3] == [per_picture, 2 * per_picture, 2 * per_picture]


def test_a_full_context_ends_the_call_and_keeps_the_audio_so_far(desk: Desk) -> None:
    log = desk.folder / "events.jsonl"
    done = desk.run("--window", "off", "--max-tokens", "130", "--events", str(log))
    assert done.exit_code == EXIT_CONTEXT_FULL
    assert "context_length_exceeded" in done.stdout
    last = json.loads(log.read_text().splitlines()[-1])
    assert last["code"] == "context_length_exceeded"
    written, rate_hz = sf.read(desk.output, always_2d=True)
    assert len(written) >= last["at_s"] * rate_hz > 0


def bad_recordings(folder: Path) -> Iterator[Path]:
    yield folder / "missing.wav"
    (folder / "text.wav").write_text("no sound at all")
    yield folder / "text.wav"
    (folder / "empty.wav").touch()
    yield folder / "empty.wav"
    sf.write(folder / "poisoned.wav", np.array([0.1] * 40000 + [np.nan] * 10, dtype=np.float32), 16000, subtype="FLOAT")
    yield folder / "poisoned.wav"


def test_a_bad_recording_gives_one_line_and_no_file(desk: Desk) -> None:
    for recording in bad_recordings(desk.folder):
        log = desk.folder / "events.jsonl"
        bad = Desk(desk.folder, desk.checkpoint, recording)
        assert recording.name in one_line_of_error(bad.run("--events", str(log)))
        assert not desk.output.exists()
        assert not log.exists()
        assert not list(desk.folder.glob(".*")), "no part of a file is left"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--high", "100", "--low", "100"), "below its high limit"),
        (("--high", "50", "--low", "100"), "below its high limit"),
        (("--low", "-1"), "not negative"),
        (("--high", "9000"), "over the model's length of 8192"),
        (("--window", "off", "--max-tokens", "9000"), "over the model's length of 8192"),
        (("--window", "context", "--max-units", "0"), "at least 1 unit"),
        (("--window", "context", "--max-units", "5000"), "over the model's length of 8192"),
        (("--window", "off", "--max-tokens", "20"), "no room for a unit"),
        (("--window", "context", "--high", "100"), "--high is no limit"),
        (("--high", "200", "--low", "100", "--instructions", "word " * 100), "the prompt has"),
        (("--instructions", "word " * 1000), "the prompt has"),
        (("--voice", "nowhere.wav"), "nowhere.wav"),
        (("--video", "nowhere"), "nowhere"),
        (("--device", "warp"), "warp"),
        (("--model", "nowhere/at-all/or/else"), "nowhere"),
    ],
)
def test_settings_that_cannot_work_give_one_line_and_no_file(desk: Desk, flags: tuple[str, ...], said: str) -> None:
    assert said in one_line_of_error(desk.run(*flags))
    assert not desk.output.exists()


def test_a_checkpoint_that_lacks_or_bends_a_tensor_is_refused_by_name(desk: Desk) -> None:
    bent = desk.folder / "bent"
    shutil.copytree(desk.checkpoint, bent)
    weights = load_file(bent / "model.safetensors")
    del weights["llm.model.norm.weight"]
    weights["tts.emb_text.weight"] = weights["tts.emb_text.weight"][:-1].clone()
    save_file(weights, bent / "model.safetensors")
    line = one_line_of_error(Desk(desk.folder, bent, desk.recording).run())
    assert "llm.model.norm.weight" in line
    assert "tts.emb_text.weight" in line
    assert not desk.output.exists()
    inspected = antiphon("inspect", str(bent))
    assert inspected.exit_code == EXIT_BAD_INPUT
    assert "llm.model.norm.weight" in inspected.stdout


def test_inspect_tells_what_a_whole_checkpoint_holds(tiny_checkpoint: Path) -> None:
    done = antiphon("inspect", str(tiny_checkpoint))
    assert done.exit_code == 0, done.output
    for part in ("thinker", "talker", "vocoder"):
        assert part in done.stdout
    assert "speaking session" not in done.stdout


def test_inspect_tells_what_sessions_take_when_it_is_asked(tiny_checkpoint: Path) -> None:
    done = antiphon("inspect", "--memory", str(tiny_checkpoint))
    assert done.exit_code == 0, done.output
    for line in ("thinker KV", "voice, bfloat16", "per listening session", "flow, voice_first, float32"):
        assert line in done.stdout


def test_a_checkpoint_of_1_0_7_listens_and_speaks(desk: Desk, tiny_causal_checkpoint: Path) -> None:
    """Its vocoder makes other sound of the same words, as much of it and at the same times."""
    logs, samples = [], []
    for checkpoint in (desk.checkpoint, tiny_causal_checkpoint):
        logs.append(Desk(desk.folder, checkpoint, desk.recording).events("--greedy"))
        samples.append(sf.read(desk.output, always_2d=True)[0][:, 1])
    kinds = [[event["type"] for event in log] for log in logs]
    assert kinds[0] == kinds[1]
    assert len(samples[0]) == len(samples[1])
    assert not np.array_equal(*samples)
    loudest = np.abs(samples[1]).max()
    assert 0.01 < loudest < 1
    assert "minicpmo-utils 1.0.7" in antiphon("inspect", str(tiny_causal_checkpoint)).stdout


def test_tiny_writes_a_checkpoint_of_the_generation_that_is_asked_for(tmp_path: Path) -> None:
    assert antiphon("tiny", str(tmp_path / "new"), "--vocoder", "1.0.7").exit_code == 0
    assert "minicpmo-utils 1.0.7" in antiphon("inspect", str(tmp_path / "new")).stdout
    assert antiphon("tiny", str(tmp_path / "old"), "--vocoder", "1.0.6").exit_code != 0


def test_tiny_writes_a_checkpoint_once(tmp_path: Path) -> None:
    assert antiphon("tiny", str(tmp_path / "tiny")).exit_code == 0
    assert (tmp_path / "tiny" / "config.json").is_file()
    assert "tiny" in one_line_of_error(antiphon("tiny", str(tmp_path / "tiny")))
