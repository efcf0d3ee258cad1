"""Code2wav as the engine drives it: which sessions speak in a step, and with whose voice.

How chunks become sound is `renderer.py`'s. Shown by tests/stages/test_code2wav_stage.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

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
from antiphon.stages.loop import Ready


class Code2WavStage:
    """Owns the chunks that wait and those that are on their way to the host, and which session speaks when.

    A session is seated from its turn's first chunk to its turn's end; who finds no seat waits for it.
    """

    def __init__(
        self,
        renderer: Renderer,
        voices: VoiceStore,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """device: where the sessions' noise is drawn. clock: seconds."""
        self._renderer = renderer
        self._voices = voices
        self._device = device
        self._opening: dict[str, Caller] = {}
        self._due: dict[str, tuple[Code2WavState, CodecChunk]] = {}
        self._rendering: dict[str, tuple[CodecChunk, Download]] = {}
        self._clock = clock
        # When what was rendered last began, and until when it is rested from.
        self._began_s = 0.0
        self._rested_at_s = 0.0

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
        self._due[chunk.address.session_id] = (caller.state, chunk)

    @property
    def is_idle(self) -> bool:
        return self._voices.is_idle and not self._rendering and not self._who_fits()

    @property
    def rest_s(self) -> float:
        """After chunks were rendered, as long as that took, unless somebody is in a hurry.

        A solve of several chunks takes little longer than one of one, and the other stages have the device meanwhile.
        """
        if self._rendering or not self._voices.is_idle or self._chosen():
            return 0.0
        return max(0.0, self._rested_at_s - self._clock())

    def step(self) -> dict[str, Ready[None] | Spoken[Tensor] | AntiphonError]:
        """Render the most urgent chunks, then a piece of one voice.

        On a GPU what is rendered is told in a later step, so that who is in a hurry need not wait for it.
        """
        ended: dict[str, Ready[None] | Spoken[Tensor] | AntiphonError] = {}
        now_s = self._clock()
        chosen = [self._due.pop(session_id) for session_id in self._chosen()]
        rows = [ChunkRow(state, chunk.codec_tokens, chunk.ends_turn, chunk.is_first_of_turn) for state, chunk in chosen]
        for (_, chunk), samples in zip(chosen, self._renderer.speak(rows), strict=True):
            if isinstance(samples, AntiphonError):
                ended[chunk.address.session_id] = samples
            else:
                self._rendering[chunk.address.session_id] = chunk, Download(samples)
        self._voices.advance()
        if chosen:
            self._began_s = now_s
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

    def _rendered(self, *, waits: bool) -> dict[str, Spoken[Tensor]]:
        """What has arrived on the host. waits: for the oldest at least."""
        if waits and self._rendering:
            next(iter(self._rendering.values()))[1].read()
        arrived = [session_id for session_id, (_, samples) in self._rendering.items() if samples.is_there]
        told = {session_id: self._rendering.pop(session_id) for session_id in arrived}
        if told and not self._rendering:
            ended_s = self._clock()
            self._rested_at_s = ended_s + (ended_s - self._began_s)
        return {session_id: Spoken(chunk, samples.read()) for session_id, (chunk, samples) in told.items()}

    def _ready(self, caller: Caller, voice: Voice | AntiphonError) -> Ready[None] | AntiphonError:
        if isinstance(voice, AntiphonError):
            return voice
        is_silent = caller.session.draws is Draws.MOST_LIKELY
        noise = NoNoise(self._device) if is_silent else SeededNoise(caller.session.seed, self._device)
        caller.state = self._renderer.open(voice, noise)
        return Ready(None)

    def _chosen(self) -> list[str]:
        """The most urgent of those who fit; nobody while others are rendered or rested from.

        But nobody waits for company that is complete, and nobody hears a turn yet that begins.
        """
        fitting, max_rows = self._who_fits(), self._renderer.max_rows
        is_pressing = len(fitting) >= max_rows or any(self._due[one][1].is_first_of_turn for one in fitting)
        is_rested = not self._rendering and self._clock() >= self._rested_at_s
        return fitting[:max_rows] if is_pressing or is_rested else []

    def _who_fits(self) -> list[str]:
        """Sessions with a seat or that find one, most urgent first; nobody overtakes one that waits for a seat."""
        by_urgency = sorted(self._due, key=lambda session_id: self._due[session_id][1].deadline_s)
        standing = [session_id for session_id in by_urgency if not self._due[session_id][0].num_reserved_frames]
        num_fitting = self._renderer.num_fitting([self._due[session_id][0] for session_id in standing])
        waiting = {*standing[num_fitting:]}
        return [session_id for session_id in by_urgency if session_id not in waiting]
