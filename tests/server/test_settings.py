"""How options are set, what is refused, and what becomes of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.config import Code2WavConfig, Dtype, EngineConfig, Placement, StageConfig, WindowMode, everywhere
from antiphon.core.batch_grid import BatchGrid, LengthGrid
from antiphon.core.cache_dtype import CacheDtype
from antiphon.core.window import BasicWindow, ContextWindow, OffWindow
from antiphon.errors import ConfigError
from antiphon.models.minicpmo.flow_compute import Compute
from antiphon.models.minicpmo.flow_membership import Retention
from antiphon.server.for_engine import engine_config, session_config
from antiphon.server.settings import Resolved, from_environment, from_file, from_flags, options, resolve
from server.tables import documented, moved_metrics, present

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "antiphon"
PROFILES = sorted((ROOT / "deploy").glob("*.yaml"))


def written(folder: Path, text: str) -> Path:
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def resolved(**flags: str) -> Resolved:
    return resolve(from_flags(flags))


def test_flags_win_over_the_environment_that_over_the_file_and_that_over_defaults(tmp_path: Path) -> None:
    file = from_file(written(tmp_path, "port: 1\nmax_calls: 2\nhost: file\n"))
    environment = from_environment({"ANTIPHON_PORT": "3", "ANTIPHON_MAX_CALLS": "4", "HOME": "/"})
    found = resolve(from_flags({"port": "5", "host": None}), environment, file)
    assert (found.settings.port, found.settings.max_calls, found.settings.host) == (5, 4, "file")
    lines = list(found.lines())
    assert "port = 5  (flag --port)" in lines
    assert "max_calls = 4  (environment variable ANTIPHON_MAX_CALLS)" in lines
    assert f"host = file  (host in file {tmp_path / 'config.yaml'})" in lines
    assert "drain_s = 30.0  (default)" in lines
    assert "code2wav_grid = 1,2,4,8  (default)" in lines
    assert [line.split(" = ")[0] for line in lines] == list(options())


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"port": "x"}, "flag --port is 'x': input should be a valid integer"),
        ({"port": "65536"}, "flag --port is '65536': input should be less than or equal to 65535"),
        ({"max_calls": "0"}, "flag --max-calls is '0': input should be greater than or equal to 1"),
        ({"max_calls": "1.5"}, "flag --max-calls is '1.5': input should be a valid integer"),
        ({"speaking_share": "0"}, "flag --speaking-share is '0': input should be greater than 0"),
        ({"speaking_share": "nan"}, "flag --speaking-share is 'nan'"),
        ({"drain_s": "inf"}, "flag --drain-s is 'inf'"),
        ({"window": "round"}, "flag --window is 'round': input should be 'off', 'basic' or 'context'"),
        ({"thinker_device": "gpu"}, "flag --thinker-device is 'gpu'"),
        ({"dtype": "int8"}, "flag --dtype is 'int8': input should be 'float32' or 'bfloat16'"),
        ({"code2wav_retention": "all"}, "is 'all': input should be 'reference' or 'voice_first'"),
        ({"code2wav_dtype": "float64"}, "flag --code2wav-dtype is 'float64'"),
        ({"code2wav_voice_s": "0"}, "flag --code2wav-voice-s is '0': input should be greater than 0"),
        ({"code2wav_grid": "1,two"}, "flag --code2wav-grid is '1,two': give whole numbers, by commas"),
        ({"code2wav_grid": "2,4"}, "flag --code2wav-grid is '2,4': batch sizes must ascend from 1"),
        ({"code2wav_grid": ""}, "flag --code2wav-grid is '': batch sizes must ascend from 1"),
        ({"max_cals": "3"}, "flag --max-cals is no option; did you mean max_calls?"),
        ({"tls_key_file": "k"}, "belong together; give both or none (flag --tls-key-file)"),
        ({"kv_dtype": "float8"}, "flag --kv-dtype is 'float8'"),
        ({"kv_dtype": "float8_e4m3", "slide": "rotate_keys"}, "(flag --kv-dtype, flag --slide)"),
        ({"kv_dtype": "float8_e4m3", "slide": "rotate_keys"}, "take slide rotate_query or reprefill"),
        ({"window_low_tokens": "9000"}, "the first one lower (flag --window-low-tokens)"),
        ({"max_calls_per_key": "2"}, "not higher (flag --max-calls-per-key)"),
    ],
)
def test_what_is_wrong_is_told_with_source_option_value_and_what_is_allowed(
    flags: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolved(**flags)
    assert complaint in str(refused.value)


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    file, environment = from_file(written(tmp_path, "port: x\n")), from_environment({"ANTIPHON_MAX_CALS": "1"})
    with pytest.raises(ConfigError) as refused:
        resolve(from_flags({"thinker_device": "gpu"}), environment, file)
    for part in ("flag --thinker-device", "environment variable ANTIPHON_MAX_CALS is no option", "port in file"):
        assert part in str(refused.value)
    assert "factory" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- a\n", "is a list"),
        ("port\n", "is a str"),
        ("port: {a: 1}\n", "port in file .* is a mapping"),
        ("port: [1, 2]\n", "port in file .* is '1,2'"),
        ("prot: 1\n", "prot in file .* is no option; did you mean port"),
        ("port: '\n", "cannot be read"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        resolve(from_file(written(tmp_path, text)))
    with pytest.raises(ConfigError, match="cannot be read"):
        from_file(tmp_path / "none.yaml")


def test_a_file_takes_lists_and_the_window_that_is_off(tmp_path: Path) -> None:
    text = "window: off\nallowed_origins: [https://a.example, https://b.example]\ncode2wav_grid: [1, 2, 16]\n"
    settings = resolve(from_file(written(tmp_path, text))).settings
    assert settings.window is WindowMode.OFF
    assert settings.allowed_origins == ("https://a.example", "https://b.example")
    assert settings.code2wav_grid == BatchGrid((1, 2, 16))
    assert resolved(allowed_origins=" https://a.example , ").settings.allowed_origins == ("https://a.example",)


def test_empty_text_takes_a_file_back(tmp_path: Path) -> None:
    file = from_file(written(tmp_path, "api_keys_file: /keys\n"))
    assert resolve(file).settings.api_keys_file == Path("/keys")
    assert resolve(from_environment({"ANTIPHON_API_KEYS_FILE": ""}), file).settings.api_keys_file is None


def test_the_speech_model_is_a_file_or_energy(tmp_path: Path) -> None:
    assert resolved().settings.vad_model is None
    assert resolved(vad_model="/flag.onnx").settings.vad_model == Path("/flag.onnx")
    file = from_file(written(tmp_path, "vad_model: /file.onnx\n"))
    assert resolve(from_environment({"ANTIPHON_VAD_MODEL": "/variable.onnx"}), file).settings.vad_model == Path(
        "/variable.onnx"
    )
    found = resolve(from_flags({"vad_model": ""}), file)
    assert found.settings.vad_model is None
    assert "vad_model = none  (flag --vad-model)" in list(found.lines())


def test_what_is_not_said_follows_from_what_is() -> None:
    assert resolved().settings.dtype is Dtype.FLOAT32
    assert resolved(thinker_device="cuda:1").settings.dtype is Dtype.BFLOAT16
    assert resolved(thinker_device="cuda", dtype="float32").settings.dtype is Dtype.FLOAT32
    assert resolved(max_calls="7").settings.max_calls_per_key == 7


def test_an_engine_gets_what_the_operator_said() -> None:
    settings = resolved(
        thinker_device="cuda:0",
        talker_device="cuda:1",
        code2wav_device="cuda:2",
        talker_placement="process",
        code2wav_placement="here",
        max_calls="4",
        speaking_share="0.5",
        max_prompt_tokens="100",
        max_stored_prompt_bytes="1",
        max_stored_voice_bytes="2",
        code2wav_retention="voice_first",
        code2wav_dtype="bfloat16",
        code2wav_voice_s="7.5",
        code2wav_grid="1, 3",
        code2wav_compute="tf32",
        code2wav_chunk_tokens="5, 25",
        kv_dtype="float8_e4m3",
    ).settings
    config = engine_config(settings)
    stages = config.stages
    assert stages.thinker == StageConfig("cuda:0", Placement.THREAD)
    assert stages.talker == StageConfig("cuda:1", Placement.PROCESS)
    assert stages.code2wav == StageConfig("cuda:2", Placement.HERE)
    code2wav = Code2WavConfig(
        Retention.VOICE_FIRST, Dtype.BFLOAT16, 7.5, BatchGrid((1, 3)), Compute.TF32, LengthGrid((5, 25))
    )
    assert config == EngineConfig(stages, Dtype.BFLOAT16, 4, 100, 0.5, True, 1, 2, code2wav, 1, CacheDtype.FLOAT8_E4M3)


def test_what_an_operator_does_not_say_is_as_an_engine_has_it() -> None:
    assert engine_config(resolved().settings) == EngineConfig(everywhere("cpu"), Dtype.FLOAT32)


def test_a_call_that_asks_for_nothing_gets_the_operators_window() -> None:
    limits = {"window_max_tokens": "50", "window_high_tokens": "40", "window_low_tokens": "30"}
    limits |= {"window_max_units": "6", "window_previous_max_tokens": "9"}
    windows = {"off": OffWindow(50), "basic": BasicWindow(40, 30), "context": ContextWindow(6, 9, (1, 2))}
    for mode, window in windows.items():
        settings = resolved(
            window=mode, slide="reprefill", max_pictures="2", max_slices="3", max_text_tokens="4", **limits
        )
        session = session_config(settings.settings, marker=(1, 2))
        assert session.window == window
        assert (session.slide.value, session.max_pictures, session.max_slices, session.max_text_tokens) == (
            "reprefill",
            2,
            3,
            4,
        )


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_a_profile_is_valid(profile: Path) -> None:
    session_config(resolve(from_file(profile)).settings, marker=())


def test_no_two_profiles_are_the_same() -> None:
    found = [resolve(from_file(profile)).settings for profile in PROFILES]
    assert len(found) == 7
    assert len({settings.model_dump_json() for settings in (*found, resolved().settings)}) == len(found) + 1
    stages = engine_config(found[-1]).stages
    assert (stages.thinker.device, stages.talker.device, stages.code2wav.device) == ("cuda:0", "cuda:1", "cuda:1")


def test_every_option_is_read_by_code() -> None:
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.name != "settings.py"]
    read = {option for option in options() for text in sources if re.search(rf"settings\.{option}\b", text)}
    assert set(options()) == read


@pytest.mark.parametrize(
    ("document", "headers", "table"), list(documented()), ids=["options", "metrics", "refusals", "codes"]
)
def test_the_documentation_has_what_the_code_has(document: str, headers: tuple[str, ...], table: str) -> None:
    assert present(document, headers) == table, "run tests/server/tables.py"


def test_everything_that_is_counted_can_be_counted_and_names_its_unit() -> None:
    families = list(moved_metrics().registry.collect())
    for family in families:
        assert family.name.startswith("antiphon_")
        assert any(sample.value for sample in family.samples), f"{family.name} never moves"
    seconds = [family for family in families if family.type == "histogram"]
    assert all(family.name.endswith("_seconds") for family in seconds)


def test_settings_are_read_without_torch() -> None:
    program = "import sys, antiphon.server.for_engine, antiphon.server.logs; print('torch' in sys.modules)"
    environment = {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "False"
