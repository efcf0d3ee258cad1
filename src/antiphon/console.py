"""What commands say on a terminal, and how they end when something is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from antiphon.errors import AntiphonError

EXIT_BAD_INPUT = 1

console = Console()


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Whatever we raise on purpose ends the command with one line and a status, without a traceback."""
    try:
        yield
    except AntiphonError as error:
        line = " ".join(str(error).split())
        Console(stderr=True).print(f"antiphon: {line}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_BAD_INPUT) from error
