"""Where a measurement runs: device, driver, versions, commit, command line."""

from __future__ import annotations

import datetime
import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from antiphon.bench.results import Environment


def environment(model: str, device: torch.device, dtype: str) -> Environment:
    """model: in words."""
    return Environment(
        device=device_name(device),
        driver=_driver(device),
        torch=torch.__version__,
        cuda=torch.version.cuda or "none",
        triton=_version("triton"),
        python=platform.python_version(),
        commit=_commit(),
        model=model,
        dtype=dtype,
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def _driver(device: torch.device) -> str:
    if device.type != "cuda":
        return "none"
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        text = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found[0] if found else "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _commit() -> str:
    """Of the source tree, if it is one; with a plus if it was changed since."""
    folder = str(Path(__file__).parent)
    commit = _said("git", "-C", folder, "rev-parse", "--short", "HEAD").strip()
    if not commit:
        return "unknown"
    return commit + ("+" if _said("git", "-C", folder, "status", "--porcelain", "--untracked-files=no") else "")


def _said(*command: str) -> str:
    """What a program prints; nothing if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
