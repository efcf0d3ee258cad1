"""A checkpoint folder that appears whole or not at all, for whoever writes one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from antiphon.errors import ConfigError


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when the block ends; on an error nothing is left.

    Raises: ConfigError if `folder` is there already and not empty, or cannot be written.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} is already there and not an empty folder; give one that is not there yet")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as unfinished:
            whole = Path(unfinished) / folder.name
            whole.mkdir()
            yield whole
            whole.rename(folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder} cannot be written: {error}; choose another place") from error


def write_json(path: Path, document: Mapping[str, object]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
