"""Host to device and back, on a CPU; that nothing waits on a GPU is in tests/test_cuda.py."""

from __future__ import annotations

import pytest
import torch

from antiphon.kernels.transfer import Download, upload


@pytest.mark.parametrize("values", [[], [1, 2, 3], [[True], [False]], [0.5]])
def test_what_goes_up_comes_down(values: list[object]) -> None:
    host = torch.tensor(values)
    download = Download(upload(host, torch.device("cpu")))
    assert download.is_there
    assert torch.equal(download.read(), host)
