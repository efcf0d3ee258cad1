"""Sessions as generators, steps as batches: whoever waits for a forward pass runs in the next one.

A session's work on a decoder (a prompt, a unit, a spoken chunk) is a generator. It yields a `Request` for each row that
it needs and is sent the `Reply`; it knows nothing of its neighbours. `StepLoop` collects the requests of all sessions
into one step: prefill, decode, unit close and re-forwarded `previous` text mix freely. Shown by
tests/stages/test_stepping.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from antiphon.core.scheduler import Waiting, schedule
from antiphon.errors import AntiphonError
from antiphon.stages.paged import PagedDecoder, Row

DrawT = TypeVar("DrawT")
ChoiceT = TypeVar("ChoiceT")
ResultT = TypeVar("ResultT")

MAX_STEP_TOKENS = 512
"""Tokens of all rows in a step. A longer row asks for pieces of this size."""


@dataclass(frozen=True, slots=True)
class Request(Generic[DrawT]):
    """What a session wants from the next step. draw: how to choose from the last token's state; None for no choice."""

    row: Row
    draw: DrawT | None


@dataclass(frozen=True, slots=True)
class Reply(Generic[ChoiceT]):
    """states: [n, hidden] of the row's tokens. choice: what was drawn; None if nothing was asked."""

    states: Tensor
    choice: ChoiceT | None


Steps = Generator[Request[DrawT], Reply[ChoiceT], ResultT]


@dataclass(frozen=True, slots=True)
class Finished(Generic[ResultT]):
    """A session's work that came to its end. result: what it returned, or what it failed with."""

    session_id: str
    result: ResultT | AntiphonError


@dataclass(slots=True)
class _Active(Generic[DrawT, ChoiceT, ResultT]):
    """request: what the session waits for."""

    session_id: str
    steps: Steps[DrawT, ChoiceT, ResultT]
    request: Request[DrawT]
    deadline_s: float
    order: int


class StepLoop(Generic[DrawT, ChoiceT, ResultT]):
    """Owns the unfinished work of all sessions on one decoder.

    choose: (states [M, hidden], M draws) → M choices; called once per step.
    """

    def __init__(self, decoder: PagedDecoder, choose: Callable[[Tensor, Sequence[DrawT]], Sequence[ChoiceT]]) -> None:
        self._decoder = decoder
        self._choose = choose
        self._active: dict[str, _Active[DrawT, ChoiceT, ResultT]] = {}
        self._num_added = 0
        # What ended without a step, or while `run` was driving other work; the next step returns it.
        self._ended: list[Finished[ResultT]] = []

    @property
    def is_idle(self) -> bool:
        return not self._active and not self._ended

    def add(self, session_id: str, steps: Steps[DrawT, ChoiceT, ResultT], deadline_s: float) -> None:
        """Start a session's work; `step` returns its end.

        deadline_s: when the audio that depends on it must exist, on the engine's clock.
        """
        assert session_id not in self._active, f"session {session_id} is at work already"
        try:
            request = next(steps)
        except StopIteration as done:
            self._ended.append(Finished(session_id, done.value))
        except AntiphonError as error:
            self._ended.append(Finished(session_id, error))
        else:
            self._active[session_id] = _Active(session_id, steps, request, deadline_s, self._num_added)
            self._num_added += 1

    def cancel(self, session_id: str) -> None:
        """Forget a session's work, wherever it is; idempotent. What it holds is its owner's to free."""
        active = self._active.pop(session_id, None)
        if active is not None:
            active.steps.close()
        self._ended = [finished for finished in self._ended if finished.session_id != session_id]

    def step(self) -> tuple[Finished[ResultT], ...]:
        """One forward pass for the most urgent rows. Returns the work that came to its end."""
        ended, self._ended = self._ended, []
        return (*ended, *self._step())

    def run(self, session_id: str, steps: Steps[DrawT, ChoiceT, ResultT], deadline_s: float) -> ResultT:
        """Drive one piece of work to its end; the work of others goes on in the same steps.

        Raises: what it fails with.
        """
        self.add(session_id, steps, deadline_s)
        while True:
            for finished in self._ended:
                if finished.session_id == session_id:
                    self._ended.remove(finished)
                    if isinstance(finished.result, AntiphonError):
                        raise finished.result
                    return finished.result
            self._ended += self._step()

    def _step(self) -> tuple[Finished[ResultT], ...]:
        waiting = tuple(self._active.values())
        plan = schedule(
            [Waiting(len(a.request.row.placement.slots), a.deadline_s, a.order) for a in waiting], MAX_STEP_TOKENS
        )
        chosen = [waiting[index] for index in plan]
        if not chosen:
            return ()
        states = self._decoder.run([active.request.row for active in chosen])
        parts = torch.split(states, [len(active.request.row.placement.slots) for active in chosen])
        drawing = [index for index, active in enumerate(chosen) if active.request.draw is not None]
        draws = [draw for active in chosen if (draw := active.request.draw) is not None]
        choices: dict[int, ChoiceT] = {}
        if draws:
            last = torch.stack([parts[index][-1] for index in drawing])
            choices = dict(zip(drawing, self._choose(last, draws), strict=True))
        replies = [Reply(part, choices.get(index)) for index, part in enumerate(parts)]
        ended = (self._advance(active, reply) for active, reply in zip(chosen, replies, strict=True))
        return tuple(finished for finished in ended if finished is not None)

    def _advance(self, active: _Active[DrawT, ChoiceT, ResultT], reply: Reply[ChoiceT]) -> Finished[ResultT] | None:
        try:
            active.request = active.steps.send(reply)
        except StopIteration as done:
            del self._active[active.session_id]
            return Finished(active.session_id, done.value)
        except AntiphonError as error:
            del self._active[active.session_id]
            return Finished(active.session_id, error)
        return None
