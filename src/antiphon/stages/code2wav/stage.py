"""Code2wav as the engine drives it: which sessions speak in a step, and with whose voice.

How chunks become sound is `renderer.py`'s. Shown by tests/stages/test_code2wav_stage.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from antiphon.core.codec_buffer import CHUNK_TOKENS
from antiphon.core.messages import CodecChunk, Spoken
from antiphon.core.sampling import Draws
from antiphon.errors import AntiphonError
from antiphon.kernels.transfer import Download
from antiphon.models.minicpmo.flow_cache import Voice
from antiphon.models.minicpmo.vocoder import NoNoise, SeededNoise
from antiphon.models.minicpmo.voice_prompt import VoicePrompt
from antiphon.stages.code2wav.renderer import ChunkRow, Renderer
from antiphon.stages.code2wav.state import Caller, Code2WavCounts, Code2WavSession, Code2WavState
from antiphon.stages.code2wav.voices import VoiceStore
from antiphon.stages.loop import Part, Ready

_REST_AFTER_S = 0.25
"""That the end of a turn gives way to what others want to hear. It plays a second after its chunk, but a protocol that
tells whole units waits for it."""

Code2WavResult = Ready[None] | Spoken[Tensor] | Part[Spoken[Tensor]] | AntiphonError


@dataclass(frozen=True, slots=True)
class _Due:
    """What a session wants to hear next.

    rest: of a chunk that ends its turn, what is spoken in a second piece: all that the flow has held back. Nobody waits
    for it who waits for the first.
    """

    state: Code2WavState
    chunk: CodecChunk
    rest: tuple[CodecChunk, ...] = ()

    @staticmethod
    def of(state: Code2WavState, chunk: CodecChunk) -> _Due:
        # A turn's first second is not filled up if it is its last as well, which has to be known.
        if not (chunk.ends_turn and state.num_reserved_frames and len(chunk.codec_tokens) >= CHUNK_TOKENS):
            return _Due(state, chunk)
        rest = replace(chunk, codec_tokens=(), deadline_s=chunk.deadline_s + _REST_AFTER_S)
        return _Due(state, replace(chunk, ends_turn=False), (rest,))

    @property
    def is_rest(self) -> bool:
        """What the flow has held back and nothing else; it is solved with such only."""
        return not self.chunk.codec_tokens

    @property
    def row(self) -> ChunkRow:
        chunk = self.chunk
        return ChunkRow(self.state, chunk.codec_tokens, chunk.ends_turn, chunk.is_first_of_turn)


class Code2WavStage:
    """Owns the chunks that wait and those that are on their way to the host, and which session speaks when.

    A session is seated from its turn's first chunk to its turn's end; who finds no seat waits for it.
    """

    def __init__(self, renderer: Renderer, voices: VoiceStore, device: torch.device) -> None:
        """device: where the sessions' noise is drawn."""
        self._renderer = renderer
        self._voices = voices
        self._device = device
        self._opening: dict[str, Caller] = {}
        self._due: dict[str, _Due] = {}
        self._rendering: dict[str, tuple[_Due, Download]] = {}

    def pin(self, prompt: VoicePrompt) -> None:
        """Build a voice before anybody asks for it, and keep it for good. Raises: AudioError, as `open`."""
        self._voices.pin(prompt)

    def open(self, session: Code2WavSession) -> Caller:
        """A session that is ready when its voice is. Raises: AudioError if the voice does not fit the model."""
        self._voices.ask(session.voice, session.session_id)
        caller = self._opening[session.session_id] = Caller(session)
        return caller

    def start(self, caller: Caller, chunk: CodecChunk) -> None:
        assert caller.state is not None, f"{caller.session.session_id} is not ready"
        self._due[chunk.address.session_id] = _Due.of(caller.state, chunk)

    @property
    def is_idle(self) -> bool:
        return self._voices.is_idle and not self._rendering and not self._who_fits()

    def step(self) -> dict[str, Code2WavResult]:
        """Render the most urgent chunks, then a piece of one voice.

        On a GPU what is rendered is told in a later step, so that who is in a hurry need not wait for it.
        """
        ended: dict[str, Code2WavResult] = {}
        chosen = {session_id: self._due.pop(session_id) for session_id in self._chosen()}
        results = self._renderer.speak([due.row for due in chosen.values()])
        for (session_id, due), samples in zip(chosen.items(), results, strict=True):
            if isinstance(samples, AntiphonError):
                ended[session_id] = samples
            else:
                self._rendering[session_id] = due, Download(samples)
                for rest in due.rest:
                    self._due[session_id] = _Due(due.state, rest)
        self._voices.advance()
        ended |= self._rendered(waits=not chosen)
        for session_id, voice in self._voices.answers().items():
            ended[session_id] = self._ready(self._opening.pop(session_id), voice)
        return ended

    def interrupt(self, caller: Caller, epoch: int) -> None:
        """Forget the turn; the voice and the noise go on."""
        self._due.pop(caller.session.session_id, None)
        self._rendering.pop(caller.session.session_id, None)
        if caller.state is not None:
            self._renderer.reset_turn(caller.state)

    def close(self, caller: Caller) -> None:
        """Idempotent; gives its voice back, and its turn's memory."""
        self.interrupt(caller, epoch=0)
        self._opening.pop(caller.session.session_id, None)
        self._voices.leave(caller.session.session_id)

    def survey(self) -> Code2WavCounts:
        num_waiting = len(self._due) - len(self._who_fits())
        renderer = self._renderer
        return Code2WavCounts(len(self._due), num_waiting, renderer.num_seated, self._voices.counts, renderer.num_runs)

    def _rendered(self, *, waits: bool) -> dict[str, Code2WavResult]:
        """What has arrived on the host. waits: for the oldest at least."""
        if waits and self._rendering:
            next(iter(self._rendering.values()))[1].read()
        told: dict[str, Code2WavResult] = {}
        for session_id, (due, samples) in list(self._rendering.items()):
            if samples.is_there:
                del self._rendering[session_id]
                spoken = Spoken(due.chunk, samples.read(), goes_on=bool(due.rest))
                told[session_id] = Part(spoken) if spoken.goes_on else spoken
        return told

    def _ready(self, caller: Caller, voice: Voice | AntiphonError) -> Ready[None] | AntiphonError:
        if isinstance(voice, AntiphonError):
            return voice
        is_silent = caller.session.draws is Draws.MOST_LIKELY
        noise = NoNoise(self._device) if is_silent else SeededNoise(caller.session.seed, self._device)
        caller.state = self._renderer.open(voice, noise)
        return Ready(None)

    def _chosen(self) -> list[str]:
        """The most urgent of those who fit, and who can be solved with it; nobody while others are rendered.

        But nobody waits for company that is complete, and nobody hears a turn yet that begins.
        """
        fitting, max_rows = [one for one in self._who_fits() if one not in self._rendering], self._renderer.max_rows
        is_pressing = len(fitting) >= max_rows or any(self._due[one].chunk.is_first_of_turn for one in fitting)
        if self._rendering and not is_pressing:
            return []
        return [one for one in fitting if self._due[one].is_rest == self._due[fitting[0]].is_rest][:max_rows]

    def _who_fits(self) -> list[str]:
        """Sessions with a seat or that find one, most urgent first; nobody overtakes one that waits for a seat."""
        by_urgency = sorted(self._due, key=lambda session_id: self._due[session_id].chunk.deadline_s)
        standing = [session_id for session_id in by_urgency if not self._due[session_id].state.num_reserved_frames]
        num_fitting = self._renderer.num_fitting([self._due[session_id].state for session_id in standing])
        waiting = {*standing[num_fitting:]}
        return [session_id for session_id in by_urgency if session_id not in waiting]
