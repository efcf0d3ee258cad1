"""A way to a stage on which one session's work gets lost, comes twice, comes late or changes places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from antiphon.core.messages import Close, Interrupt, Open, Survey, Work
from antiphon.runner.placed import Placed

WorkT = TypeVar("WorkT", bound=Work)
SettingsT = TypeVar("SettingsT")


@dataclass(slots=True)
class Lossy(Generic[SettingsT, WorkT]):
    """What opens, interrupts or closes a session always arrives, as does the work of others.

    is_victim: whether a session of this name in messages is the one.
    fate: of its n pieces of work that were sent so far, the numbers of those that arrive in place of the newest.
    """

    stage: Placed[Open[SettingsT] | WorkT | Interrupt | Close | Survey]
    is_victim: Callable[[str], bool]
    fate: Callable[[int], Sequence[int]]
    sent: list[WorkT] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        return self.stage.is_idle

    def start(self) -> None:
        self.stage.start()

    def send(self, message: Open[SettingsT] | WorkT | Interrupt | Close | Survey) -> None:
        if isinstance(message, Open | Interrupt | Close | Survey) or not self.is_victim(message.address.session_id):
            self.stage.send(message)
            return
        self.sent.append(message)
        for number in self.fate(len(self.sent)):
            self.stage.send(self.sent[number])

    def step(self) -> None:
        self.stage.step()

    def stop(self) -> None:
        self.stage.stop()
