"""Sessions as generators, steps as batches: whoever waits for a forward pass runs in the next one.

A session's work on a decoder (a prompt, a unit, a spoken chunk) is a generator. It yields a `Request` for each row that
it needs and is sent the `Reply` as soon as the step is launched; it knows nothing of its neighbours. What was drawn is
fed from the device and read one step late, so that host and device do not wait for each other. `StepLoop` collects the
requests of all sessions into one step: prefill, decode, unit close and re-forwarded `previous` text mix freely.
Shown by tests/stages/test_stepping.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from antiphon.core.scheduler import Waiting, schedule
from antiphon.errors import AntiphonError, InternalError
from antiphon.kernels.transfer import Download, upload
from antiphon.stages.draw_table import DrawSlot
from antiphon.stages.paged import PagedDecoder
from antiphon.stages.step_packing import Row

DrawT = TypeVar("DrawT")
OfferedDrawT = TypeVar("OfferedDrawT", contravariant=True)
ResultT = TypeVar("ResultT")

MAX_STEP_TOKENS = 512
"""Tokens of all rows in a step. A longer row asks for pieces of this size."""

_LOG = logging.getLogger(__name__)


class Drawn:
    """A drawn id on its way to the host."""

    def __init__(self, ids: Download, index: int) -> None:
        self._ids = ids
        self._index = index

    @property
    def is_there(self) -> bool:
        return self._ids.is_there

    def read(self) -> int:
        """The id. Only after the next row's reply or a `Settle`, so that the device has work meanwhile."""
        return self._ids.read_ids()[self._index]


class ArrivingState:
    """A token's state on its way to the host."""

    def __init__(self, states: Download, index: int) -> None:
        self._states = states
        self._index = index

    @property
    def is_there(self) -> bool:
        return self._states.is_there

    def read(self) -> Tensor:
        """[hidden], on the host. As `Drawn.read`."""
        return self._states.read()[self._index]


class _FirstStates:
    """States of the first tokens of a step, copied down together once the first of them is wanted, else never."""

    def __init__(self, states: Tensor) -> None:
        """states: [M, hidden]."""
        self._states = states
        self._copies: list[Download] = []

    def arriving(self, index: int) -> ArrivingState:
        """Before the next step is launched, so that no state waits for it."""
        if not self._copies:
            self._copies.append(Download(self._states))
        return ArrivingState(self._copies[0], index)


class Awaited(Protocol):
    """What comes down to the host some time: `Drawn`, `ArrivingState`."""

    @property
    def is_there(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Request(Generic[DrawT]):
    """What a session wants from the next step.

    inputs: [n, hidden] of the row's tokens, or the slot whose newest draw is the row's only token.
    draw: how to choose from the last token's state; None for no choice.
    """

    row: Row
    inputs: Tensor | DrawSlot
    draw: DrawT | None


@dataclass(frozen=True, slots=True)
class Chain(Generic[DrawT]):
    """Several tokens in a row, each what the draw before it came to, the first the slot's newest draw.

    row: of as many tokens as draws. draws: from each token's state; as many as the loop's chains have steps.
    """

    row: Row
    slot: DrawSlot
    draws: tuple[DrawT, ...]


@dataclass(frozen=True, slots=True)
class Settle:
    """A session's wish to go on when it can read something, in no step meanwhile. It is sent nothing."""

    awaited: Awaited


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A row's part of a step. Few want more than what was drawn, so it is cut out when it is wanted.

    all_inputs, all_states: [N, hidden] of the step; of chains no inputs. start, end: the row's tokens.
    draws: of a chain one per token; of a request one, or none was asked for.
    first_states: of the step's rows of one token, which come first; of chains none.
    """

    all_inputs: Tensor
    all_states: Tensor
    first_states: _FirstStates
    start: int
    end: int
    draws: tuple[Drawn, ...]

    @property
    def drawn(self) -> Drawn | None:
        """Of a request; None if nothing was asked."""
        return self.draws[0] if self.draws else None

    @property
    def inputs(self) -> Tensor:
        """[n, hidden] of the row's tokens, on the device."""
        return self.all_inputs[self.start : self.end]

    @property
    def states(self) -> Tensor:
        """[n, hidden] of the row's tokens, on the device."""
        return self.all_states[self.start : self.end]

    def arriving_state(self) -> ArrivingState:
        """Of a row of one token. To be asked for at once."""
        assert self.end == self.start + 1, f"a row of {self.end - self.start} tokens"
        return self.first_states.arriving(self.start)


Wish = Request[DrawT] | Chain[DrawT] | Settle
"""What a session waits for."""

Steps = Generator[Wish[DrawT], Reply, ResultT]


class Chooser(Protocol[OfferedDrawT]):
    """Draws for the rows of a step, and remembers on the device what it drew."""

    def choose(self, states: Tensor, draws: Sequence[OfferedDrawT]) -> Download:
        """One id per draw, [M] int64. states: [M, hidden]. A failed call leaves nothing behind."""

    def embed_drawn(self, slots: Sequence[DrawSlot]) -> Tensor:
        """[len(slots), hidden], the inputs for each slot's newest draw."""


class Chains(Protocol[OfferedDrawT]):
    """Runs several steps at once for rows that feed themselves."""

    def run_chains(self, rows: Sequence[Row], draws: Sequence[tuple[OfferedDrawT, ...]]) -> tuple[Download, Tensor]:
        """rows: R, of K tokens each. draws: of each row, K.

        Returns ids [R K] int64 and states [R K, hidden], row after row.
        """


@dataclass(frozen=True, slots=True)
class Finished(Generic[ResultT]):
    """A session's work that came to its end. result: what it returned, or what it failed with."""

    session_id: str
    result: ResultT | AntiphonError


@dataclass(slots=True)
class _Active(Generic[DrawT, ResultT]):
    """wish: what the session waits for."""

    session_id: str
    steps: Steps[DrawT, ResultT]
    wish: Wish[DrawT]
    deadline_s: float
    order: int


_Wanting = tuple[_Active[DrawT, ResultT], Request[DrawT] | Chain[DrawT]]
"""A session together with the row that it waits for."""


class StepLoop(Generic[DrawT, ResultT]):
    """Owns the unfinished work of all sessions on one decoder.

    chooser: called once per step. chains: none, or what runs the sessions that ask for a `Chain`, after the step of the
    others.
    """

    def __init__(self, decoder: PagedDecoder, chooser: Chooser[DrawT], *chains: Chains[DrawT]) -> None:
        self._decoder = decoder
        self._chooser = chooser
        self._chains = chains
        self._active: dict[str, _Active[DrawT, ResultT]] = {}
        self._num_added = 0
        # What the next `step` returns.
        self._ended: list[Finished[ResultT]] = []

    @property
    def is_idle(self) -> bool:
        return not self._active and not self._ended

    def add(self, session_id: str, steps: Steps[DrawT, ResultT], deadline_s: float) -> None:
        """Start a session's work; `step` returns its end.

        deadline_s: when the audio that depends on it must exist, on the engine's clock.
        """
        assert session_id not in self._active, f"session {session_id} is at work already"
        wish = self._resumed(session_id, partial(next, steps))
        if wish is not None:
            self._active[session_id] = _Active(session_id, steps, wish, deadline_s, self._num_added)
            self._num_added += 1

    def cancel(self, session_id: str) -> None:
        """Forget a session's work, wherever it is; idempotent. What it holds is its owner's to free."""
        active = self._active.pop(session_id, None)
        if active is not None:
            active.steps.close()
        self._ended = [finished for finished in self._ended if finished.session_id != session_id]

    def step(self) -> tuple[Finished[ResultT], ...]:
        """One forward pass for the most urgent rows. Returns the work that came to its end."""
        self._step()
        ended, self._ended = self._ended, []
        return tuple(ended)

    def run(self, session_id: str, steps: Steps[DrawT, ResultT], deadline_s: float) -> ResultT:
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
            self._step()

    def _step(self) -> None:
        self._settle()
        wanting = [(one, one.wish) for one in self._active.values() if not isinstance(one.wish, Settle)]
        waiting = [Waiting(len(wish.row.placement.slots), one.deadline_s, one.order) for one, wish in wanting]
        chosen = [wanting[index] for index in schedule(waiting, MAX_STEP_TOKENS)]
        requests = [one for one in chosen if isinstance(one[1], Request)]
        launched = self._launch(sorted(requests, key=lambda one: len(one[1].row.placement.slots) > 1))
        launched += self._launch([one for one in chosen if isinstance(one[1], Chain)])
        for active, reply in launched:
            self._advance(active, partial(active.steps.send, reply))

    def _settle(self) -> None:
        """Let sessions go on for whom all has come down; wait for one only if nobody has a row to run."""
        has_row = any(not isinstance(one.wish, Settle) for one in self._active.values())
        for active in list(self._active.values()):
            if isinstance(active.wish, Settle) and (active.wish.awaited.is_there or not has_row):
                self._advance(active, partial(next, active.steps))
                has_row = has_row or not isinstance(active.wish, Settle)

    def _launch(self, chosen: Sequence[_Wanting[DrawT, ResultT]]) -> list[tuple[_Active[DrawT, ResultT], Reply]]:
        """Run rows of one kind; if that fails, each by itself. Who fails alone ends, the others get replies."""
        wishes = [wish for _, wish in chosen]
        try:
            replies = self._forward([wish for wish in wishes if isinstance(wish, Request)])
            replies += self._chain([wish for wish in wishes if isinstance(wish, Chain)])
        except Exception as error:  # noqa: BLE001 - a fence: only sessions whose rows fail alone end
            if len(chosen) > 1:
                # To write a slot again with the same key is harmless, and a failed draw has left nothing behind.
                return [launched for one in chosen for launched in self._launch([one])]
            ((active, _),) = chosen
            _LOG.exception("the row of session %s failed", active.session_id)
            active.steps.close()
            self._end(active.session_id, _internal(error, active.session_id))
            return []
        return [(active, reply) for (active, _), reply in zip(chosen, replies, strict=True)]

    def _chain(self, wishes: Sequence[Chain[DrawT]]) -> list[Reply]:
        if not wishes:
            return []
        (chains,) = self._chains
        ids, states = chains.run_chains([wish.row for wish in wishes], [wish.draws for wish in wishes])
        num_steps = len(wishes[0].draws)
        starts = range(0, len(wishes) * num_steps, num_steps)
        drawn = [tuple(Drawn(ids, start + step) for step in range(num_steps)) for start in starts]
        nothing = states[:0]
        first = _FirstStates(nothing)
        return [
            Reply(nothing, states, first, start, start + num_steps, own)
            for start, own in zip(starts, drawn, strict=True)
        ]

    def _forward(self, requests: Sequence[Request[DrawT]]) -> list[Reply]:
        if not requests:
            return []
        embeds = self._embed(requests)
        states = self._decoder.run([request.row for request in requests], embeds)
        ends = list(accumulate(len(request.row.placement.slots) for request in requests))
        draws = [request.draw for request in requests if request.draw is not None]
        drawn: list[tuple[Drawn, ...]] = [()] * len(requests)
        if draws:
            drawing = [index for index, request in enumerate(requests) if request.draw is not None]
            ids = self._chooser.choose(_rows(states, [ends[index] - 1 for index in drawing]), draws)
            for place, index in enumerate(drawing):
                drawn[index] = (Drawn(ids, place),)
        starts = [0, *ends[:-1]]
        first = _FirstStates(states[: sum(end - start == 1 for start, end in zip(starts, ends, strict=True))])
        return [Reply(embeds, states, first, *part) for part in zip(starts, ends, drawn, strict=True)]

    def _embed(self, requests: Sequence[Request[DrawT]]) -> Tensor:
        """Inputs of all rows, in order, [N, hidden]; what was drawn is embedded in one call."""
        slots = [request.inputs for request in requests if isinstance(request.inputs, DrawSlot)]
        if len(slots) == len(requests):
            return self._chooser.embed_drawn(slots)
        drawn = iter(torch.split(self._chooser.embed_drawn(slots), 1) if slots else ())
        return torch.cat([next(drawn) if isinstance(one.inputs, DrawSlot) else one.inputs for one in requests])

    def _advance(self, active: _Active[DrawT, ResultT], resume: Callable[[], Wish[DrawT]]) -> None:
        wish = self._resumed(active.session_id, resume)
        if wish is not None:
            active.wish = wish

    def _resumed(self, session_id: str, resume: Callable[[], Wish[DrawT]]) -> Wish[DrawT] | None:
        """What a session wants next; None if its work came to its end."""
        try:
            return resume()
        except StopIteration as done:
            self._end(session_id, done.value)
        except AntiphonError as error:
            self._end(session_id, error)
        except Exception as error:  # noqa: BLE001 - a fence: whatever a session's work raises ends it alone
            _LOG.exception("the work of session %s failed", session_id)
            self._end(session_id, _internal(error, session_id))
        return None

    def _end(self, session_id: str, result: ResultT | AntiphonError) -> None:
        self._active.pop(session_id, None)
        self._ended.append(Finished(session_id, result))


def _rows(states: Tensor, indices: list[int]) -> Tensor:
    """Some of the rows; most often all of them, which costs nothing."""
    if len(indices) == states.shape[0]:
        return states
    return states[upload(torch.tensor(indices, dtype=torch.int64), states.device)]


def _internal(error: Exception, session_id: str) -> InternalError:
    """Our bug, as the end of one session."""
    failure = InternalError(f"the work of session {session_id} failed: {error!r}; the call ends, others go on")
    failure.__cause__ = error
    return failure
