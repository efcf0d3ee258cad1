"""A conversation as the model reads it in turn mode: ids, with items of pictures and sounds between them.

Decodes and cuts pictures, runs no network. Source: REFERENCE 14.1 to 14.3. Shown by tests/models/test_chat_prompt.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from antiphon.core.chat import ChatMessage, ConversationSize, PictureFile, Role, Sound
from antiphon.errors import AudioError, ContextLengthExceeded, InputError
from antiphon.models.minicpmo.audio_encoder import num_reference_tokens
from antiphon.models.minicpmo.audio_features import check_samples
from antiphon.models.minicpmo.config import AudioConfig, VisionConfig
from antiphon.models.minicpmo.image import PatchedImage, cut_picture, decode_picture, slice_grid
from antiphon.models.minicpmo.tokens import TextTokenizer

THINK_END = "</think>"
NO_THOUGHTS = f"<think>\n\n{THINK_END}\n\n"
"""In front of an answer that is not thought about first, which is the reference's default."""


@dataclass(frozen=True, slots=True, eq=False)
class HeardSound:
    """samples: [n] float32 on the host, 16 kHz. num_tokens: that it comes to."""

    samples: Tensor
    num_tokens: int


PromptPiece = tuple[int, ...] | PatchedImage | HeardSound


@dataclass(frozen=True, slots=True, eq=False)
class ChatPrompt:
    """pieces: in order, no two ids next to each other."""

    pieces: tuple[PromptPiece, ...]
    size: ConversationSize

    @property
    def num_tokens(self) -> int:
        return self.size.num_tokens


@dataclass(frozen=True, slots=True)
class ChatModel:
    """What of a model decides how a conversation is laid out."""

    tokenizer: TextTokenizer
    vision: VisionConfig
    audio: AudioConfig


def chat_prompt(
    messages: Sequence[ChatMessage[Tensor]], model: ChatModel, *, is_spoken: bool, max_tokens: int
) -> ChatPrompt:
    """Lay out a conversation up to where the answer begins.

    is_spoken: the answer is said as well as written.
    Raises: InputError if nobody asks anything, ImageError, AudioError, ContextLengthExceeded if it has more than
    `max_tokens`; then no more of it is decoded.
    """
    if not messages or messages[0].role is Role.ASSISTANT:
        raise InputError("a conversation begins with a system or a user message")
    layout = _Layout(model, max_tokens)
    last_question = max((at for at, message in enumerate(messages) if message.role is Role.USER), default=len(messages))
    for number, message in enumerate(messages):
        layout.marks("<|im_start|>")
        layout.words(f"{message.role.value}\n")
        if message.role is Role.ASSISTANT:
            text = _without_thoughts(message)
            if number > last_question and number == len(messages) - 1:
                layout.marks(NO_THOUGHTS)
                text = text.lstrip("\n")
            layout.words(text)
        else:
            layout.parts(message)
        layout.marks("<|im_end|>")
        layout.words("\n")
    layout.marks("<|im_start|>")
    layout.words(f"{Role.ASSISTANT.value}\n")
    # Who speaks to the model, by sound, is answered in its spoken style, also in writing.
    layout.marks(NO_THOUGHTS + ("<|tts_bos|>" if is_spoken or layout.num_sound_tokens else ""))
    return layout.prompt()


def _without_thoughts(message: ChatMessage[Tensor]) -> str:
    """Raises: InputError if an assistant's message holds more than text."""
    texts = [part for part in message.parts if isinstance(part, str)]
    if len(texts) < len(message.parts):
        raise InputError("an assistant's message is text; pictures and sounds come from the user")
    _, mark, answer = "\n".join(texts).rpartition(THINK_END)
    return answer.lstrip("\n") if mark else answer


class _Layout:
    """A prompt that grows. Words between two marks are encoded together, as the reference encodes its whole text."""

    def __init__(self, model: ChatModel, max_tokens: int) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._words = ""
        self._ids: tuple[int, ...] = ()
        self._pieces: list[PromptPiece] = []
        self._num_tokens = 0
        self._num_pictures = 0
        self._num_picture_tokens = 0
        self.num_sound_tokens = 0

    def marks(self, text: str) -> None:
        """Special tokens by their text."""
        self._add_ids(self._model.tokenizer.encode(text))

    def words(self, text: str) -> None:
        """Plain text, whatever it spells."""
        self._words += text

    def parts(self, message: ChatMessage[Tensor]) -> None:
        for number, part in enumerate(message.parts):
            if number:
                self.words("\n")
            match part:
                case str():
                    self.words(part)
                case PictureFile():
                    self._show(part)
                case Sound(samples=samples):
                    self._play(samples)

    def prompt(self) -> ChatPrompt:
        self._add_ids(())
        self._end_ids()
        size = ConversationSize(self._num_tokens, self.num_sound_tokens, self._num_picture_tokens)
        return ChatPrompt(tuple(self._pieces), size)

    def _show(self, file: PictureFile) -> None:
        """A picture with its number, the view first, its slices in rows."""
        image, vision = decode_picture(file.content), self._model.vision
        grid = slice_grid(*image.size, vision, max_slices=file.max_slices)
        self._require((1 + grid.rows * grid.columns) * (vision.query_num + 2))
        self._num_picture_tokens += (1 + grid.rows * grid.columns) * vision.query_num
        view, *slices = cut_picture(image, vision, max_slices=file.max_slices).items
        self.marks("<image_id>")
        self.words(str(self._num_pictures))
        self._num_pictures += 1
        self.marks("</image_id><image>")
        self._add(view, vision.query_num)
        self.marks("</image>")
        for number, item in enumerate(slices):
            if number and number % grid.columns == 0:
                self.words("\n")
            self.marks("<slice>")
            self._add(item, vision.query_num)
            self.marks("</slice>")

    def _play(self, samples: Tensor) -> None:
        check_samples(samples)
        num_tokens = num_reference_tokens(samples.numel(), self._model.audio.pool_step)
        if not num_tokens:
            raise AudioError(f"a sound of {samples.numel()} samples is too short to be heard; send a longer one")
        self._require(num_tokens)
        self.num_sound_tokens += num_tokens
        self.marks("<|audio_start|>")
        self._add(HeardSound(samples, num_tokens), num_tokens)
        self.marks("<|audio_end|>")

    def _add_ids(self, ids: tuple[int, ...]) -> None:
        words, self._words = self._model.tokenizer.encode_plain(self._words), ""
        self._require(len(words) + len(ids))
        self._num_tokens += len(words) + len(ids)
        self._ids += (*words, *ids)

    def _add(self, piece: PatchedImage | HeardSound, num_tokens: int) -> None:
        self._end_ids()
        self._pieces.append(piece)
        self._num_tokens += num_tokens

    def _end_ids(self) -> None:
        if self._ids:
            self._pieces.append(self._ids)
        self._ids = ()

    def _require(self, num_tokens: int) -> None:
        """Raises: ContextLengthExceeded."""
        if self._num_tokens + num_tokens > self._max_tokens:
            raise ContextLengthExceeded(
                f"the conversation has more than {self._max_tokens} tokens; send fewer or shorter messages, or smaller "
                "pictures"
            )
