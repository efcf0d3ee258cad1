"""Programmatic dependent launch: a kernel is on the device, waiting, before the one in front of it has ended.

A recorded step is hundreds of kernels of a few microseconds, and to bring one onto the device takes one or two of them.
So each kernel, once what was launched before is done and seen, lets the next one come; that one waits in turn. From
Hopper on; elsewhere kernels follow one another. Shown by tests/kernels/test_dependent_launch.py.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LEAST_CAPABILITY = (9, 0)


@triton.jit
def await_previous(IS_DEPENDENT: tl.constexpr):
    """Each program begins so, before it reads what others wrote, writes or returns: the next kernel counts on it."""
    if IS_DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


def dependent(x: Tensor, *, is_wanted: bool = True) -> dict[str, bool]:
    """Arguments of a launch whose kernel begins with `await_previous`. x: any operand."""
    is_dependent = is_wanted and x.is_cuda and _has_dependent_launch(x.device)
    return {"IS_DEPENDENT": is_dependent, "launch_pdl": is_dependent}


@cache
def _has_dependent_launch(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
