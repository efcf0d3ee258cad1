"""What a client may choose, what that means for its call, and the code of whatever is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from antiphon.config import WindowLimits, WindowMode
from antiphon.core.window import BasicWindow, ContextWindow, OffWindow
from antiphon.loading import Running
from antiphon.models.minicpmo.prompt import wrap
from antiphon.server.audio import Encoding, WireFormat
from antiphon.server.events.client import SessionUpdateEvent, parse
from antiphon.server.events.session import BY_MEANING, ServerVad, Session, SessionUpdate
from antiphon.server.realtime.conversation import RequestError
from antiphon.server.realtime.settings import AnswersWhen, Choices, Offer, changed, first_choices
from antiphon.server.vad.choice import speech_models
from antiphon.voices import PreparedVoice

LIMITS = WindowLimits(max_tokens=1000, high_tokens=400, low_tokens=300, max_units=20, previous_max_tokens=50)


@pytest.fixture(scope="module")
def offer(tiny_engine: Running) -> Offer:
    """Of an operator whose calls may change."""
    return Offer(
        config=replace(tiny_engine.session, keeps_inputs=True),
        voice=tiny_engine.voices.default(),
        mode=WindowMode.BASIC,
        limits=LIMITS,
        marker=(),
        speech_models=speech_models(None),
        max_input_samples=16_000,
        idle_s=60.0,
    )


@pytest.fixture
def first(offer: Offer) -> Choices:
    return first_choices(Session(id="sess_1", model="m"), offer, has_vendor_events=False)


def update(text: str) -> SessionUpdate:
    """text: the fields, as a client writes them."""
    event = parse(f'{{"type":"session.update","session":{{{text}}}}}')
    assert isinstance(event, SessionUpdateEvent)
    return event.session


def chosen(choices: Choices, offer: Offer, text: str, *, is_open: bool = False) -> Choices:
    return changed(choices, update(text), None, offer, is_open=is_open)


def other_voice(offer: Offer) -> PreparedVoice:
    return replace(offer.voice, reference=np.zeros(16_000, np.float32))


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        ('"tool_choice":"required"', "tools_unsupported", "session.tool_choice"),
        ('"tool_choice":{"type":"function","name":"f"}', "tools_unsupported", "session.tool_choice"),
        ('"prompt":{"id":"p"}', "prompt_unsupported", "session.prompt"),
        ('"truncation":"disabled"', "truncation_unsupported", "session.truncation"),
        (
            '"truncation":{"type":"retention_ratio","retention_ratio":0.5}',
            "truncation_unsupported",
            "session.truncation",
        ),
        ('"speed":0.5', "speed_unsupported", "session.audio.output.speed"),
        ('"audio":{"output":{"speed":1.2}}', "speed_unsupported", "session.audio.output.speed"),
        ('"overlap_policy":"barge_in_on_speech"', "unsupported_turn_detection", "session.overlap_policy"),
        *(
            (f'"extra_body":{{"{name}":{limit + 1}}}', "invalid_sliding_window_config", f"session.extra_body.{name}")
            for name, limit in (
                ("basic_window_high_tokens", LIMITS.high_tokens),
                ("basic_window_low_tokens", LIMITS.low_tokens),
                ("context_max_units", LIMITS.max_units),
                ("context_previous_max_tokens", LIMITS.previous_max_tokens),
            )
        ),
        (
            '"extra_body":{"basic_window_high_tokens":100,"basic_window_low_tokens":200}',
            "invalid_sliding_window_config",
            "session.extra_body",
        ),
    ],
)
def test_what_the_server_cannot_do_is_refused_by_name(
    first: Choices, offer: Offer, text: str, code: str, param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        chosen(first, offer, text)
    assert (refused.value.code, refused.value.param) == (code, param)


FIXED = (
    ('"instructions":"Be brief."', "instructions_update_unsupported"),
    ('"extra_body":{"sliding_window_mode":"context"}', "sliding_window_update_unsupported"),
)


@pytest.mark.parametrize(("text", "code"), FIXED)
def test_a_call_that_cannot_change_refuses_what_it_has_read_once_it_has_begun(
    first: Choices, offer: Offer, text: str, code: str
) -> None:
    fixed = replace(offer, config=replace(offer.config, keeps_inputs=False))
    begun = replace(first, config=fixed.config)
    with pytest.raises(RequestError) as refused:
        chosen(begun, fixed, text, is_open=True)
    assert refused.value.code == code
    assert chosen(begun, fixed, text).config != begun.config
    assert chosen(first, offer, text, is_open=True).config != first.config


def test_a_call_that_cannot_change_keeps_its_voice_once_it_has_begun(first: Choices, offer: Offer) -> None:
    fixed = replace(offer, config=replace(offer.config, keeps_inputs=False))
    begun, voice = replace(first, config=fixed.config), other_voice(offer)
    with pytest.raises(RequestError) as refused:
        changed(begun, update(""), voice, fixed, is_open=True)
    assert refused.value.code == "ref_audio_update_unsupported"
    assert changed(begun, update(""), voice, fixed, is_open=False).voice is voice


def test_a_client_may_lean_its_call_to_listening_and_choose_its_seed(first: Choices, offer: Offer) -> None:
    config = chosen(first, offer, '"extra_body":{"listen_scale":1.5,"seed":7}').config
    assert (config.text.listen_scale, config.seed) == (1.5, 7)
    assert config.text.temperature == first.config.text.temperature
    assert chosen(first, offer, '"temperature":0.5').config.seed == first.config.seed


def test_what_is_said_first_is_chosen_before_the_call(first: Choices, offer: Offer) -> None:
    assert chosen(first, offer, '"initial_user_text":"Hello?"').opening_text == "Hello?"
    assert chosen(first, offer, '"extra_body":{"duplex_initial_user_text":"Hello?"}').opening_text == "Hello?"
    with pytest.raises(RequestError) as refused:
        chosen(first, offer, '"initial_user_text":"Hello?"', is_open=True)
    assert refused.value.code == "initial_user_text_update_unsupported"


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ('"sliding_window_mode":"off"', OffWindow(1000)),
        ('"sliding_window_mode":"basic"', BasicWindow(400, 300)),
        ('"sliding_window_mode":"basic","basic_window_low_tokens":100', BasicWindow(400, 100)),
        ('"basic_window_high_tokens":350', BasicWindow(350, 300)),
        ('"sliding_window_mode":"context","context_max_units":5', ContextWindow(5, 50, ())),
        (
            '"sliding_window_mode":"context","context_max_units":5,"context_previous_max_tokens":7',
            ContextWindow(5, 7, ()),
        ),
    ],
)
def test_a_window_is_what_was_asked_for_within_what_is_offered(
    first: Choices, offer: Offer, text: str, policy: OffWindow | BasicWindow | ContextWindow
) -> None:
    assert chosen(first, offer, f'"extra_body":{{{text}}}').config.window == policy


def test_who_answers_follows_from_the_turn_detection(first: Choices, offer: Offer) -> None:
    def who(text: str) -> AnswersWhen:
        return chosen(first, offer, text).answers_when

    assert first.answers_when is AnswersWhen.MODEL
    assert who('"turn_detection":null') is AnswersWhen.ASKED
    assert who('"audio":{"input":{"turn_detection":null}}') is AnswersWhen.ASKED
    assert who('"turn_detection":{"type":"semantic_vad","create_response":false}') is AnswersWhen.ASKED
    assert who('"turn_detection":{"type":"server_vad"}') is AnswersWhen.STOPPED
    assert who('"turn_detection":{"type":"server_vad","create_response":false}') is AnswersWhen.ASKED
    assert who('"extra_body":{"auto_response":false}') is AnswersWhen.ASKED
    assert who('"turn_detection":{"type":"semantic_vad","eagerness":"low"}') is AnswersWhen.MODEL


def test_null_is_the_models_own_decision_for_who_asks_for_vendors_events(first: Choices, offer: Offer) -> None:
    asked = chosen(first, offer, '"vendor_events":true,"turn_detection":null')
    assert asked.has_vendor_events
    assert asked.turn_detection == BY_MEANING
    assert chosen(asked, offer, '"turn_detection":null').turn_detection == BY_MEANING
    assert chosen(first, offer, '"turn_detection":null').turn_detection is None


def test_numbers_of_turn_detection_that_are_left_out_are_told(first: Choices, offer: Offer) -> None:
    vad = chosen(first, offer, '"turn_detection":{"type":"server_vad","threshold":0.7}').turn_detection
    assert isinstance(vad, ServerVad)
    assert (vad.threshold, vad.prefix_padding_ms, vad.silence_duration_ms) == (0.7, 300, 500)
    assert (vad.create_response, vad.interrupt_response) == (True, True)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('"input_audio_format":"g711_ulaw"', WireFormat(Encoding.ULAW, 8_000)),
        ('"audio":{"input":{"format":"pcm16","sample_rate_hz":16000}}', WireFormat(Encoding.PCM16, 16_000)),
        ('"input_audio_format":"pcm_f32le","sample_rate_hz":48000', WireFormat(Encoding.FLOAT32, 48_000)),
        ('"audio":{"input":{"format":{"type":"audio/pcma"}}}', WireFormat(Encoding.ALAW, 8_000)),
    ],
)
def test_formats_may_be_written_as_any_client_writes_them(
    first: Choices, offer: Offer, text: str, wanted: WireFormat
) -> None:
    new = chosen(first, offer, text)
    assert new.input_format.wire_format() == wanted
    assert new.output_format == first.output_format


def test_an_update_changes_what_it_names_and_nothing_else(first: Choices, offer: Offer) -> None:
    one = chosen(first, offer, '"instructions":"Be brief.","max_output_tokens":7,"temperature":0')
    assert one.config.prompt == wrap("Be brief.")
    assert one.config.text.top_k == 1
    two = chosen(one, offer, '"modalities":["text"],"voice":"alloy","force_listen_count":9,"idle_timeout_s":5')
    session = two.session
    assert (session.instructions, session.max_output_tokens, session.output_modalities) == ("Be brief.", 7, ("text",))
    assert session.audio.output is not None
    assert session.audio.output.voice == "alloy"
    assert two.config.duplex.num_forced_listens == 9
    assert two.idle_s == 5
    assert chosen(two, offer, '"idle_timeout_s":1000').idle_s == offer.idle_s
    assert chosen(two, offer, "").session == two.session


def test_sound_comes_with_its_words_so_that_both_together_are_sound(first: Choices, offer: Offer) -> None:
    assert chosen(first, offer, '"modalities":["text","audio"]').session.output_modalities == ("audio",)


def test_the_default_of_a_session_is_the_operators(first: Choices, offer: Offer) -> None:
    assert first.config == offer.config
    assert first.voice is offer.voice
    assert first.idle_s == offer.idle_s
