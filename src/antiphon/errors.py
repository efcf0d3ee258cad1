"""Every error that Antiphon raises on purpose. A message says what, which value, which limit and what to do.

AntiphonError
├── InputError               the caller's data
│   ├── AudioError           not audio, empty, not finite, wrong shape
│   ├── ImageError           not a picture, too large
│   └── PromptTooLong        the prompt leaves no room for a unit
├── ConfigError              settings that contradict each other or the model
├── CheckpointError          a checkpoint that is not what the code needs
├── ResourceExhausted        no free blocks or slots; try again later
├── ContextLengthExceeded    the session's context is full; the session ends, its output so far is kept
├── ShapeError               an operator's contract was broken
├── CallEnded                the call was closed; what was on its way is dropped
├── EngineStopped            the engine was stopped; its sessions are over
└── InternalError            a fault of ours that one session pays for
"""

import traceback
from collections.abc import Iterator


class AntiphonError(Exception):
    """Base of all errors here.

    code: the name on the wire and in events; stable.
    is_retryable: whether the same request can succeed later without a change.
    """

    code = "error"
    is_retryable = False


class InputError(AntiphonError):
    code = "invalid_input"


class AudioError(InputError):
    code = "invalid_audio"


class ImageError(InputError):
    code = "invalid_image"


class PromptTooLong(InputError):  # noqa: N818 - the name is the condition, like the standard library's StopIteration
    code = "prompt_too_long"


class ConfigError(AntiphonError):
    code = "invalid_config"


class CheckpointError(AntiphonError):
    code = "invalid_checkpoint"


class ResourceExhausted(AntiphonError):  # noqa: N818 - as above
    code = "resource_exhausted"
    is_retryable = True


class ContextLengthExceeded(AntiphonError):  # noqa: N818 - as above
    code = "context_length_exceeded"


class ShapeError(AntiphonError):
    code = "shape_error"


class CallEnded(AntiphonError):  # noqa: N818 - as above
    code = "completed"


class EngineStopped(AntiphonError):  # noqa: N818 - as above
    code = "engine_stopped"
    is_retryable = True


class InternalError(AntiphonError):
    code = "internal_error"


def as_ours(error: Exception, what: str) -> AntiphonError:
    """The error itself if we raised it on purpose, else a fault of ours that it led to. what: did not come about."""
    if isinstance(error, AntiphonError):
        return error
    ours = InternalError(f"{what}: {type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours


def places(error: BaseException) -> Iterator[str]:
    """An error and what led to it, for logs: types and lines of code, newest first, and none of its words."""
    seen: BaseException | None = error
    while seen is not None:
        yield type(seen).__name__
        frames = traceback.extract_tb(seen.__traceback__)
        yield from (f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
