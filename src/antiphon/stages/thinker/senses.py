"""Ears and eyes: from samples and pictures to embeddings in the order in which the thinker reads them.

Source: REFERENCE 4.2. No context, no decisions; one mutable state per session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from antiphon.models.minicpmo.audio_encoder import CHUNK_POSITIONS, AudioEncoder, AudioEncoderState
from antiphon.models.minicpmo.audio_features import MelExtractor
from antiphon.models.minicpmo.audio_stream import MelStream
from antiphon.models.minicpmo.config import AudioConfig, VisionConfig
from antiphon.models.minicpmo.image import cut_picture
from antiphon.models.minicpmo.thinker import ThinkerNetwork
from antiphon.models.minicpmo.tokens import SpecialTokens
from antiphon.models.minicpmo.vision import VisionEncoder
from antiphon.stages.thinker.state import UnitInput


@dataclass(slots=True)
class SensesState:
    """What ears remember of a session. Owned by Senses."""

    stream: MelStream
    hearing: AudioEncoderState


class Senses:
    """The encoders that all sessions share."""

    def __init__(
        self, network: ThinkerNetwork, special: SpecialTokens, audio: AudioEncoder, vision: VisionEncoder
    ) -> None:
        self._network = network
        self._special = special
        self._audio = audio
        self._vision = vision
        self._extractor = MelExtractor(audio.config.num_mel_bins)

    def open(self) -> SensesState:
        return SensesState(MelStream(self._extractor), self._audio.new_state())

    def num_input_tokens(self, num_pictures: int, max_slices: int) -> int:
        return num_input_tokens(self._vision.config, self._audio.config, num_pictures, max_slices)

    def embed_reference(self, samples: Tensor) -> Tensor:
        """The voice in the prompt.

        samples: [n] float32 on the host, 16 kHz; n = 0 for none.
        Returns [m, hidden]. Raises: AudioError if it is too short or not finite.
        """
        if not samples.numel():
            return self._embed(())
        return self._audio.encode_reference(samples, self._extractor)

    def embed_unit(self, state: SensesState, heard: UnitInput, max_slices: int) -> Tensor:
        """Everything of a unit up to the first decision: `<unit>`, pictures, sound.

        Returns [n, hidden]. Raises: AudioError, ImageError.
        """
        seen = [piece for pieces in self._see(heard.pictures, max_slices) for piece in pieces]
        state.stream.push(heard.samples)
        chunk = state.stream.take()
        assert chunk is not None, f"{heard.samples.numel()} samples gave no chunk; a unit must be whole"
        sound = self._audio.encode_chunks([(chunk, state.hearing)])[0]
        return torch.cat([self._embed((self._special.duplex.unit_start,)), *seen, sound])

    def _see(self, pictures: Sequence[Image.Image], max_slices: int) -> Iterator[list[Tensor]]:
        """Per picture: marker, embeddings, marker for the view and for each slice."""
        special = self._special
        marks = self._embed((special.image_start, special.image_end, special.slice_start, special.slice_end))
        image_start, image_end, slice_start, slice_end = marks[:, None].unbind()
        cut = [cut_picture(picture, self._vision.config, max_slices=max_slices) for picture in pictures]
        for view, *slices in self._vision.encode(cut):
            pieces = [image_start, view, image_end]
            for item in slices:
                pieces += [slice_start, item, slice_end]
            yield pieces

    def _embed(self, ids: tuple[int, ...]) -> Tensor:
        return self._network.embed_ids(ids)


def num_input_tokens(vision: VisionConfig, audio: AudioConfig, num_pictures: int, max_slices: int) -> int:
    """The most tokens of a unit before its first decision, `<unit>` included."""
    # A single slice would repeat the view, so there is none.
    num_items = num_pictures * (1 + (max_slices if max_slices > 1 else 0))
    return 1 + num_items * (vision.query_num + 2) + CHUNK_POSITIONS // audio.pool_step
