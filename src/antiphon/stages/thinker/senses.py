"""Ears and eyes: from samples, pictures and typed text to embeddings in the order in which the thinker reads them.

Source: REFERENCE 4.2. No context, no decisions; one mutable state per session. Shown by tests/stages/test_senses.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from antiphon.errors import AntiphonError, AudioError, InputError, as_ours
from antiphon.kernels.beside import Beside
from antiphon.models.minicpmo.audio_encoder import CHUNK_POSITIONS, AudioEncoder
from antiphon.models.minicpmo.audio_features import MelExtractor
from antiphon.models.minicpmo.audio_history import AudioEncoderState, AudioHistory
from antiphon.models.minicpmo.audio_stream import MelChunk, MelStream
from antiphon.models.minicpmo.captured import NumRuns, Recorder
from antiphon.models.minicpmo.config import AudioConfig, VisionConfig
from antiphon.models.minicpmo.image import Grid, PatchedImage, Picture, cut_picture
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.models.minicpmo.tokens import SpecialTokens, TextTokenizer
from antiphon.models.minicpmo.vision import VisionEncoder
from antiphon.stages.thinker.state import ThinkerSession, UnitInput
from antiphon.units import UNIT_SAMPLES


@dataclass(slots=True)
class SensesState:
    """What ears remember of a session. Owned by Senses."""

    stream: MelStream
    hearing: AudioEncoderState


@dataclass(frozen=True, slots=True)
class UnitRow:
    """One session's second. max_slices: items that a picture may be cut into besides the view; 1 for none."""

    state: SensesState
    heard: UnitInput
    max_slices: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a row gives to the encoders. stream: its session's, with this second taken from it."""

    row: UnitRow
    stream: MelStream
    chunk: MelChunk
    pictures: tuple[Picture, ...]


class Senses:
    """The encoders that all sessions share."""

    def __init__(
        self,
        network: ThinkerNetwork,
        special: SpecialTokens,
        audio: AudioEncoder,
        vision: VisionEncoder,
        beside: Beside,
    ) -> None:
        """beside: where everything runs, so that steps go on meanwhile."""
        self._network = network
        self._special = special
        self._audio = audio
        self._vision = vision
        self._beside = beside
        self._extractor = MelExtractor(audio.config.num_mel_bins)

    def capture(self, sizes: Sequence[int], recorder: Recorder) -> Iterator[int]:
        """Record the ears' pass over so many sessions each; as `AudioEncoder.capture`."""
        return self._audio.capture(sizes, recorder)

    def capture_eyes(self, sizes: Sequence[int], recorder: Recorder) -> Iterator[int]:
        """Record the eyes' pass over so many items of pictures each; as `VisionEncoder.capture`."""
        return self._vision.capture(sizes, recorder)

    @property
    def num_runs(self) -> NumRuns:
        """Of ears and eyes."""
        return self._audio.num_runs + self._vision.num_runs

    def open(self) -> SensesState:
        with self._beside.running():
            return SensesState(MelStream(self._extractor), self._audio.new_state())

    def recall(self, state: SensesState) -> tuple[MelStream, AudioHistory]:
        """What a session has heard, to be restored elsewhere; it goes on unchanged."""
        with self._beside.running():
            return state.stream.fork(), state.hearing.history()

    def restore(self, state: SensesState, stream: MelStream, hearing: AudioHistory) -> None:
        """Make a session that has heard nothing go on from what another one recalled."""
        with self._beside.running():
            state.stream = stream.fork()
            state.hearing.restore(hearing)

    def num_input_tokens(self, num_pictures: int, max_slices: int, num_text_tokens: int) -> int:
        return num_input_tokens(self._vision.config, self._audio.config, num_pictures, max_slices, num_text_tokens)

    def embed_reference(self, samples: Tensor) -> Tensor:
        """The voice in the prompt.

        samples: [n] float32 on the host, 16 kHz; n = 0 for none.
        Returns [m, hidden]. Raises: AudioError if it is too short or not finite.
        """
        if not samples.numel():
            return self._embed(())
        with self._beside.running():
            embeds = self._audio.encode_reference(samples, self._extractor)
        self._beside.hand_over([embeds])
        return embeds

    def embed_item(self, item: PatchedImage) -> Tensor:
        """One item of a picture, without markers. Returns [Q, hidden]."""
        with self._beside.running():
            (items,) = self._vision.encode([Picture(Grid(0, 0), (item,))])
        self._beside.hand_over([items])
        return items[0]

    def embed_units(self, rows: Sequence[UnitRow]) -> list[Tensor | AntiphonError]:
        """Everything of each unit up to the first decision: `<unit>`, pictures, sound, text; encoders run once for all.

        rows: of different sessions. What a row comes to does not depend on the others, in float32 on a CPU to the bit.
        Returns per row [n, hidden], or why it failed; that row's state is as before then.
        """
        assert len({id(row.state) for row in rows}) == len(rows), f"a session stands twice in {len(rows)} rows"
        prepared = [self._prepare(row) for row in rows]
        with self._beside.running():
            encoded = self._encode_apart([one for one in prepared if isinstance(one, _Prepared)])
        self._beside.hand_over(embeds for embeds in encoded if isinstance(embeds, Tensor))
        embeds = iter(encoded)
        return [next(embeds) if isinstance(one, _Prepared) else one for one in prepared]

    def _prepare(self, row: UnitRow) -> _Prepared | AntiphonError:
        """What is a row's own, on the host. The session's state is not touched."""
        heard, stream = row.heard, row.state.stream.fork()
        try:
            config = self._vision.config
            pictures = tuple(cut_picture(picture, config, max_slices=row.max_slices) for picture in heard.pictures)
            if heard.samples.shape != (UNIT_SAMPLES,):
                raise AudioError(f"a unit is {UNIT_SAMPLES} samples, got shape {tuple(heard.samples.shape)}")
            stream.push(heard.samples)
            chunk = stream.take()
            assert chunk is not None, f"{heard.samples.numel()} samples gave no chunk"
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a row is that session's business
            return failure(error)
        return _Prepared(row, stream, chunk, pictures)

    def _encode_apart(self, rows: Sequence[_Prepared]) -> list[Tensor | AntiphonError]:
        """All rows at once, or one by one if that fails, so that only the guilty one does."""
        try:
            return list(self._encode(rows))
        except Exception as error:  # noqa: BLE001 - nobody knows yet whose fault it is
            if len(rows) == 1:
                return [failure(error)]
        return [embeds for row in rows for embeds in self._encode_apart([row])]

    def _encode(self, rows: Sequence[_Prepared]) -> list[Tensor]:
        """States go on only when everything is there. Returns per row [n, hidden]."""
        if not rows:
            return []
        hearing = [one.row.state.hearing.fork() for one in rows]
        seen = iter(self._vision.encode([picture for one in rows for picture in one.pictures]))
        sound = self._audio.encode_chunks([(one.chunk, state) for one, state in zip(rows, hearing, strict=True)])
        typed = [one.row.heard.text_ids for one in rows]
        unit_start, *words = torch.split(
            self._embed((self._special.duplex.unit_start, *chain.from_iterable(typed))), [1, *map(len, typed)]
        )
        embeds = []
        for one, heard, text in zip(rows, sound, words, strict=True):
            pieces = [piece for _ in one.pictures for piece in self._shown(next(seen))]
            embeds.append(torch.cat([unit_start, *pieces, heard, text]))
        for one, state in zip(rows, hearing, strict=True):
            one.row.state.stream, one.row.state.hearing = one.stream, state
        return embeds

    def _shown(self, items: Tensor) -> Iterator[Tensor]:
        """A picture's items [N, Q, hidden], the view first, each between its markers."""
        special = self._special
        marks = self._embed((special.image_start, special.image_end, special.slice_start, special.slice_end))
        image_start, image_end, slice_start, slice_end = marks[:, None].unbind()
        view, *slices = items
        yield from (image_start, view, image_end)
        yield from chain.from_iterable((slice_start, item, slice_end) for item in slices)

    def _embed(self, ids: tuple[int, ...]) -> Tensor:
        return self._network.embed_ids(ids)


def num_input_tokens(
    vision: VisionConfig, audio: AudioConfig, num_pictures: int, max_slices: int, num_text_tokens: int
) -> int:
    """The most tokens of a unit before its first decision, `<unit>` included."""
    # A single slice would repeat the view, so there is none.
    num_items = num_pictures * (1 + (max_slices if max_slices > 1 else 0))
    return 1 + num_items * (vision.query_num + 2) + CHUNK_POSITIONS // audio.pool_step + num_text_tokens


def check_limits(heard: UnitInput, session: ThinkerSession, tokenizer: TextTokenizer) -> None:
    """Raises: InputError if a second has more pictures or text than its session takes, or ids that are no text."""
    if len(heard.pictures) > session.max_pictures:
        raise InputError(f"a unit has {len(heard.pictures)} pictures; this session takes {session.max_pictures}")
    if len(heard.text_ids) > session.max_text_tokens:
        raise InputError(
            f"a unit has {len(heard.text_ids)} tokens of text; this session takes {session.max_text_tokens}: send the "
            f"rest with the next unit"
        )
    if not tokenizer.is_text(heard.text_ids):
        raise InputError(f"typed text has ids that steer the model or are unknown: {heard.text_ids}; send plain text")


def failure(error: Exception) -> AntiphonError:
    """What a row's session is told."""
    if not isinstance(error, AntiphonError):
        logging.getLogger(__name__).error("a unit could not be embedded", exc_info=error)
    return as_ours(error, "a unit could not be embedded")
