"""How many rows are few."""

from __future__ import annotations

MAX_ROWS = 8
"""A product of the hardware is as wide. Each program norms all rows: with more of them a norm of its own costs less,
and the library's products win."""
