"""What all tests share: one thread each, the same examples every time, one tiny checkpoint of a kind per worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from antiphon.models.minicpmo.hift_config import Generation
from antiphon.models.minicpmo.tiny import write_tiny

torch.set_num_threads(1)
settings.register_profile("antiphon", deadline=None, derandomize=True)
settings.load_profile("antiphon")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-messages", type=int, default=1000, help="Random messages that a server has to bear.")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny checkpoint; to be read, not changed."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    write_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_causal_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for minicpmo-utils 1.0.7."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-1.0.7"
    write_tiny(folder, Generation.V1_0_7)
    return folder
