"""A recording played to the model as a live call, as fast as the machine can. Not a server, not a screen.

Shown by tests/test_run.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from antiphon.core.events import Event, SessionEnded
from antiphon.engine import Call
from antiphon.errors import ContextLengthExceeded, ImageError
from antiphon.models.minicpmo.image import decode_picture
from antiphon.recording import CallWriter, Recording
from antiphon.stages.thinker.state import UnitInput
from antiphon.units import OUTPUT_SAMPLES_PER_UNIT, UNIT_S

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif")


class PictureFolder:
    """A camera as a folder of pictures: the n-th by name is what was seen in second n. Later seconds see nothing."""

    def __init__(self, folder: Path) -> None:
        """Raises: ImageError if there is no picture in the folder."""
        if not folder.is_dir():
            raise ImageError(f"{folder} is not a folder; give a folder with one picture per second")
        self._paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURE_SUFFIXES)
        if not self._paths:
            raise ImageError(f"{folder} holds no picture ({', '.join(PICTURE_SUFFIXES)})")

    def at(self, second: int) -> tuple[Image.Image, ...]:
        """Raises: ImageError if the picture cannot be read."""
        return tuple(decode_picture(path) for path in self._paths[second : second + 1])


class NoCamera:
    """A call without pictures."""

    def at(self, second: int) -> tuple[Image.Image, ...]:
        return ()


def play(recording: Recording, camera: PictureFolder | NoCamera, call: Call, writer: CallWriter) -> Iterator[Event]:
    """Live through the recording; events come as they happen, SessionEnded last.

    Raises: AudioError, ImageError for bad input found on the way.
    """
    yield call.opened
    num_units = 0
    for second, unit in enumerate(recording.units()):
        try:
            result = call.run_unit(UnitInput(unit.heard, camera.at(second)))
        except ContextLengthExceeded as error:
            yield SessionEnded(second * UNIT_S, error.code, str(error))
            return
        num_units += 1
        writer.hear(unit.caller)
        for speech in result.speech:
            writer.speak(speech.start_samples, speech.samples.numpy())
        writer.advance(num_units * OUTPUT_SAMPLES_PER_UNIT)
        yield from result.events
    yield SessionEnded(num_units * UNIT_S, "completed", "the recording is over")
