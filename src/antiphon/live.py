"""Live calls: an engine in a thread of its own, and sessions that talk to it from any other thread.

A session sends sound, pictures and interruptions as they come and reads what happens; units are cut here, and one
leaves for the thinker as soon as its second is complete. Not a server: no network, no pacing. For asyncio: `aio.py`.
Shown by tests/test_live.py.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import TracebackType

import torch
from PIL import Image
from torch import Tensor

from antiphon.changing import CallSettings, ChangingCall
from antiphon.config import ChatConfig, SessionConfig
from antiphon.core.duplex import Wish
from antiphon.core.events import InputRefused, SessionEnded, UnitDecided
from antiphon.counts import EngineCounts
from antiphon.engine import Chat, Engine
from antiphon.errors import AntiphonError, AudioError, EngineStopped, InputError, InternalError
from antiphon.garbage import look_at_all_again, spare_what_is_there
from antiphon.happenings import Happening
from antiphon.models.minicpmo.audio_features import check_samples
from antiphon.models.minicpmo.chat_prompt import ChatPrompt
from antiphon.models.minicpmo.image import check_sides
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.thinker.state import UnitInput
from antiphon.units import INPUT_RATE_HZ, UNIT_SAMPLES

MAX_WAITING_SECONDS = 10
MAX_WAITING_SAMPLES = MAX_WAITING_SECONDS * INPUT_RATE_HZ
"""Sound that may wait to be decided on; who sends faster than speech is told so."""
MAX_TYPED_CHARACTERS = 2**16
"""More can hardly be tokens of a few seconds, and counting those would hold up everybody."""

Tell = Callable[[Happening], None]
"""Takes what happens in a call; called in the engine's thread, so it must not wait."""

logger = logging.getLogger(__name__)


class Sender:
    """What a caller's threads may send into one call. Everything is taken in the order in which it was sent."""

    def __init__(self, live: LiveEngine, ongoing: Ongoing) -> None:
        self._live = live
        self._ongoing = ongoing

    @property
    def session_id(self) -> str:
        return self._ongoing.session_id

    def send_audio(self, samples: Tensor) -> None:
        """samples: [n] float32 on the host, 16 kHz, any n.

        Raises: AudioError if they are not finite or no such tensor, or if more than `MAX_WAITING_SAMPLES` would wait;
        nothing is sent then.
        """
        check_samples(samples)
        self._ongoing.waiting.add(samples.numel())
        copy = samples.clone()
        self._live.call_soon(lambda: self._ongoing.hear(copy))

    def send_picture(self, image: Image.Image) -> None:
        """An RGB picture of the present second; of more than the session takes in a second the newest are seen.

        Raises: ImageError if it cannot be seen; nothing is sent then.
        """
        check_sides(*image.size, self._live.engine.model.vision)
        self._live.call_soon(lambda: self._ongoing.pictures.append(image))

    def send_text(self, text: str) -> None:
        """Words that were typed, to be read with the present second; more than fit into one are read with the next.

        Raises: InputError if the call takes no text or too much of it would wait; nothing is sent then.
        """
        if len(text) > MAX_TYPED_CHARACTERS:
            raise InputError(f"{len(text)} characters came at once; at most {MAX_TYPED_CHARACTERS} may")
        # Whatever is written there is words: a special token by its name would steer the model.
        ids = self._live.engine.tokenizer.encode_plain(text)
        self._ongoing.typed.add(len(ids))
        self._live.call_soon(lambda: self._ongoing.read(ids))

    def change(self, config: SessionConfig, reference: Tensor, voice: VoicePrompt) -> None:
        """Go on under other settings, as of `LiveEngine.open`, as soon as no answer is being said.

        SettingsChanged or ChangeRefused happens for each change, in order. The seed stays what it is.
        """
        self._live.call_soon(lambda: self._ongoing.change(CallSettings(config, reference, voice)))

    def wish(self, wish: Wish) -> None:
        """Say what is wanted of the next second that is complete; HOLD stands if nothing else is."""
        self._live.call_soon(lambda: self._ongoing.want(wish))

    def interrupt(self) -> None:
        """Stop the present answer, wherever it is."""
        self._live.call_soon(self._ongoing.interrupt)

    def close(self) -> None:
        """End the call; idempotent. What is on its way is dropped."""
        self._live.call_soon(self._ongoing.close)


class LiveSession(Sender):
    """One call for its caller's threads: a sender, and what happens."""

    def __init__(self, live: LiveEngine, ongoing: Ongoing, happened: SimpleQueue[Happening]) -> None:
        super().__init__(live, ongoing)
        self._happened = happened

    def happenings(self) -> Iterator[Happening]:
        """Everything that happens in the call, waiting for it, until it has ended. For one reader."""
        while True:
            happening = self._happened.get()
            yield happening
            if isinstance(happening, SessionEnded):
                return


class LiveEngine:
    """Owns the thread that drives an engine; nothing else may touch that engine while it runs. Use as a context.

    What the process holds when it begins is kept from Python's collector (`garbage.py`) until it ends.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._is_stopping = False
        # Held to send something or to stop taking it, so that nothing comes between the last look and the end.
        self._gate = threading.Lock()
        self._end: AntiphonError | None = None
        self._thread = threading.Thread(target=self._run, name="antiphon engine", daemon=True)

    def __enter__(self) -> LiveEngine:
        spare_what_is_there()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call_soon(self._stop)
        self._thread.join()
        look_at_all_again()

    def open(self, session_id: str, config: SessionConfig, reference: Tensor, voice: VoicePrompt) -> LiveSession:
        """Start a call; its first happening is SessionOpened, or SessionEnded with the reason why it could not start.

        reference: [n] float32 on the host, 16 kHz, the voice in the prompt; n = 0 for none. voice: to speak with.
        """
        happened: SimpleQueue[Happening] = SimpleQueue()
        ongoing = self.begin(session_id, config, reference, voice, happened.put)
        return LiveSession(self, ongoing, happened)

    def begin(
        self, session_id: str, config: SessionConfig, reference: Tensor, voice: VoicePrompt, tell: Tell
    ) -> Ongoing:
        """As `open`, for who takes happenings in another way."""
        ongoing = Ongoing(session_id, config.max_pictures, config.max_text_tokens, tell)
        settings = CallSettings(config, reference, voice)

        with self._gate:
            if self._end is None:
                self.engine.call_soon(lambda: ongoing.open(self.engine, settings))
            else:
                ongoing.fail(self._end)
        return ongoing

    def begin_chat(
        self, session_id: str, chat: ChatConfig, prompt: ChatPrompt, voice: VoicePrompt, tell: Tell
    ) -> OngoingChat:
        """Start a chat; as `Engine.begin_chat`, but SessionEnded is told if it could not start."""
        ongoing = OngoingChat(tell)
        with self._gate:
            if self._end is None:
                self.engine.call_soon(lambda: ongoing.open(self.engine, session_id, chat, prompt, voice))
            else:
                tell(SessionEnded(0.0, self._end.code, str(self._end)))
        return ongoing

    def survey(self) -> EngineCounts:
        """How things stand in all stages. Raises: EngineStopped, InternalError if the engine is no more."""
        told: SimpleQueue[EngineCounts | AntiphonError] = SimpleQueue()
        with self._gate:
            if self._end is not None:
                raise self._end
            self.engine.call_soon(lambda: self.engine.ask(told.put))
        counts = told.get()
        if isinstance(counts, AntiphonError):
            raise counts
        return counts

    def call_soon(self, action: Callable[[], None]) -> None:
        """Let the engine's thread do something, unless it is no more."""
        with self._gate:
            if self._end is None:
                self.engine.call_soon(action)

    def _stop(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        end: AntiphonError = EngineStopped("the engine was stopped")
        try:
            while not self._is_stopping:
                self.engine.advance()
        except Exception as error:
            logger.exception("the engine failed")
            end = InternalError(f"the engine failed: {type(error).__name__}")
        finally:
            with self._gate:
                self._end = end
            # Nobody is left waiting, not even who came too late.
            self.engine.end_all(end)


class _Waiting:
    """How much of something waits to be decided on; for all threads."""

    def __init__(self, limit: int, complaint: Callable[[str], AntiphonError], advice: str) -> None:
        """complaint, advice: when more comes."""
        self._lock = threading.Lock()
        self._limit = limit
        self._complaint = complaint
        self._advice = advice
        self._number = 0

    def add(self, number: int) -> None:
        """Raises: the complaint if that would be too much."""
        with self._lock:
            if self._number + number > self._limit:
                raise self._complaint(
                    f"{self._number} wait and {number} more came; the limit is {self._limit}: {self._advice}"
                )
            self._number += number

    def take(self, number: int) -> None:
        with self._lock:
            self._number -= number


class Ongoing:
    """A session in the engine's thread, which alone uses it; `waiting` is for all."""

    def __init__(self, session_id: str, max_pictures: int, max_text_tokens: int, tell: Tell) -> None:
        self.session_id = session_id
        self.waiting = _Waiting(MAX_WAITING_SAMPLES, AudioError, "samples are sent no faster than they are spoken")
        self.typed = _Waiting(
            MAX_WAITING_SECONDS * max_text_tokens, InputError, "so many tokens of text are read in the time"
        )
        self._max_text_tokens = max_text_tokens
        self._text: tuple[int, ...] = ()
        self._wish = Wish.FREE
        self.pictures: deque[Image.Image] = deque(maxlen=max_pictures)
        self._tell = tell
        self._sound = torch.empty(0)
        self._call: ChangingCall | None = None

    def open(self, engine: Engine, settings: CallSettings) -> None:
        try:
            self._call = ChangingCall(engine, self.session_id, settings, self._happened)
        except AntiphonError as error:
            self.fail(error)

    def fail(self, error: AntiphonError) -> None:
        """The call could not begin."""
        self._tell(SessionEnded(0.0, error.code, str(error)))

    def hear(self, samples: Tensor) -> None:
        """Cut units; after the call's end nothing is heard."""
        self._sound = torch.cat([self._sound, samples])
        while self._call is not None and self._sound.numel() >= UNIT_SAMPLES:
            # Split, so that what waits does not keep alive what was heard.
            second, self._sound = self._sound[:UNIT_SAMPLES].clone(), self._sound[UNIT_SAMPLES:].clone()
            pictures = tuple(self.pictures)
            self.pictures.clear()
            text, self._text = self._text[: self._max_text_tokens], self._text[self._max_text_tokens :]
            self.typed.take(len(text))
            wish, self._wish = self._wish, Wish.FREE
            self._call.hear(UnitInput(second, pictures, text, wish))

    def want(self, wish: Wish) -> None:
        """To hold is the least that can be wanted of a second: it takes nothing else back."""
        if wish is not Wish.HOLD or self._wish is Wish.FREE:
            self._wish = wish

    def read(self, ids: tuple[int, ...]) -> None:
        self._text += ids

    def change(self, settings: CallSettings) -> None:
        if self._call is not None:
            self._call.change(settings)

    def interrupt(self) -> None:
        if self._call is not None:
            self._call.interrupt()

    def close(self) -> None:
        if self._call is not None:
            self._call.close()

    def _happened(self, happening: Happening) -> None:
        match happening:
            case UnitDecided():
                self.waiting.take(UNIT_SAMPLES)
            case InputRefused(num_samples=num_samples):
                self.waiting.take(num_samples)
            case SessionEnded():
                self._call = None
        self._tell(happening)


class OngoingChat:
    """A chat in the engine's thread, which alone uses it."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._chat: Chat | None = None

    def open(self, engine: Engine, session_id: str, chat: ChatConfig, prompt: ChatPrompt, voice: VoicePrompt) -> None:
        try:
            self._chat = engine.begin_chat(session_id, chat, prompt, voice, self._tell)
        except AntiphonError as error:
            self._tell(SessionEnded(0.0, error.code, str(error)))

    def close(self) -> None:
        if self._chat is not None:
            self._chat.close()
