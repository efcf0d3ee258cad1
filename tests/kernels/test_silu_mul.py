"""The gated activation against its formula in float64."""

from __future__ import annotations

import pytest
import torch

from antiphon.errors import ShapeError
from antiphon.kernels.silu_mul.op import silu_mul
from kernels.formulas import EPS


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 7), (2, 129)])
def test_silu_mul_is_its_formula(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (5 * torch.randn(shape, generator=generator) for _ in range(2))
    want = gate.double() / (1 + torch.exp(-gate.double())) * up.double()
    # exp is good to some units in the last place, and enlarges nothing: its argument is exact.
    torch.testing.assert_close(silu_mul(gate, up).double(), want, rtol=8 * EPS, atol=0)


def test_strided_operands_give_what_their_copies_give() -> None:
    gate, up = torch.arange(12.0).view(3, 4).T, torch.arange(12.0).flip(0).view(3, 4).T
    torch.testing.assert_close(silu_mul(gate, up), silu_mul(gate.contiguous(), up.contiguous()), rtol=8 * EPS, atol=0)


def test_very_large_gates_do_not_overflow() -> None:
    gate = torch.tensor([-1e30, -200.0, 200.0, 1e30])
    assert silu_mul(gate, torch.ones(4)).tolist() == [0, 0, 200, gate[3].item()]


def test_operands_of_two_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="one shape"):
        silu_mul(torch.zeros(2, 3), torch.zeros(3))
