"""A call on a terminal: one line per second and per thing that happened, and a summary. Not a log."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import quantiles

from rich.console import Console
from rich.text import Text

from antiphon.core.events import (
    Event,
    InputRefused,
    SessionEnded,
    SessionOpened,
    SpeechLost,
    SpeechQueued,
    TurnEnded,
    TurnInterrupted,
    TurnStarted,
    UnitDecided,
    UnitFinished,
    WindowSlid,
)
from antiphon.units import OUTPUT_RATE_HZ

HEADING = "  time  decision    unit ms (think + talk + wave)  context tokens  said"


@dataclass(slots=True)
class Timeline:
    """Prints events as they come and remembers what the summary needs.

    A unit is one line, with what it cost, so that what happens between its decision and its end is printed after it.
    """

    console: Console
    _decided: UnitDecided | None = None
    _held: list[Event] = field(default_factory=list)
    _unit_ms: list[float] = field(default_factory=list)
    _num_turns: int = 0
    _num_slides: int = 0
    _spoken_samples: int = 0

    def show(self, event: Event) -> None:
        """Print one event, or hold it until its unit is over."""
        if isinstance(event, UnitDecided):
            self._release()
            self._decided = event
        elif isinstance(event, UnitFinished):
            if self._decided is not None and self._decided.unit == event.unit:
                self._print_unit(self._decided, event)
                self._decided = None
            self._release()
        elif isinstance(event, SessionEnded):
            self._release()
            self._print(event)
        elif self._decided is not None:
            self._held.append(event)
        else:
            self._print(event)

    def _release(self) -> None:
        held, self._held = self._held, []
        for event in held:
            self._print(event)

    def _print_unit(self, decided: UnitDecided, finished: UnitFinished) -> None:
        self._unit_ms.append(finished.thinker_ms + finished.talker_ms + finished.code2wav_ms)
        self.console.print(_unit_line(decided, finished, self._unit_ms[-1]), highlight=False, soft_wrap=True)

    def _print(self, event: Event) -> None:
        match event:
            case SessionOpened():
                self.console.print(
                    f"prompt {event.num_prompt_tokens} tokens in {event.prompt_ms:.0f} ms, "
                    f"context up to {event.max_context_tokens} tokens",
                    highlight=False,
                )
                self.console.print(HEADING, style="bold", highlight=False)
            case WindowSlid():
                self._num_slides += 1
                first, last = event.dropped_units[0], event.dropped_units[-1]
                units = f"unit {first}" if first == last else f"units {first} to {last}"
                kept = f", {len(event.previous_ids)} tokens of earlier words kept" if event.previous_ids else ""
                self._mark(event.at_s, "slide", f"{units} dropped ({event.num_dropped_tokens} tokens){kept}", "yellow")
            case TurnStarted():
                self._num_turns += 1
                self._mark(event.at_s, "turn", f"{event.turn} starts", "cyan")
            case TurnEnded():
                self._mark(event.at_s, "turn", f"{event.turn} ends", "cyan")
            case TurnInterrupted():
                self._mark(event.at_s, "turn", f"{event.turn} is interrupted", "magenta")
            case SpeechQueued():
                self._spoken_samples += event.num_samples
            case SpeechLost():
                self._mark(event.at_s, "lost", f"the rest of turn {event.turn}: {event.reason}", "red")
            case InputRefused():
                self._mark(event.at_s, "refused", f"{event.code}: {event.message}", "red")
            case SessionEnded():
                self._mark(event.at_s, "end", f"{event.code}: {event.message}", "bold")

    def summarise(self, elapsed_s: float) -> None:
        """Print what the call came to. elapsed_s: time that it took to compute."""
        num_units = len(self._unit_ms)
        rate = num_units / elapsed_s if elapsed_s else 0.0
        lines = [
            f"{num_units} s of call in {elapsed_s:.1f} s ({rate:.1f} x real time), {self._num_turns} turns, "
            f"{self._spoken_samples / OUTPUT_RATE_HZ:.1f} s of speech, {self._num_slides} slides"
        ]
        if num_units > 1:
            cuts = quantiles(self._unit_ms, n=20, method="inclusive")
            lines.append(
                f"a unit took {cuts[9]:.0f} ms (median), {cuts[18]:.0f} ms (p95), {max(self._unit_ms):.0f} ms at most"
            )
        for line in lines:
            self.console.print(line, highlight=False, soft_wrap=True)

    def _mark(self, at_s: float, what: str, text: str, style: str) -> None:
        line = Text.assemble(f"{_clock(at_s)}  ", (f"{what:<9}", style), f" {text}")
        self.console.print(line, highlight=False, soft_wrap=True)


def _unit_line(event: UnitDecided, cost: UnitFinished, unit_ms: float) -> Text:
    decision = ("listen", "dim") if event.is_listen else ("speak", "green")
    parts = f"({cost.thinker_ms:.0f} + {cost.talker_ms:.0f} + {cost.code2wav_ms:.0f})"
    said = "".join(char if char.isprintable() else "·" for words in event.said for char in words.text)
    return Text.assemble(
        f"{_clock(event.at_s)}  ",
        (f"{decision[0]:<9}", decision[1]),
        f" {unit_ms:6.0f} {parts:<22}  {event.num_context_tokens:14}  ",
        (said, "italic"),
    )


def _clock(at_s: float) -> str:
    minutes, seconds = divmod(int(at_s), 60)
    return f"{minutes:3}:{seconds:02}"
