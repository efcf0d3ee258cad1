"""What all tests share: one thread each, the same examples every time, one tiny checkpoint per worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from antiphon.models.minicpmo.tiny import write_tiny

torch.set_num_threads(1)
settings.register_profile("antiphon", deadline=None, derandomize=True)
settings.load_profile("antiphon")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny checkpoint; to be read, not changed."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    write_tiny(folder)
    return folder
