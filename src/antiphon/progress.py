"""How far a long preparation is: a bar on a terminal, lines in the log elsewhere. Shown by tests/test_progress.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)


def follow(what: str, nums_left: Iterator[int], console: Console) -> None:
    """Do all of something that tells after each part how many are left. console: its bar is gone at the end."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(what, total=None)
        for num_done, num_left in enumerate(nums_left, start=1):
            bar.update(task, completed=num_done, total=num_done + num_left)
            logger.info("%s: %d of %d", what, num_done, num_done + num_left)
