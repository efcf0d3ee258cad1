"""Python's garbage collector, kept from what stays.

When enough is new it looks through everything it knows, and no thread runs meanwhile: 0.3 s for the 430 000 objects of
a process that has imported torch, heard by all callers at once. Shown by tests/test_live.py.
"""

from __future__ import annotations

import gc


def spare_what_is_there() -> None:
    """Never look again at what there is by now: programs, models, recordings.

    Of it, what refers to itself is not freed until `look_at_all_again`; everything else is, as ever.
    """
    gc.collect()
    gc.freeze()


def look_at_all_again() -> None:
    """The opposite, for all who spared something in this process."""
    gc.unfreeze()
