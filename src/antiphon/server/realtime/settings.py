"""What a client chose: its session as it sees it, and what that means for its call. Pure: a change gives new choices.

What this server cannot do is refused by name; what it may ignore without harm (which model is asked for, who
transcribes, tools that may be called and never are) is. Shown by tests/server/test_realtime_settings.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar, assert_never

from antiphon.config import SessionConfig, WindowLimits, WindowMode
from antiphon.core.sampling import TextSampling
from antiphon.core.window import WindowPolicy
from antiphon.errors import ConfigError
from antiphon.models.minicpmo.prompt import wrap
from antiphon.server.events.session import (
    BY_MEANING,
    AudioFormat,
    AudioInput,
    AudioOutput,
    ExtraBody,
    MaxTokens,
    Modalities,
    SemanticVad,
    ServerVad,
    Session,
    SessionUpdate,
    ToolChoice,
    TurnDetection,
)
from antiphon.server.realtime.conversation import RequestError
from antiphon.server.vad.choice import SpeechModels
from antiphon.server.vad.config import turn_config
from antiphon.voices import PreparedVoice

T = TypeVar("T")

MIN_TEMPERATURE = 1e-3
"""Below it no token but the likeliest has a chance."""


class AnswersWhen(Enum):
    """Who decides that the model answers."""

    MODEL = "model"
    """The model, second by second."""
    ASKED = "asked"
    """The client, with `response.create`."""
    STOPPED = "stopped"
    """Voice activity detection, when the caller stops speaking; and the client."""


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What the operator offers. config, voice: of a call that asks for nothing. limits: of windows; clients get less.

    mode: of a window that a client asks for in part. marker: ids in front of `previous` text.
    max_input_samples: may wait to be heard. idle_s: a session in which a client says nothing for so long ends.
    """

    config: SessionConfig
    voice: PreparedVoice
    mode: WindowMode
    limits: WindowLimits
    marker: tuple[int, ...]
    speech_models: SpeechModels
    max_input_samples: int
    idle_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """session: as the client sees it. config, voice, opening_text: of its call, which reads that text first.

    idle_s: the client's own limit of how long it may say nothing. has_vendor_events: it asked for them.
    counts_unplayed: what was sent of an answer counts as heard when the answer is done.
    answers_by_itself: unless the client gave that up. reports_units: it is told what every second came to.
    """

    session: Session
    config: SessionConfig
    voice: PreparedVoice
    idle_s: float
    has_vendor_events: bool
    opening_text: str = ""
    counts_unplayed: bool = True
    answers_by_itself: bool = True
    reports_units: bool = False

    @property
    def answers_when(self) -> AnswersWhen:
        detection = self.turn_detection
        if detection is None or detection.create_response is False or not self.answers_by_itself:
            return AnswersWhen.ASKED
        return AnswersWhen.STOPPED if isinstance(detection, ServerVad) else AnswersWhen.MODEL

    def is_same_call(self, other: Choices) -> bool:
        """Whether the call need not change from the one to the other."""
        return self.config == other.config and self.voice is other.voice

    def with_call_of(self, other: Choices) -> Choices:
        """These, but for what the call is made of."""
        output, others = self.session.audio.output, other.session.audio.output
        assert output is not None, "a session has its output decided"
        assert others is not None, "a session has its output decided"
        audio = self.session.audio.model_copy(update={"output": output.model_copy(update={"voice": others.voice})})
        session = self.session.model_copy(update={"instructions": other.session.instructions, "audio": audio})
        return replace(self, session=session, config=other.config, voice=other.voice)

    @property
    def turn_detection(self) -> ServerVad | SemanticVad | None:
        return self._input.turn_detection

    @property
    def input_format(self) -> AudioFormat:
        form = self._input.format
        assert form is not None, "a session has its input format decided"
        return form

    @property
    def output_format(self) -> AudioFormat:
        output = self.session.audio.output
        assert output is not None, "a session has its output decided"
        assert output.format is not None, "a session has its output format decided"
        return output.format

    @property
    def _input(self) -> AudioInput:
        assert self.session.audio.input is not None, "a session has its input decided"
        return self.session.audio.input


def first_choices(session: Session, offer: Offer, *, has_vendor_events: bool) -> Choices:
    return Choices(session, offer.config, offer.voice, offer.idle_s, has_vendor_events)


def changed(
    choices: Choices, update: SessionUpdate, voice: PreparedVoice | None, offer: Offer, *, is_open: bool
) -> Choices:
    """voice: made of the recording in `update`, if there is one. is_open: the call has begun.

    Raises: RequestError for what this server cannot do, or not any more.
    """
    _refuse(update)
    extra = update.extra_body or ExtraBody()
    session = _session(choices, update)
    config = replace(choices.config, window=_window(choices, extra, offer))
    if update.instructions is not None:
        config = replace(config, prompt=wrap(update.instructions))
    num_listens = _first(update.force_listen_count, extra.force_listen_count, config.duplex.num_forced_listens)
    config = replace(config, duplex=replace(config.duplex, num_forced_listens=num_listens))
    if update.temperature is not None:
        config = replace(config, text=_warmer(config, update.temperature))
    listen_scale = _first(extra.listen_scale, config.text.listen_scale)
    config = replace(config, text=replace(config.text, listen_scale=listen_scale), seed=_first(extra.seed, config.seed))
    new = replace(
        choices,
        session=session,
        config=config,
        voice=choices.voice if voice is None else voice,
        opening_text=_first(update.initial_user_text, extra.duplex_initial_user_text, choices.opening_text),
        idle_s=min(offer.idle_s, _first(update.idle_timeout_s, choices.idle_s)),
        has_vendor_events=_first(update.vendor_events, choices.has_vendor_events),
        answers_by_itself=_first(extra.auto_response, choices.answers_by_itself),
        reports_units=_first(extra.report_units, choices.reports_units),
        counts_unplayed=_counts_unplayed(choices, update),
    )
    _check_policy(new, update)
    if is_open and new.opening_text != choices.opening_text:
        raise RequestError(
            "initial_user_text_update_unsupported",
            "the call has begun; send what is to be said now as an item",
            "session.initial_user_text",
        )
    if is_open and not offer.config.keeps_inputs:
        _check_fixed(choices, new)
    return new


def check_tool_choice(choice: ToolChoice | None, param: str) -> None:
    """Raises: RequestError if a tool has to be called; agents offer tools to every model, and this one calls none."""
    if choice not in (None, "auto", "none"):
        raise RequestError("tools_unsupported", "this model calls no tools; let tool_choice be auto or none", param)


def _refuse(update: SessionUpdate) -> None:
    check_tool_choice(update.tool_choice, "session.tool_choice")
    if update.prompt is not None:
        raise RequestError("prompt_unsupported", "no prompts are stored here; send instructions", "session.prompt")
    if update.truncation not in (None, "auto"):
        raise RequestError(
            "truncation_unsupported",
            "the window decides what is forgotten; choose it with extra_body.sliding_window_mode",
            "session.truncation",
        )
    output = update.audio.output if update.audio is not None else None
    if any(speed not in (None, 1) for speed in (update.speed, output.speed if output is not None else None)):
        raise RequestError("speed_unsupported", "speech has the speed 1", "session.audio.output.speed")


def _session(choices: Choices, update: SessionUpdate) -> Session:
    """The client's fields in their official places; what is not done is not said to be done."""
    session = choices.session
    audio_in, audio_out = choices.session.audio.input, choices.session.audio.output
    assert audio_in is not None, "a session has its input decided"
    assert audio_out is not None, "a session has its output decided"
    given_in = update.audio.input if update.audio is not None else None
    given_out = update.audio.output if update.audio is not None else None
    audio_in = audio_in.model_copy(
        update={
            "format": _format(given_in, update.input_audio_format, update.sample_rate_hz, choices.input_format),
            "turn_detection": _turn_detection(choices, update, given_in),
        }
    )
    named = given_out.voice if given_out is not None and given_out.voice is not None else update.voice
    audio_out = audio_out.model_copy(
        update={
            "format": _format(given_out, update.output_audio_format, None, choices.output_format),
            "voice": audio_out.voice if named is None else named,
        }
    )
    return session.model_copy(
        update={
            "instructions": _first(update.instructions, session.instructions),
            "output_modalities": _modalities(update, session.output_modalities),
            "max_output_tokens": _max_tokens(update, session.max_output_tokens),
            "audio": session.audio.model_copy(update={"input": audio_in, "output": audio_out}),
        }
    )


def _modalities(update: SessionUpdate, before: Modalities) -> Modalities:
    """Sound comes with its words, so that older clients' `text` and `audio` together are `audio`."""
    wanted = _first(update.output_modalities, update.modalities, before)
    return ("audio",) if "audio" in wanted else ("text",)


def _max_tokens(update: SessionUpdate, before: MaxTokens) -> MaxTokens:
    return _first(update.max_output_tokens, update.max_response_output_tokens, before)


def _format(
    part: AudioInput | AudioOutput | None, older: AudioFormat | None, rate_hz: int | None, before: AudioFormat
) -> AudioFormat:
    """older, rate_hz: as clients before the present protocol wrote them."""
    form = _first(part.format if part is not None else None, older, before)
    rate_hz = _first(part.sample_rate_hz if part is not None else None, rate_hz, -1)
    wanted = form.wire_format()
    return AudioFormat.of(wanted if rate_hz == -1 else wanted.at(rate_hz))


def _turn_detection(choices: Choices, update: SessionUpdate, part: AudioInput | None) -> TurnDetection | None:
    if part is not None and "turn_detection" in part.model_fields_set:
        wanted = part.turn_detection
    elif "turn_detection" in update.model_fields_set:
        wanted = update.turn_detection
    else:
        return choices.turn_detection
    match wanted:
        case None if choices.has_vendor_events or update.vendor_events:
            # To vLLM-Omni's clients, who ask for vendors' events, null is the model's own decision.
            return BY_MEANING
        case ServerVad():
            numbers = turn_config(wanted)
            return ServerVad(
                threshold=numbers.threshold,
                prefix_padding_ms=numbers.prefix_padding_ms,
                silence_duration_ms=numbers.silence_duration_ms,
                min_speech_duration_ms=wanted.min_speech_duration_ms,
                idle_timeout_ms=numbers.idle_timeout_ms,
                create_response=wanted.create_response is not False,
                interrupt_response=wanted.interrupt_response is not False,
            )
        case SemanticVad():
            return BY_MEANING.model_copy(update=wanted.model_dump(exclude_none=True))
        case None:
            return None
        case never:
            assert_never(never)


def _window(choices: Choices, extra: ExtraBody, offer: Offer) -> WindowPolicy:
    """Raises: RequestError if the client wants more than the operator offers."""
    wanted = (
        ("basic_window_high_tokens", extra.basic_window_high_tokens, offer.limits.high_tokens),
        ("basic_window_low_tokens", extra.basic_window_low_tokens, offer.limits.low_tokens),
        ("context_max_units", extra.context_max_units, offer.limits.max_units),
        ("context_previous_max_tokens", extra.context_previous_max_tokens, offer.limits.previous_max_tokens),
    )
    if extra.sliding_window_mode is None and all(number is None for _, number, _ in wanted):
        return choices.config.window
    for name, number, limit in wanted:
        if number is not None and number > limit:
            raise RequestError(
                "invalid_sliding_window_config",
                f"{name} is {number}; this server gives at most {limit}",
                f"session.extra_body.{name}",
            )
    mode = offer.mode if extra.sliding_window_mode is None else WindowMode(extra.sliding_window_mode)
    limits = replace(
        offer.limits,
        high_tokens=_first(extra.basic_window_high_tokens, offer.limits.high_tokens),
        low_tokens=_first(extra.basic_window_low_tokens, offer.limits.low_tokens),
        max_units=_first(extra.context_max_units, offer.limits.max_units),
        previous_max_tokens=_first(extra.context_previous_max_tokens, offer.limits.previous_max_tokens),
    )
    try:
        return limits.policy(mode, offer.marker)
    except ConfigError as error:
        raise RequestError("invalid_sliding_window_config", str(error), "session.extra_body") from error


def _check_fixed(before: Choices, after: Choices) -> None:
    """Raises: RequestError for what the model has read already, where the operator does not let calls change."""
    if after.config.prompt != before.config.prompt:
        raise RequestError(
            "instructions_update_unsupported",
            "instructions are part of what the model has read; set them before the first sound",
            "session.instructions",
        )
    if after.config.window != before.config.window:
        raise RequestError(
            "sliding_window_update_unsupported",
            "the window is as large as its memory; set it before the first sound",
            "session.extra_body",
        )
    if after.voice is not before.voice:
        raise RequestError(
            "ref_audio_update_unsupported",
            "the voice is part of what the model has read; set it before the first sound",
            "session.ref_audio",
        )


def _check_policy(after: Choices, update: SessionUpdate) -> None:
    if update.overlap_policy == "barge_in_on_speech" and not isinstance(after.turn_detection, ServerVad):
        raise RequestError(
            "unsupported_turn_detection",
            "to barge in on speech, speech has to be detected: ask for turn_detection server_vad",
            "session.overlap_policy",
        )


def _counts_unplayed(choices: Choices, update: SessionUpdate) -> bool:
    policy = update.playback_commit_policy
    return choices.counts_unplayed if policy is None else policy == "commit_all_on_done"


def _warmer(config: SessionConfig, temperature: float) -> TextSampling:
    """Hardly any temperature is the likeliest token; divided by it, scores would be infinite."""
    is_cold = temperature < MIN_TEMPERATURE
    return replace(config.text, top_k=1) if is_cold else replace(config.text, temperature=temperature)


def _first(*values: T | None) -> T:
    """The first that was given; the last always is."""
    for value in values:
        if value is not None:
            return value
    raise AssertionError("the last value is given")
