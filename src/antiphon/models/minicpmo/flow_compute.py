"""In which numbers the flow's estimator computes. No torch, so that settings can name it.

What each costs in time and error is in docs/code2wav.md. Shown by tests/models/test_flow_compute.py.
"""

from __future__ import annotations

from enum import Enum


class Compute(Enum):
    """Of the estimator's products. Sums, norms, the stream between its layers and the Euler steps are float32."""

    FLOAT32 = "float32"
    TF32 = "tf32"
    """Float32 whose products see 10 bits of each factor's fraction, on a GPU that has them; elsewhere float32. What is
    not prepared by a graph is float32 there too: the switch is the whole process's."""
    BFLOAT16 = "bfloat16"
