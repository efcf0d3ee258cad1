"""Every code of an error event on `/v1/realtime`: what it means, what a client does about it, and what ends with it.

The table in docs/protocol.md is this one. Codes of a kind have their own type: `EventFault`, `AudioFault`,
`antiphon.errors`, and `RequestCode` here. Shown by tests/server/test_codes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

RequestCode = Literal[
    "audio_end_ms_too_large",
    "config_timeout",
    "content_not_found",
    "conversation_already_has_active_response",
    "idle_timeout",
    "initial_user_text_update_unsupported",
    "input_audio_buffer_commit_empty",
    "input_backpressure",
    "instructions_update_unsupported",
    "invalid_event",
    "invalid_resume_token",
    "invalid_session_resume",
    "invalid_sliding_window_config",
    "item_create_duplicate_item_id",
    "item_delete_invalid_item_id",
    "item_not_found",
    "item_not_truncatable",
    "item_retrieve_invalid_item_id",
    "item_truncate_invalid_item_id",
    "playback_item_mismatch",
    "playback_item_not_found",
    "prompt_unsupported",
    "ref_audio_update_unsupported",
    "response_cancel_not_active",
    "response_option_unsupported",
    "sliding_window_update_unsupported",
    "speed_unsupported",
    "tools_unsupported",
    "truncation_unsupported",
    "unknown_session",
    "unknown_turn_signal",
    "unsupported_audio_format",
    "unsupported_sample_rate",
    "unsupported_session_resume",
    "unsupported_turn_detection",
]
"""Of a request that is an event and cannot be done."""


class Ends(Enum):
    """What is over with an error."""

    NOTHING = "nothing"
    SOCKET = "the socket"
    """The session goes on for whoever may resume it."""
    SESSION = "the session"


@dataclass(frozen=True, slots=True)
class Explanation:
    """meaning, advice: for the client's author."""

    meaning: str
    advice: str
    ends: Ends = Ends.NOTHING


CODES: Mapping[str, Explanation] = {
    "invalid_json": Explanation("the message is no JSON object", "send one object in a text frame"),
    "event_too_large": Explanation("the message is too large", "send sound in smaller pieces"),
    "unknown_event": Explanation("no event has this `type`", "see the table of events"),
    "invalid_event": Explanation("a field is unknown, missing, or has a wrong value", "`param` says which"),
    "unsupported_audio_format": Explanation(
        "no such format, or not the session's", "see Audio; change the format with `session.update`"
    ),
    "unsupported_sample_rate": Explanation(
        "no such rate, or not the session's", "see Audio; change the rate with `session.update`"
    ),
    "invalid_base64": Explanation("the audio is not base64", "encode it strictly, with padding and no spaces"),
    "incomplete_audio_sample": Explanation(
        "the sound ends within a sample, and was committed or is to be answered", "send whole samples by then"
    ),
    "audio_not_finite": Explanation("a float sample is infinite or no number", "send finite samples"),
    "invalid_audio": Explanation("`ref_audio` is no sound file, or too long", "send a whole wav, flac, ogg or mp3"),
    "invalid_image": Explanation(
        "the picture is damaged, too large, too narrow, or not in the message", "send a data URL of a whole file"
    ),
    "invalid_input": Explanation("more text waits than the model can read", "send text as it is typed"),
    "input_backpressure": Explanation("more sound waits than the server keeps", "send it as fast as it is spoken"),
    "input_audio_buffer_commit_empty": Explanation("hardly any sound came since the last commit", "append it first"),
    "response_cancel_not_active": Explanation("this response is not under way", "nothing: it is over"),
    "conversation_already_has_active_response": Explanation(
        "a response is under way", "wait for its `response.done`, or cancel it"
    ),
    "response_option_unsupported": Explanation(
        "`conversation`, `input` or `prompt` of one response", "a response answers the session; leave them out"
    ),
    "item_create_duplicate_item_id": Explanation("an item of this id is there", "choose another id, or none"),
    "item_not_found": Explanation("no item of the `previous_item_id` is there", "it was deleted, or never told"),
    "item_retrieve_invalid_item_id": Explanation("no item of this id is there", "it was deleted, or never told"),
    "item_delete_invalid_item_id": Explanation("no item of this id is there", "nothing: it is gone"),
    "item_truncate_invalid_item_id": Explanation("no item of this id is there", "it was deleted, or never told"),
    "item_not_truncatable": Explanation("the item is no answer", "truncate answers only"),
    "content_not_found": Explanation("the item has no sound there", "an answer's sound has the `content_index` 0"),
    "audio_end_ms_too_large": Explanation("so much of the answer was never sent", "count what was played"),
    "playback_item_not_found": Explanation("no such answer was spoken", "name one that was, or none for the newest"),
    "playback_item_mismatch": Explanation("the item is of another response", "name one of the two"),
    "tools_unsupported": Explanation(
        "a tool has to be called, and the model calls none", "let `tool_choice` be auto or none"
    ),
    "prompt_unsupported": Explanation("no prompts are stored here", "send `instructions`"),
    "truncation_unsupported": Explanation(
        "the window decides what is forgotten", "choose one with `sliding_window_mode` in `extra_body`"
    ),
    "speed_unsupported": Explanation("speech has the speed 1", "leave it out"),
    "unsupported_turn_detection": Explanation(
        "`barge_in_on_speech` without the detection of speech", "ask for `server_vad`"
    ),
    "invalid_sliding_window_config": Explanation(
        "the window is larger than the operator offers, or contradicts itself", "the message has the limit"
    ),
    "initial_user_text_update_unsupported": Explanation("the call has begun", "send the text as an item"),
    "instructions_update_unsupported": Explanation(
        "the call has begun, and the operator lets no call change", "set it before the first sound"
    ),
    "sliding_window_update_unsupported": Explanation(
        "the call has begun, and the operator lets no call change", "set it before the first sound"
    ),
    "ref_audio_update_unsupported": Explanation(
        "the call has begun, and the operator lets no call change", "set it before the first sound"
    ),
    "unknown_turn_signal": Explanation("no signal is called so", "the message has those that are known"),
    "unsupported_session_resume": Explanation(
        "the session was not begun as one that can be resumed", "connect with `?vendor_events=1`"
    ),
    "invalid_session_resume": Explanation(
        "the first message of a socket that resumes is another one", "send `session.resume` first", Ends.SOCKET
    ),
    "config_timeout": Explanation("`session.resume` did not come in time", "send it at once", Ends.SOCKET),
    "unknown_session": Explanation("no such session goes on", "begin another one", Ends.SOCKET),
    "invalid_resume_token": Explanation(
        "the token is not the session's newest, or another key's", "use the last one that came", Ends.SOCKET
    ),
    "idle_timeout": Explanation("the client said nothing for too long", "send sound, or silence", Ends.SESSION),
    "prompt_too_long": Explanation(
        "the instructions and the voice leave no room to listen", "shorten them", Ends.SESSION
    ),
    "resource_exhausted": Explanation("the server has no memory for the call", "try again later", Ends.SESSION),
    "context_length_exceeded": Explanation(
        "the context is full, with a window that is off", "begin another session, or choose a window", Ends.SESSION
    ),
    "engine_stopped": Explanation("the server stops", "connect again", Ends.SESSION),
    "shape_error": Explanation("a fault of the server", "connect again, and tell the operator", Ends.SESSION),
    "internal_error": Explanation("a fault of the server", "connect again, and tell the operator", Ends.SESSION),
}
"""As an operator would look for them: what was sent, then what was asked, then how a session ends."""
