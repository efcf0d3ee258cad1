"""A stage that repeats what it is told, after some steps, and fails when it is told to."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import torch

from antiphon.core.messages import Address
from antiphon.errors import AntiphonError, ConfigError, InputError, ResourceExhausted
from antiphon.runner.device import Precedence
from antiphon.stages.loop import Interruption, Ready, StageLoop


@dataclass(frozen=True, slots=True)
class Say:
    """Work for EchoStage. num_steps: that it takes. text: comes back; see `EchoStage` for what it may also mean."""

    address: Address
    text: str
    num_steps: int = 1
    deadline_s: float = 0.0


@dataclass(slots=True, eq=False)
class EchoState:
    """said: since the last interruption, comes back with each answer: a session's state shows in its results."""

    name: str
    num_steps_to_open: int
    said: list[str] = field(default_factory=list)
    work: Say | None = None
    num_steps_left: int = 0


@dataclass(slots=True)
class EchoStage:
    """Says back all that a session said since its last interruption.

    "refuse" is bad input, "fail" ends the session, "raise" is a bug: each in `start`; "step refuse" and "step fail" in
    `step`. interruption: what it means for work under way. open_sessions: empty when all are closed.
    """

    interruption: Interruption
    open_sessions: dict[str, EchoState] = field(default_factory=dict)

    def open(self, settings: tuple[str, str]) -> EchoState:
        """settings: name, and "", "slow" or how to fail."""
        name, how = settings
        _misbehave(how)
        state = EchoState(name, 3 if how == "slow" else 0)
        self.open_sessions[name] = state
        return state

    def start(self, state: EchoState, work: Say) -> None:
        assert state.work is None, f"{state.name} is at work already"
        _misbehave(work.text)
        state.work, state.num_steps_left = work, work.num_steps

    @property
    def is_idle(self) -> bool:
        return all(state.work is None and state.num_steps_to_open < 0 for state in self.open_sessions.values())

    def step(self) -> dict[str, Ready[str] | tuple[str, ...] | AntiphonError]:
        ended: dict[str, Ready[str] | tuple[str, ...] | AntiphonError] = {}
        for name, state in self.open_sessions.items():
            if state.num_steps_to_open >= 0:
                state.num_steps_to_open -= 1
                if state.num_steps_to_open < 0:
                    ended[name] = Ready(f"hello {name}")
            if state.work is not None:
                state.num_steps_left -= 1
                if state.num_steps_left <= 0:
                    ended[name] = self._end(state, state.work)
        return ended

    def interrupt(self, state: EchoState, epoch: int) -> None:
        state.said = []
        if self.interruption is Interruption.VOIDS_WORK:
            state.work = None

    def close(self, state: EchoState) -> None:
        self.open_sessions.pop(state.name, None)

    def survey(self) -> int:
        return len(self.open_sessions)

    @staticmethod
    def _end(state: EchoState, work: Say) -> tuple[str, ...] | AntiphonError:
        state.work = None
        try:
            _misbehave(work.text.removeprefix("step ") if work.text.startswith("step ") else "")
        except AntiphonError as error:
            return error
        state.said.append(work.text)
        return tuple(state.said)


def _misbehave(how: str) -> None:
    match how:
        case "refuse":
            raise InputError("this cannot be said")
        case "fail":
            raise ResourceExhausted("nothing is left")
        case "raise":
            raise RuntimeError("a bug")


EchoLoop = StageLoop[tuple[str, str], Say, EchoState, str, tuple[str, ...], int]


@dataclass(frozen=True, slots=True)
class EchoBuilder:
    """how: "" to build, or why not. held: a file that is there from then on until the stage is closed."""

    how: str = ""
    held: Path = Path(os.devnull)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def precedence(self) -> Precedence:
        return Precedence.USUAL

    def build(self) -> EchoLoop:
        if self.how == "refuse":
            raise ConfigError("this cannot be built")
        if self.how == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        self.held.touch()
        stage = EchoStage(Interruption.VOIDS_WORK)
        return StageLoop(stage, Interruption.VOIDS_WORK, self._release)

    def _release(self) -> None:
        if self.held.is_file():
            self.held.unlink()
